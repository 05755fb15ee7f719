"""Squared ReLU reaches a lower loss than GELU and ReLU.

Paper:    arXiv:2109.08668, Primer
Says:     Of the changes that an architecture search found, squaring the ReLU is the most useful.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is lower than that of GELU and that of ReLU.
"""

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
