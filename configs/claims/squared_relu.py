"""Squared ReLU reaches a lower loss than GELU and ReLU.

Paper:    arXiv:2109.08668, Primer
Says:     Of the changes that an architecture search found, squaring the ReLU is the most useful.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is lower than that of GELU and that of ReLU.
"""

from configs.claims import _shared

PART = 'activations'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.activation': 'squared_relu'},
        'difference': (None, 0.0),
        'label': 'loss difference, squared ReLU minus GELU (nats per token)',
    },
    {
        'study': 'blocks',
        'arm': {'model.activation': 'squared_relu'},
        'against': {'model.activation': 'relu'},
        'difference': (None, 0.0),
        'label': 'loss difference, squared ReLU minus ReLU (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
FIDELITY = {
    'squared ReLU': {
        'setting': (
            'pre-norm with RMSNorm, no biases, AdamW with betas 0.9 and 0.95 and decay 0.1, its '
            'own tuned rate, warm-up of 20 of 200 steps and cosine to 0'
        ),
        'published': (
            'T5 code, LayerNorm in pre-norm, biases in the MLPs, 110 million parameters, tied '
            'embeddings, Adafactor, inverse square root, a million steps of 65,536 tokens in '
            'sequences of 512, no dropout'
        ),
        'source': (
            'arXiv:2109.08668; google-research/google-research, primer/README.md, '
            'primer/gin/models/defaults.gin and medium_transformer_squared_relu.gin'
        ),
    },
    'GELU': {
        'setting': 'tanh form, trained as squared ReLU, at its own tuned rate',
        'published': 'the same model and training as squared ReLU',
        'source': 'google-research/google-research, primer/gin/models/medium_transformer_gelu.gin',
    },
    'ReLU': {
        'setting': 'trained as squared ReLU, at its own tuned rate',
        'published': 'the same model and training as squared ReLU',
        'source': (
            'google-research/google-research, primer/gin/models/defaults.gin and '
            'medium_transformer_vanilla.gin'
        ),
    },
}
