"""Post-norm is worse than pre-norm with a short warm-up.

Paper:    arXiv:2002.04745, On Layer Normalization in the Transformer Architecture
Says:     Gradients near the output of a post-norm model are large at initialisation, so post-norm
          needs a careful warm-up and pre-norm does not.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is higher than that of pre-norm after a warm-up of 20 of 200 steps.
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
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (0.0, None),
        'label': 'loss difference, post-norm minus pre-norm (nats per token)',
    },
)
CONTROL = _shared.PERI_CONTROL
TWIN = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'deepnorm'},
        'difference': (0.0, None),
        'label': (
            'loss difference, post-norm with the initial weights and the residual factor of '
            'DeepNorm, whose gradients are not large at the start, minus pre-norm (nats per token)'
        ),
    },
)
NUISANCES = _shared.NORMS_NUISANCES
FIDELITY = {
    'post-norm': {
        'setting': (
            'RMSNorm, no final norm, causal model, initial values as pre-norm, warm-up of 20 of '
            '200 steps and cosine to 0, its own tuned rate (0.003)'
        ),
        'published': (
            'LayerNorm, Xavier, encoder-decoders of 6-6 layers, Adam with betas 0.9 and 0.98, '
            'rates 5e-4 and 1e-3, warm-up of 1, 500 or 4,000 steps, then an inverse square root'
        ),
        'source': 'arXiv:2002.04745, sections 3.2 and 4.1',
    },
    'pre-norm': {
        'setting': (
            'RMSNorm with a final norm, AdamW with betas 0.9 and 0.95 and decay 0.1, its own tuned '
            'rate, warm-up of 20 of 200 steps and cosine to 0, initial deviations of 1 '
            '(embeddings) and 1 / sqrt(fan_in) (matrices) (the tuned rate is 0.02)'
        ),
        'published': (
            'the same peak rates as post-norm, no warm-up, and steps down by a factor of ten after '
            'some epochs'
        ),
        'source': 'arXiv:2002.04745, sections 3.2 and 4.1',
    },
}
