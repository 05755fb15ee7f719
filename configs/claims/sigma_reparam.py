"""sigmaReparam is as good as plain matrices.

Paper:    arXiv:2303.06296, Stabilizing Transformer Training by Preventing Attention Entropy
          Collapse
Says:     Dividing every matrix by its spectral norm and multiplying it by a learned scale trains
          stably and as well as plain matrices.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above that of plain matrices.
"""

from configs.claims import _shared

PART = 'reparametrisations'
CAUTION = (
    'sigmaReparam is worse than plain matrices by 0.05 nats for 1.4 million parameters and by 0.08 '
    'for 5.2 million, at rates divided by the width, which may be the reason; for 800 steps '
    'nothing is decided: configs/studies/results/ladder.md.'
)
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
    'twins': 'configs/studies/twins.py:blocks',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.reparam': 'sigma'},
        'difference': (None, 0.03),
        'label': 'loss difference, sigmaReparam minus plain matrices (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
TWIN = (
    {
        'study': 'twins',
        'arm': {'model.reparam': 'spectral_norm'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, sigmaReparam without its learned factor minus plain matrices (nats '
            'per token)'
        ),
    },
)
FIDELITY = {
    'sigmaReparam': {
        'setting': (
            'matrices of attention and MLPs, not the readout; gamma starts as the spectral norm '
            'and has no decay; RMSNorm in pre-norm stays; decay 0.1 of matrices, warm-up of 20 of '
            '200 steps, its own tuned rate'
        ),
        'published': (
            'every linear layer; gamma starts as the spectral norm; one power iteration per '
            'forward pass; ViT without norms, warm-up or decay; norms, rates and decay of the '
            'language models are not known here'
        ),
        'source': (
            'arXiv:2303.06296, abstract; apple/ml-sigma-reparam, README.md and vision/layers.py'
        ),
    },
    'plain matrices': {
        'setting': (
            'RMSNorm in pre-norm, AdamW with betas 0.9 and 0.95 and decay 0.1, warm-up of 20 of '
            '200 steps and cosine to 0, its own tuned rate'
        ),
        'published': 'causal Transformers; their norms and settings are not known here',
        'source': 'arXiv:2303.06296, abstract',
    },
}
