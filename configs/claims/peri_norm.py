"""Norms before and after each sublayer are better than pre-norm.

Paper:    arXiv:2502.02732, Peri-LN
Says:     Norms before and after each sublayer give lower losses and fewer instabilities than
          pre-norm.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of pre-norm.
"""

from configs.claims import _shared

PART = 'placements'
CAUTION = _shared.SMALL_START_CAUTION
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
    **_shared.NORMS_SETTINGS,
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'peri'},
        'difference': (None, 0.0),
        'label': 'loss difference, Peri-LN minus pre-norm (nats per token)',
    },
)
CONTROL = _shared.NORMS_CONTROL
TWIN = _shared.NO_NORM_TWIN
NUISANCES = _shared.NORMS_NUISANCES
FIDELITY = {
    'Peri-LN': {
        'setting': (
            'RMSNorm with gains that start at 1, a final norm, no norm of the embeddings, which '
            'start with a standard deviation of 1; its own tuned rate'
        ),
        'published': (
            'learned gains, a final norm, and a norm of the embeddings that is optional; models of '
            '0.4 to 3.2 billion parameters on 30 billion tokens, sequences of 8,192, several '
            'rates; the rest is not known here'
        ),
        'source': 'arXiv:2502.02732, read in notes of others',
    },
    'pre-norm': {
        'setting': (
            'RMSNorm with a final norm, AdamW with betas 0.9 and 0.95 and decay 0.1, its own tuned '
            'rate, warm-up of 20 of 200 steps and cosine to 0, initial deviations of 1 '
            '(embeddings) and 1 / sqrt(fan_in) (matrices)'
        ),
        'published': (
            'the same models and data, best at a rate of 0.002; the rest is not known here'
        ),
        'source': 'arXiv:2502.02732, read in notes of others',
    },
}
