"""ResiDual is better than both pre-norm and post-norm.

Paper:    arXiv:2304.14802, ResiDual: Transformer with Dual Residual Connections
Says:     A model with one residual stream of each kind combines the strengths of pre-norm and
          post-norm, and is better than either.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of pre-norm and that of post-norm.
"""

from configs.claims import _shared

PART = 'placements'
CAUTION = (
    'At embeddings of 1/8 ResiDual is better than pre-norm by 0.34 nats. So is post-norm, by 0.08 '
    '(configs/studies/results/nuisances.md), so that the test cannot tell there.'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
    **_shared.NORMS_SETTINGS,
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'resi_dual'},
        'difference': (None, 0.0),
        'label': 'loss difference, ResiDual minus pre-norm (nats per token)',
    },
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'resi_dual'},
        'against': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (None, 0.0),
        'label': 'loss difference, ResiDual minus post-norm (nats per token)',
    },
)
CONTROL = _shared.PERI_CONTROL
TWIN = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (None, 0.0),
        'label': (
            'loss difference, ResiDual whose pre-norm stream is not read, which is post-norm, '
            'minus pre-norm (nats per token)'
        ),
    },
)
NUISANCES = _shared.NORMS_NUISANCES
FIDELITY = {
    'ResiDual': {
        'setting': (
            'RMSNorm, both streams start as the embeddings, readout of x + N(r), causal model of 4 '
            'blocks, separate readout, its own tuned rate with 20 of 200 steps of warm-up'
        ),
        'published': (
            'LayerNorm, the same streams and sum, encoder-decoders of 6-6 layers for translation, '
            'tied embeddings; Adam with betas 0.9 and 0.98, decay 1e-4, rate 5e-4, warm-up of '
            '4,000 steps, then an inverse square root'
        ),
        'source': (
            'arXiv:2304.14802; microsoft/ResiDual, resi_dual/resi_dual.py and '
            'hydra_config/iwslt.yaml'
        ),
    },
    'pre-norm': {
        'setting': (
            'RMSNorm with a final norm, AdamW with betas 0.9 and 0.95 and decay 0.1, its own tuned '
            'rate, warm-up of 20 of 200 steps and cosine to 0, initial deviations of 1 '
            '(embeddings) and 1 / sqrt(fan_in) (matrices)'
        ),
        'published': 'the same translation tasks; the settings of this arm are not known here',
        'source': 'arXiv:2304.14802, abstract',
    },
    'post-norm': {
        'setting': (
            'RMSNorm, no final norm, initial values as pre-norm, its own tuned rate (0.003), the '
            'same warm-up'
        ),
        'published': 'the same translation tasks; the settings of this arm are not known here',
        'source': 'arXiv:2304.14802, abstract',
    },
}
