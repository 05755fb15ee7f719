"""sigmaReparam keeps the spectral norm of each matrix at its gamma during training.

Paper:    arXiv:2303.06296, Stabilizing Transformer Training by Preventing Attention Entropy
          Collapse
Says:     Each matrix is divided by its spectral norm, for which one power iteration per step is
          enough. The matrix that is used then has the learned norm gamma.
Here:     Two layers of width 32 are trained for 60 steps by AdamW at 0.003, without a warm-up, on a
          Markov chain, five seeds. The paper trains larger models for far longer at lower rates, so
          their matrices change less per step.
Counts:   the spectral norm over gamma is within 1% of 1 on average over matrices and steps, and
          within 2% for every matrix at every step.
"""

PART = 'reparametrisations'
STUDIES = {
    'measure': 'measure:reparametrised_norms',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'mean_norm_over_gamma',
        'within': (0.99, 1.01),
        'label': 'spectral norm over gamma, mean',
    },
    {
        'study': 'measure',
        'value': 'largest_norm_over_gamma',
        'within': (None, 1.02),
        'label': 'spectral norm over gamma, largest',
    },
    {
        'study': 'measure',
        'value': 'least_norm_over_gamma',
        'within': (0.98, None),
        'label': 'spectral norm over gamma, smallest',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'mean_norm_over_gamma_of_100_iterations',
        'within': (0.99, 1.01),
        'label': 'spectral norm over gamma, mean, 100 iterations per step',
    },
    {
        'study': 'measure',
        'value': 'largest_norm_over_gamma_of_100_iterations',
        'within': (None, 1.02),
        'label': 'spectral norm over gamma, largest, 100 iterations per step',
    },
    {
        'study': 'measure',
        'value': 'least_norm_over_gamma_of_100_iterations',
        'within': (0.98, None),
        'label': 'spectral norm over gamma, smallest, 100 iterations per step',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'mean_norm_over_gamma_of_stale_vectors',
        'within': (0.99, 1.01),
        'label': (
            'spectral norm over gamma, mean, iterations that always start from the first vector'
        ),
    },
    {
        'study': 'measure',
        'value': 'largest_norm_over_gamma_of_stale_vectors',
        'within': (None, 1.02),
        'label': (
            'spectral norm over gamma, largest, iterations that always start from the first vector'
        ),
    },
    {
        'study': 'measure',
        'value': 'least_norm_over_gamma_of_stale_vectors',
        'within': (0.98, None),
        'label': (
            'spectral norm over gamma, smallest, iterations that always start from the first vector'
        ),
    },
)
FIDELITY = {
    'sigmaReparam': {
        'setting': (
            'gamma starts as the spectral norm, one power iteration per step from the exact '
            'vector; matrices of attention and MLPs only; AdamW with betas 0.9 and 0.95, constant '
            '0.003, decay 0.1 of matrices but not of gamma'
        ),
        'published': (
            'gamma starts at 1 (speech) or at the spectral norm (vision and language), one power '
            'iteration per forward pass from the exact vector; every linear layer; rates and decay '
            'of the language models are not known here'
        ),
        'source': (
            'arXiv:2303.06296; apple/ml-sigma-reparam, vision/layers.py and speech/layers.py'
        ),
    },
}
