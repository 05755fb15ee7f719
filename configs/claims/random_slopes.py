"""Random calibrated losses are more accurate than the logistic loss.

Paper:    arXiv:2409.00908, EnsLoss: Stochastic Calibrated Loss Ensembles for Preventing Overfitting
          in Classification
Says:     slopes that are drawn in each step among those of convex calibrated losses keep a network
          from overfitting, so that it is more accurate than by any fixed loss.
Here:     networks of two hidden layers of 128 units on two classes of Gaussian clusters, 1,024
          inputs seen 60 times, ten seeds, each loss at the best of three rates; the paper trains
          convolutional networks on pairs of CIFAR-10 classes, and others on tables.
Counts:   the held-out accuracy is above that by the logistic loss by half a point or more.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:binary_accuracy',
}
HOLDS = ({'study': 'measure', 'value': 'gain_of_random_slopes', 'within': (0.005, None)},)
