"""A loss of standardised logits is better than cross-entropy in ranks.

Paper:    arXiv:1604.08859, The Z-loss: a shift and scale invariant classification loss belonging to
          the Spherical Family
Says:     a loss of the label's standard score, whose two numbers are tuned, puts the class among
          the first ten more often than log-softmax does.
Here:     networks of two hidden layers of 128 units on 512 classes, a Gaussian each, 8,192 rows
          seen 8 times, each loss at the best of five rates, and this one at the best of six
          settings, ten seeds; the paper trains language models of large vocabularies.
Counts:   the class is among the first ten for at least half a point of the inputs more.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:ranks',
}
HOLDS = ({'study': 'measure', 'value': 'top_10_gain_of_spherical', 'within': (0.005, None)},)
