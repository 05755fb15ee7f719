"""Random calibrated losses are more accurate than the logistic loss.

Paper:    arXiv:2409.00908, EnsLoss: Stochastic Calibrated Loss Ensembles for Preventing Overfitting
          in Classification
Says:     Drawing the slope of the loss in each step from those of convex calibrated losses keeps a
          network from overfitting, so that it is more accurate than with any fixed loss.
Here:     Networks with two hidden layers of 128 units classify two classes of Gaussian clusters:
          1,024 inputs seen 60 times, ten seeds, each loss at the best of three learning rates. The
          paper trains convolutional networks on pairs of CIFAR-10 classes, and other networks on
          tables.
Counts:   the held-out accuracy is at least half a point above that of the logistic loss.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:binary_accuracy',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'gain_of_random_slopes',
        'within': (0.005, None),
        'label': 'accuracy with random slopes minus that of the logistic loss (fraction)',
    },
)
