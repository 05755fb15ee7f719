"""Balanced temperatures and weights of two teachers help where their student is worse.

Paper:    arXiv:2306.16170, Mitigating the Accuracy-Robustness Trade-off via Multi-Teacher
          Adversarial Distillation
Says:     with equal entropies and equal speeds of learning a student of two teachers is better in
          both of what they teach, where one teacher or fixed weights favour one of them.
Here:     two domains of 20 classes of Gaussian clusters, a teacher of 256 units on each, a student
          of 24 units, 1,000 steps, ten seeds; the paper's domains are images and attacked images,
          which are not part of it. Compared with equal weights at temperature 1.
Counts:   the accuracy in the worse domain rises by one point or more, and the mean of both falls by
          half a point at most.
"""

PART = 'losses'
WITHDRAWN = (
    'The test does not discriminate: with the rule of the temperatures inverted all conditions '
    'still hold, and without the rule the gain is the same.'
)
STUDIES = {
    'measure': 'measure:balance_of_teachers',
}
HOLDS = (
    {'study': 'measure', 'value': 'gain_in_the_worse_domain', 'within': (0.01, None)},
    {'study': 'measure', 'value': 'gain_in_the_mean', 'within': (-0.005, None)},
)
