"""Averaging independent models shrinks their variance, and rescaling the mean saves steps.

Paper:    arXiv:2404.04616, Vanishing Variance Problem in Fully Decentralized Neural-Network Systems
Says:     the mean of models that are not correlated has lost the variance that they were started
          with, which delays training; rescaled to it, workers without a server converge about as
          fast as those with one, who begin alike.
Here:     four tiny models of width 32 and two blocks, without norms, on a drawn language; all are
          averaged with all each 50 steps, 200 steps in all, from different starts and from one;
          one learning rate, not tuned. The paper simulates networks of many nodes that average
          with neighbours and train on images, for longer.
Counts:   the variance of the mean of four starts is a quarter of theirs to 5%, and theirs to 5%
          when rescaled; rescaling saves a fifth of the steps or more from different starts, and
          from one start it changes less than a tenth of them.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:merged_starts',
}
HOLDS = (
    {'study': 'measure', 'value': 'variance_of_the_mean', 'within': (0.2375, 0.2625)},
    {'study': 'measure', 'value': 'variance_of_the_mean_rescaled', 'within': (0.95, 1.05)},
    {'study': 'measure', 'value': 'steps_saved_from_different_starts', 'within': (0.2, None)},
    {'study': 'measure', 'value': 'steps_saved_from_one_start', 'within': (-0.1, 0.1)},
)
