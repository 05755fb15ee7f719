"""AuON improves the condition of ill-conditioned updates and bounds their spectral norm.

Paper:    arXiv:2509.24320, AuON
Says:     Updates stay in a trust region of the spectral norm and ill-conditioned ones are
          reconditioned, without orthogonalising.
Here:     The update of 20 random gradients of shapes 128 x 128 and 64 x 256, ten seeds, without
          training. Condition numbers are those of the code's form, for gradients with a condition
          number of 1,000; the spectral norm is that of the paper's form.
Counts:   the condition number is at most half of that of Nesterov's momentum. The spectral norm is
          at most 2, the largest shape factor that the paper's form has here.
"""

PART = 'optimizers'
CAUTION = (
    'Both outcomes follow from the formulas. The code divides each matrix by one number, which '
    'changes no condition number, and the paper multiplies a matrix of norm 1 by at most 2. The '
    'measure checks that the code has these formulas.'
)
STUDIES = {
    'measure': 'measure:singular_values_of_updates',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'condition_number_of_auon_over_that_of_momentum',
        'within': (None, 0.5),
        'label': 'condition number of the AuON update over that of momentum',
    },
    {
        'study': 'measure',
        'value': 'spectral_norm_of_auon_of_paper',
        'within': (None, 2.0),
        'label': "spectral norm of the AuON update in the paper's form",
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'condition_number_of_muon_of_2_steps_over_that_of_momentum',
        'within': (None, 0.5),
        'label': (
            'condition number of the Muon update after two of its five steps over that of momentum'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'spectral_norm_of_auon_by_rows_of_paper',
        'within': (None, 2.0),
        'label': (
            "spectral norm in the paper's form, with the norm of each row in place of that "
            'of the matrix'
        ),
    },
)
FIDELITY = {
    'AuON': {
        'setting': (
            'momentum 0.95, Nesterov, 20 gradients in float64; the form of the code with gamma '
            '1.5 for the condition number, the form of the paper with gamma 1 and the factor '
            'sqrt(max(1, outputs / inputs)) for the spectral norm'
        ),
        'published': (
            'the same constants; the second form in bfloat16; gradients are those of language '
            'models'
        ),
        'source': 'github.com/ryyzn9/AuON, auon/optimizer.py and Auon_Adam_train.py',
    },
    'momentum': {
        'setting': 'Nesterov momentum 0.95 of the same gradients, in float64',
        'published': 'the same momentum, before AuON divides it',
        'source': 'github.com/ryyzn9/AuON, auon/optimizer.py',
    },
}
