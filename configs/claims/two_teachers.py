"""Balancing the temperatures and weights of two teachers helps in the weaker domain of the student.

Paper:    arXiv:2306.16170, Mitigating the Accuracy-Robustness Trade-off via Multi-Teacher
          Adversarial Distillation
Says:     With equal entropies and equal speeds of learning, a student of two teachers is better at
          both of their tasks; one teacher or fixed weights favour one of the two.
Here:     Two domains with 20 classes of Gaussian clusters each, a teacher of 256 units per domain,
          a student of 24 units, 1,000 steps, ten seeds. The paper's domains are images and attacked
          images, which are not tested here. Gains are over equal weights at temperature 1.
Counts:   the accuracy in the worse domain rises by at least one point, and the mean of both domains
          falls by at most half a point.
"""

PART = 'losses'
CAUTION = (
    'The test rejects the rule for the temperatures with a wrong sign, but not its absence: '
    'balanced weights alone have about the same gain.'
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
CONTROL = (
    {
        'study': 'measure',
        'value': 'gain_in_the_worse_domain_of_fixed',
        'within': (0.01, None),
        'label': 'gain in accuracy in the worse domain (fraction), a fixed weight of 2/3 on it',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'gain_in_the_worse_domain_of_inverted',
        'within': (0.01, None),
        'label': (
            'gain in accuracy in the worse domain (fraction), the smoother teacher becomes smoother'
        ),
    },
    {
        'study': 'measure',
        'value': 'gain_in_the_mean_of_inverted',
        'within': (-0.005, None),
        'label': (
            'gain in the mean accuracy of both domains (fraction), the smoother teacher becomes '
            'smoother'
        ),
    },
    {
        'study': 'measure',
        'value': 'gain_in_the_worse_domain_of_weights_alone',
        'within': (0.01, None),
        'label': 'gain in accuracy in the worse domain (fraction), temperatures of 1',
    },
)
FIDELITY = {
    'balanced teachers': {
        'setting': (
            'weights change by 0.025 and temperatures, which start at 1, by 0.1 per step of 1,000, '
            'so that they can reach 10 in 9% of the steps; no attacks; SGD at 0.05, momentum 0.9, '
            'decay 5e-4, a cosine to 0, batch 64'
        ),
        'published': (
            'weights by 0.025 and temperatures by 0.001 per step, so that they can reach 10, their '
            'maximum, in 8% of 300 epochs; both cut by 10 at epochs 215, 260 and 285; one teacher '
            'sees attacked images; SGD at 0.1, momentum 0.9, decay 2e-4, batch 128'
        ),
        'source': (
            'arXiv:2306.16170; github.com/zhaoshiji123/MTARD-extension, resnet18_mtard_cifar10.py'
        ),
    },
    'equal weights': {
        'setting': 'weights of 1/2 and temperatures of 1 throughout, the same training',
        'published': (
            'fixed weights and temperatures as an ablation; their values are not known here'
        ),
        'source': 'arXiv:2306.16170',
    },
}
