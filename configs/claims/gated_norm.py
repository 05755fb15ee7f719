"""A gated RMSNorm reaches a lower loss than RMSNorm.

Paper:    arXiv:2601.22966
Says:     A low-rank gate after each norm, on top of gated attention, makes outliers in the stream
          needless and lowers the loss.
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
        'arm': {'model.norm': 'gated_rmsnorm', 'model.placement': 'pre'},
        'difference': (None, 0.0),
        'label': 'loss difference, gated RMSNorm minus RMSNorm (nats per token)',
    },
)
CONTROL = _shared.NORMS_CONTROL
TWIN = _shared.NO_NORM_TWIN
NUISANCES = _shared.NORMS_NUISANCES
FIDELITY = {
    'gated RMSNorm': {
        'setting': (
            'rank 16 at width 64 after each norm, the final one too, which adds 7% of parameters; '
            'the gate starts near 1/2; attention has no gate, unlike that of the authors'
        ),
        'published': (
            'rank 16 at width 2,048 after each norm, on top of gated attention, which lowers '
            'the loss (1.957 to 1.951), with the MLP made narrower for the same number of '
            'parameters; the initial values are not known here'
        ),
        'source': 'arXiv:2601.22966, section 3.4 and table 1',
    },
    'RMSNorm': {
        'setting': (
            'eps 1e-6, AdamW with betas 0.9 and 0.95 and decay 0.1 of matrices and embeddings, its '
            'own tuned rate, warm-up of 20 of 200 steps and cosine to 0, 8 x 128 tokens per step; '
            'attention has no gate'
        ),
        'published': (
            'compared at a peak rate of 0.0043, 2 billion parameters, 120 billion tokens; the '
            'reference of GatedNorm has gated attention; the rest is not known here'
        ),
        'source': 'arXiv:2601.22966, table 1 and appendix A.4.1',
    },
}
