"""SeeDNorm reaches a lower loss than RMSNorm.

Paper:    arXiv:2510.22777, SeeDNorm: Self-Rescaled Dynamic Normalization
Says:     A gain that depends on the token lowers the loss of language models, dense and sparse.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of RMSNorm.
"""

from configs.claims import _shared

PART = 'norms'
CAUTION = _shared.SMALL_START_CAUTION
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
    **_shared.NORMS_SETTINGS,
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'seednorm', 'model.placement': 'pre'},
        'difference': (None, 0.0),
        'label': 'loss difference, SeeDNorm minus RMSNorm (nats per token)',
    },
)
CONTROL = _shared.NORMS_CONTROL
TWIN = _shared.NO_NORM_TWIN
NUISANCES = _shared.NORMS_NUISANCES
FIDELITY = {
    'SeeDNorm': {
        'setting': (
            'gain 1, alpha 1, beta 0, one slice, decay 0.1 of alpha and beta but not of the gain; '
            'in place of every norm, in pre-norm without norms of queries and keys'
        ),
        'published': (
            'gain 1, alpha 1, beta 0, decay of alpha and beta, one slice in language models; '
            'OLMo2-1B and OLMoE-1.3B on 500 billion tokens gain 0.005 and 0.022 nats; rates and '
            'places are not known here'
        ),
        'source': 'arXiv:2510.22777, read in notes of others; the official code is not public',
    },
    'RMSNorm': {
        'setting': (
            'eps 1e-6, AdamW with betas 0.9 and 0.95 and decay 0.1 of matrices and embeddings, its '
            'own tuned rate, warm-up of 20 of 200 steps and cosine to 0, 8 x 128 tokens per step'
        ),
        'published': (
            'OLMo2 and OLMoE as published, with OLMo2 having norms after sublayers and of queries '
            'and keys'
        ),
        'source': 'arXiv:2510.22777, read in notes of others; arXiv:2501.00656',
    },
}
