"""Affine-scaled attention lowers the loss.

Paper:    arXiv:2602.23057, Affine-Scaled Attention
Says:     Scaling and shifting the attention weights with learned values, so that they need not sum
          to 1, makes training more stable and lowers the loss.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is lower than with plain attention.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'attention.affine_scaled': True},
        'difference': (None, 0.0),
        'label': 'loss difference, affine-scaled attention minus plain attention (nats per token)',
    },
)
