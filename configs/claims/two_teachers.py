"""Balancing the temperatures and weights of two teachers helps in the weaker domain of the student.

Paper:    arXiv:2306.16170, Mitigating the Accuracy-Robustness Trade-off via Multi-Teacher
          Adversarial Distillation
Says:     With equal entropies and equal speeds of learning, a student of two teachers is better at
          both of their tasks; one teacher or fixed weights favour one of the two.
Here:     Two domains with 20 classes of Gaussian clusters each, a teacher of 256 units per domain,
          a student of 24 units, 1,000 steps, ten seeds. The paper's domains are images and attacked
          images, which are not tested here. The control has equal weights at temperature 1.
Counts:   the accuracy in the worse domain rises by at least one point, and the mean of both domains
          falls by at most half a point.
"""

PART = 'losses'
WITHDRAWN = (
    'The test does not discriminate: all conditions still hold with the rule for the temperatures '
    'inverted, and the gain is the same without the rule.'
)
STUDIES = {
    'measure': 'measure:balance_of_teachers',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'gain_in_the_worse_domain',
        'within': (0.01, None),
        'label': 'gain in accuracy in the worse domain (fraction)',
    },
    {
        'study': 'measure',
        'value': 'gain_in_the_mean',
        'within': (-0.005, None),
        'label': 'gain in the mean accuracy of both domains (fraction)',
    },
)
