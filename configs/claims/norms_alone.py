"""Norms alone, trained on random matrices, are better than as many weights.

Paper:    arXiv:2003.00152, Training BatchNorm and Only BatchNorm
Says:     networks of random weights whose gains and biases of BatchNorm alone are trained are far
          more accurate than those in which as many weights are, and a large share of the gains goes
          to 0.
Here:     networks of four hidden layers of 128 units on 10 classes of Gaussian clusters, 4,096 rows
          seen 20 times, each part at the best of five rates, ten seeds; the readout stays as it was
          drawn. The paper trains convolutional networks of up to 866 layers on images, in which the
          share of gains below 0.01 is a third and more.
Counts:   the accuracy is at least five points above that with two weights of each unit, and a fifth
          of the gains or more is below 0.01.
"""

PART = 'norms'
STUDIES = {
    'measure': 'measure:norms_alone',
}
HOLDS = (
    {'study': 'measure', 'value': 'gain_of_norms_over_weights', 'within': (0.05, None)},
    {'study': 'measure', 'value': 'share_of_gains_near_0', 'within': (0.2, None)},
)
