"""AuON reconditions ill-posed updates and bounds their spectral norm.

Paper:    arXiv:2509.24320, AuON
Says:     updates stay in a trust region of the spectral norm, and ill-posed ones are reconditioned,
          without orthogonalising.
Here:     the update behind 20 drawn gradients of 128 x 128 and 64 x 256, ten seeds, no training;
          the condition numbers of the code's form where gradients have 1,000, the norm of the
          paper's.
Counts:   the condition number is at most half of that of Nesterov's momentum; the spectral norm is
          at most 2, the largest factor of a shape that the paper's form has here.
"""

PART = 'optimizers'
STUDIES = {
    'measure': 'measure:singular_values_of_updates',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'condition_number_of_auon_over_that_of_momentum',
        'within': (None, 0.5),
    },
    {'study': 'measure', 'value': 'spectral_norm_of_auon_of_paper', 'within': (None, 2.0)},
)
