"""AuON's published code returns Nesterov's momentum, up to a thousandth.

Paper:    arXiv:2509.24320, AuON
Says:     Momentum divided by the root mean square of a hyperbolic cosine is an alternative to
          orthogonal updates. The claim tested here is not the paper's but our reading of its code:
          the divisor is so close to 1 that it leaves momentum alone.
Here:     The update of 20 random gradients of shapes 128 x 128 and 64 x 256, ten seeds, without
          training. The gradients include random ones and some with a condition number of 1,000. The
          divisor is about 1 + 1.1 / n for a matrix of n entries, so that smaller matrices, such as
          16 x 16, differ by more.
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
CONTROL = (
    {
        'study': 'measure',
        'value': 'relative_difference_of_small_auon_from_momentum',
        'within': (0.001, None),
        'label': 'relative difference between the AuON update and momentum, 16 x 16 matrices',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'relative_difference_of_auon_by_rows_from_momentum',
        'within': (None, 0.001),
        'label': (
            'relative difference from momentum, with the norm of each row in place of that '
            'of the matrix'
        ),
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
