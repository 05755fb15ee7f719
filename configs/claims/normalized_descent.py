"""Gradients over the share of errors separate points in as few steps as a perceptron.

Paper:    arXiv:2412.08424, From Logistic Regression to the Perceptron Algorithm
Says:     with large steps gradient descent of logistic regression takes up to n R^2 / mu^2 of them
          for n points of length R and margin mu, and R^2 / mu^2 with gradients over the mean
          probability of an error: 2 for 308 on the worst points, 311 for 538 on imbalanced images,
          but 3160 for 2778 on balanced ones.
Here:     points in the plane of which one disagrees with the others, made after the bound, as we do
          not have the worst points of the paper; 600 drawn points of 32 coordinates in [0, 1] in
          place of images, 2% or half of them on one side, fifty seeds; a rate of 100. The first ten
          of the seeds, looked at before, left the balanced points undecided.
Counts:   the slope of log steps over log n is between 0.8 and 1.2 for plain descent, and between
          -0.1 and 0.1 for the other; that takes at most 0.8 of the steps on imbalanced points, and
          at most twice as many on balanced ones.
"""

PART = 'optimizers'
STUDIES = {
    'measure': 'measure:steps_to_separate',
}
HOLDS = (
    {'study': 'measure', 'value': 'slope_of_plain_steps_over_points', 'within': (0.8, 1.2)},
    {'study': 'measure', 'value': 'slope_of_normalized_steps_over_points', 'within': (-0.1, 0.1)},
    {
        'study': 'measure',
        'value': 'normalized_over_plain_steps_of_imbalanced_points',
        'within': (None, 0.8),
    },
    {
        'study': 'measure',
        'value': 'normalized_over_plain_steps_of_balanced_points',
        'within': (None, 2.0),
    },
)
