"""Spectral norms bound the entropy of attention from below.

Paper:    arXiv:2303.06296, Stabilizing Transformer Training by Preventing Attention Entropy
          Collapse
Says:     The lowest possible entropy of attention falls exponentially with the spectral norm of W_K
          W_Q^T, and the bound is attained. sigmaReparam keeps that norm from growing with the
          matrices, so the entropy does not collapse.
Here:     16 tokens in 16 dimensions, ten seeds, attention to all tokens. The lowest entropy is
          searched around the paper's worst case with noise of 0.1% to 100%, and for growth inputs
          and matrices are random. This tests the theorem and the reparametrisation, without
          training; the paper's evidence is from training.
Counts:   no row's entropy is below the bound, and the paper's worst case is within 0.1% of it. If
          the stored matrices grow tenfold, the entropy stays above 0.7 of its maximum with
          sigmaReparam.
"""

PART = 'reparametrisations'
CAUTION = (
    'The last condition holds by construction: sigmaReparam fixes the norm of each matrix, so '
    'that the growth of a stored matrix changes nothing.'
)
STUDIES = {
    'measure': 'measure:attention_entropy',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'least_over_bound',
        'within': (1.0, None),
        'label': 'lowest entropy over the bound, around the worst case',
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
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'least_over_bound_of_smaller_norms',
        'within': (None, 1.0),
        'label': 'lowest entropy over the bound of norms that are 1% smaller',
    },
    {
        'study': 'measure',
        'value': 'share_of_grown_without',
        'within': (None, 0.2),
        'label': 'entropy over its maximum after growth, without sigmaReparam',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'least_over_bound_without_the_root',
        'within': (1.0, None),
        'label': 'lowest entropy over the bound without sqrt(T / (T - 1)) in its exponent',
    },
    {
        'study': 'measure',
        'value': 'share_of_grown_with_sigma_of_keys',
        'within': (0.7, None),
        'label': 'entropy over its maximum after growth, with sigmaReparam of the keys alone',
    },
)
FIDELITY = {
    'sigmaReparam': {
        'setting': (
            'both matrices are 16 x 16. Bound: the product of their spectral norms times that of '
            'X X^T is set to 0.5 to 8. Growth: gamma starts as the spectral norm and stays, while '
            'the matrices grow tenfold at once; one power iteration from the exact vector'
        ),
        'published': (
            'gamma is learned and may grow; it starts at 1 (speech) or at the spectral norm '
            '(vision and language); the bound holds for any T and any matrices'
        ),
        'source': (
            'arXiv:2303.06296, theorem 3.1; apple/ml-sigma-reparam, vision/layers.py and '
            'speech/layers.py'
        ),
    },
    'without': {
        'setting': (
            'the same matrices with entries of variance 1 / fan_in, multiplied by 10, logits over '
            'sqrt(16)'
        ),
        'published': 'trained models, in which low entropy comes with unstable training',
        'source': 'arXiv:2303.06296, abstract; apple/ml-sigma-reparam, README.md',
    },
}
