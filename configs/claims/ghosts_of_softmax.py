"""A step within the radius of convergence of cross-entropy costs no accuracy.

Paper:    arXiv:2603.13552, Ghosts of Softmax
Says:     Let r be the largest spread, over tokens, of the logits' derivative along a step, divided
          by pi. No model fails in a step of r < 1, and models collapse once r is above 1. Failure
          thresholds vary 0.165 times as much in r as in step length. Steps limited to r = 1 survive
          learning rates that are 10,000 times too large, which clipped gradients do not.
Here:     A causal transformer with two layers, width 64 and rows of 32 tokens is trained on random
          Markov chains. At four points of 160 steps it takes steps along the gradient, along
          AdamW's update and along random numbers, with batches of 512 tokens and five seeds. An
          update that raises the accuracy counts as leaving all of it. The paper has six
          architectures on images. Its thresholds vary over temperatures of the softmax, ours over
          points and directions.
Counts:   at most 5% of the accuracy is lost at r up to 0.95. The median r at which 5% is lost is
          between 1 and 3. The logarithm of that r varies at most 0.3 times as much as that of the
          length. After an update with 10,000 times the learning rate, at least 90% of the accuracy
          is left with the radius limit and at most half with clipping.
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
        'label': 'largest share of accuracy lost at r below 1 (fraction)',
    },
    {
        'study': 'measure',
        'value': 'median_r_at_which_accuracy_falls',
        'within': (1.0, 3.0),
        'label': 'median r at which 5% of the accuracy is lost',
    },
    {
        'study': 'measure',
        'value': 'deviation_of_log_r_over_that_of_log_length',
        'within': (None, 0.3),
        'label': 'standard deviation of log r over that of log length',
    },
    {
        'study': 'measure',
        'value': 'accuracy_kept_over_a_spike_with_the_controller',
        'within': (0.9, None),
        'label': 'share of accuracy left after a spike, with the radius limit (fraction)',
    },
    {
        'study': 'measure',
        'value': 'accuracy_kept_over_a_spike_with_clipping',
        'within': (None, 0.5),
        'label': 'share of accuracy left after a spike, with clipping (fraction)',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'median_share_of_accuracy_lost_far_beyond_1',
        'within': (0.05, None),
        'label': 'median share of accuracy lost by a step of 16 radii (fraction)',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'accuracy_kept_over_a_spike_with_a_limited_deviation',
        'within': (0.9, None),
        'label': (
            'share of accuracy left after a spike, with a radius limit that has the standard '
            "deviation of the logits' derivative in place of its range (fraction)"
        ),
    },
)
FIDELITY = {
    'step': {
        'setting': (
            'r and accuracy over the same 512 held-out tokens of 64 kinds, temperature 1; '
            "failure is a loss of 5% of the accuracy; along the gradient, AdamW's update with "
            'its decay, and one random direction'
        ),
        'published': (
            'r and loss over the training images of 10 digits, temperatures 0.25 to 8; the '
            'threshold is a loss 2 or 1.1 times as high; along the gradient and 20 random '
            'directions'
        ),
        'source': (
            'github.com/piyush314/ghosts-of-softmax, experiments/tempfingerprint/run.py and '
            'phasetransition/run.py'
        ),
    },
    'radius limit': {
        'setting': (
            'r of the whole update, decay included, is at most 1 on the batch of the step; one '
            'update at 10,000 times the rate of AdamW, 0.005 after warm-up'
        ),
        'published': (
            'r of the update of Adam, without decay, is at most 1 over all training images; '
            'the rate is 1,000 times as high from step 50 to 200; base rates 0.0001 to 0.01, '
            'test accuracy'
        ),
        'source': 'github.com/piyush314/ghosts-of-softmax, experiments/lrspike/run.py',
    },
    'clipping': {
        'setting': (
            'gradients of norm at most 1, then AdamW; its decay of 0.1 times the rate is part '
            'of the spike; one update at 10,000 times the rate'
        ),
        'published': (
            'gradients of norm at most 1, then Adam without decay; one step at 10 times a rate '
            'of 0.015 in the code; the setting for 10,000 times is not known here'
        ),
        'source': 'github.com/piyush314/ghosts-of-softmax, experiments/archgrid/run.py',
    },
}
