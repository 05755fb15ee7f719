"""sigmaReparam keeps the spectral norm of each matrix at its gamma as it trains.

Paper:    arXiv:2303.06296, Stabilizing Transformer Training by Preventing Attention Entropy
          Collapse
Says:     each matrix is divided by its spectral norm, for which one power iteration a step is
          enough, so that what it multiplies by is gamma, which is learned.
Here:     two layers of width 32, 60 steps of AdamW at 0.003 without a warm-up on a Markov chain,
          five seeds; the paper trains larger models for far longer at lower rates, whose matrices
          change less in a step.
Counts:   the spectral norm over gamma is within 1% of 1 in the mean over matrices and steps, and
          within 2% for every matrix at every step.
"""

PART = 'reparametrisations'
STUDIES = {
    'measure': 'measure:reparametrised_norms',
}
HOLDS = (
    {'study': 'measure', 'value': 'mean_norm_over_gamma', 'within': (0.99, 1.01)},
    {'study': 'measure', 'value': 'largest_norm_over_gamma', 'within': (None, 1.02)},
    {'study': 'measure', 'value': 'least_norm_over_gamma', 'within': (0.98, None)},
)
