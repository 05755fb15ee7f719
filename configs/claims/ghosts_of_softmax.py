"""A step within the radius of convergence of cross-entropy costs no accuracy.

Paper:    arXiv:2603.13552, Ghosts of Softmax
Says:     no model fails in a step of r < 1, with r the largest spread of the logits' derivative
          along the step over pi, and models collapse once r is above 1; thresholds are 0.165 times
          as spread in r as in length; steps that are kept to r = 1 survive learning rates that are
          10,000 times too large, where clipped gradients do not.
Here:     a causal transformer of two layers, width 64 and 64 tokens on drawn chains, at four points
          of 160 steps, along the gradient, the update of AdamW and random numbers, 512 tokens a
          batch, five seeds; the paper has six architectures on images, and its thresholds are of
          temperatures of the softmax in place of points and directions.
Counts:   at most 5% of the accuracy is lost at r up to 0.95; the median r at which 5% is lost is
          between 1 and 3; the logarithm of that r is at most 0.3 times as spread as that of the
          length; over an update of 10,000 times the learning rate at least 90% of the accuracy is
          kept with the radius and at most half with clipping.
"""

PART = 'optimizers'
STUDIES = {
    'measure': 'measure:steps_around_the_radius',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'largest_share_of_accuracy_lost_below_1',
        'within': (None, 0.05),
    },
    {'study': 'measure', 'value': 'median_r_at_which_accuracy_falls', 'within': (1.0, 3.0)},
    {
        'study': 'measure',
        'value': 'deviation_of_log_r_over_that_of_log_length',
        'within': (None, 0.3),
    },
    {
        'study': 'measure',
        'value': 'accuracy_kept_over_a_spike_with_the_controller',
        'within': (0.9, None),
    },
    {
        'study': 'measure',
        'value': 'accuracy_kept_over_a_spike_with_clipping',
        'within': (None, 0.5),
    },
)
