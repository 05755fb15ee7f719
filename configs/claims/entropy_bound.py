"""Spectral norms bound the entropy of attention from below.

Paper:    arXiv:2303.06296, Stabilizing Transformer Training by Preventing Attention Entropy
          Collapse
Says:     the least entropy that attention can have falls exponentially with the spectral norm of
          W_K W_Q^T, the bound is reached, and sigmaReparam keeps that norm from growing with the
          matrices, so that the entropy does not collapse.
Here:     drawn matrices and inputs, 16 tokens in 16 dimensions, ten seeds, attention to all tokens;
          the theorem and the map, and no training, of which the paper's evidence is.
Counts:   no row's entropy is below the bound; the paper's worst case is within 0.1% of it; where
          stored matrices grow tenfold, the entropy stays above 0.7 of the most with sigmaReparam,
          and falls below 0.2 without.
"""

PART = 'reparametrisations'
STUDIES = {
    'measure': 'measure:attention_entropy',
}
HOLDS = (
    {'study': 'measure', 'value': 'least_over_bound', 'within': (1.0, None)},
    {
        'study': 'measure',
        'value': 'most_over_bound_of_the_construction',
        'within': (0.999, 1.001),
    },
    {'study': 'measure', 'value': 'share_of_grown_with_sigma', 'within': (0.7, None)},
    {'study': 'measure', 'value': 'share_of_grown_without', 'within': (None, 0.2)},
)
