"""Spectral norms bound the entropy of attention from below.

Paper:    arXiv:2303.06296, Stabilizing Transformer Training by Preventing Attention Entropy
          Collapse
Says:     The lowest possible entropy of attention falls exponentially with the spectral norm of W_K
          W_Q^T, and the bound is attained. sigmaReparam keeps that norm from growing with the
          matrices, so the entropy does not collapse.
Here:     Random matrices and inputs with 16 tokens in 16 dimensions, ten seeds, attention to all
          tokens. This tests the theorem and the reparametrisation, without training; the paper's
          evidence is from training.
Counts:   no row's entropy is below the bound, and the paper's worst case is within 0.1% of it. If
          the stored matrices grow tenfold, the entropy stays above 0.7 of its maximum with
          sigmaReparam, and falls below 0.2 without.
"""

PART = 'reparametrisations'
STUDIES = {
    'measure': 'measure:attention_entropy',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'least_over_bound',
        'within': (1.0, None),
        'label': 'lowest entropy over the bound',
    },
    {
        'study': 'measure',
        'value': 'most_over_bound_of_the_construction',
        'within': (0.999, 1.001),
        'label': "highest entropy over the bound, the paper's worst case",
    },
    {
        'study': 'measure',
        'value': 'share_of_grown_with_sigma',
        'within': (0.7, None),
        'label': 'entropy over its maximum after growth, with sigmaReparam',
    },
    {
        'study': 'measure',
        'value': 'share_of_grown_without',
        'within': (None, 0.2),
        'label': 'entropy over its maximum after growth, without',
    },
)
