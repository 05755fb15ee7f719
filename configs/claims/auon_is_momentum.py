"""The update of AuON, as published, is that of Nesterov's momentum.

Paper:    arXiv:2509.24320, AuON
Says:     momentum over the root mean square of a hyperbolic cosine is an alternative to orthogonal
          updates; that the cosine is next to 1, so that momentum is left, is our reading of its
          code.
Here:     the update behind 20 drawn gradients of 128 x 128 and 64 x 256, random ones and some of
          condition 1,000, ten seeds; no training.
Counts:   the two updates differ by at most 0.001 of their length.
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
    },
)
