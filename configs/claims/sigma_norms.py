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
