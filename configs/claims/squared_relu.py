"""Squared ReLU reaches a lower loss than GELU and ReLU.

Paper:    arXiv:2109.08668, Primer
Says:     squaring ReLU is the most useful of the changes that a search found.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the loss is lower than GELU's, and than ReLU's.
"""

PART = 'activations'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {'study': 'blocks', 'arm': {'model.activation': 'squared_relu'}, 'difference': (None, 0.0)},
    {
        'study': 'blocks',
        'arm': {'model.activation': 'squared_relu'},
        'against': {'model.activation': 'relu'},
        'difference': (None, 0.0),
    },
)
