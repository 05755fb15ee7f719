"""The update of AuON, as published, is Nesterov's momentum.

Paper:    arXiv:2509.24320, AuON
Says:     Momentum divided by the root mean square of a hyperbolic cosine is an alternative to
          orthogonal updates. That the cosine is close to 1, which leaves plain momentum, is our
          reading of its code.
Here:     The update of 20 random gradients of shapes 128 x 128 and 64 x 256, ten seeds, without
          training. The gradients include random ones and some with a condition number of 1,000.
Counts:   the two updates differ by at most 0.001 of their norm.
"""

PART = 'optimizers'
STUDIES = {
    'measure': 'measure:singular_values_of_updates',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'relative_difference_of_auon_from_momentum',
        'within': (None, 0.001),
        'label': 'relative difference between the AuON update and momentum',
    },
)
FIDELITY = {
    'AuON': {
        'setting': (
            'the form of the code: momentum 0.95, Nesterov, gamma 1.5; 20 gradients in float64'
        ),
        'published': 'the same constants, for matrices of width 768',
        'source': 'github.com/ryyzn9/AuON, training/config.py and auon/optimizer.py',
    },
    'momentum': {
        'setting': 'Nesterov momentum 0.95 of the same gradients, as an average',
        'published': 'the same momentum, before AuON divides it',
        'source': 'github.com/ryyzn9/AuON, auon/optimizer.py',
    },
}
