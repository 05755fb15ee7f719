"""DeepNorm is better than post-norm, and no worse than pre-norm.

Paper:    arXiv:2203.00555, DeepNet: Scaling Transformers to 1,000 Layers
Says:     Scaled residuals and smaller initial weights give post-norm the stability of pre-norm and
          keep its quality.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of post-norm, and at most 0.03 nats above that of pre-norm.
"""

from configs.claims import _shared

PART = 'placements'
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
    **_shared.NORMS_SETTINGS,
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'deepnorm'},
        'difference': (None, 0.03),
        'label': 'loss difference, DeepNorm minus pre-norm (nats per token)',
    },
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'deepnorm'},
        'against': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (None, 0.0),
        'label': 'loss difference, DeepNorm minus post-norm (nats per token)',
    },
)
CONTROL = _shared.PERI_CONTROL
TWIN = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, DeepNorm without its constants, which is post-norm, '
            'minus pre-norm (nats per token)'
        ),
    },
)
NUISANCES = _shared.NORMS_NUISANCES
FIDELITY = {
    'DeepNorm': {
        'setting': (
            'RMSNorm, residual factor (2 x 4)^(1/4) = 1.68, values, attention outputs and MLPs '
            'start with deviations of 0.42 / sqrt(fan_in), not Xavier; queries and keys start '
            'unscaled; its own tuned rate'
        ),
        'published': (
            'LayerNorm, residual factor (2 L)^(1/4) for decoders, the same matrices divided by (8 '
            'L)^(1/4) after Xavier; the main results are for encoder-decoders with other factors'
        ),
        'source': 'arXiv:2203.00555; microsoft/torchscale, torchscale/architecture/decoder.py',
    },
    'pre-norm': {
        'setting': (
            'RMSNorm with a final norm, AdamW with betas 0.9 and 0.95 and decay 0.1, its own tuned '
            'rate, warm-up of 20 of 200 steps and cosine to 0, initial deviations of 1 '
            '(embeddings) and 1 / sqrt(fan_in) (matrices)'
        ),
        'published': 'LayerNorm; its training settings are not known here',
        'source': 'arXiv:2203.00555, abstract',
    },
    'post-norm': {
        'setting': (
            'RMSNorm, no final norm, initial values as pre-norm, the same warm-up of 20 steps, its '
            'own tuned rate (0.003)'
        ),
        'published': 'LayerNorm; its training settings are not known here',
        'source': 'arXiv:2203.00555, abstract',
    },
}
