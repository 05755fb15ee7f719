"""Attention with a learned scale and offset of its weights lowers the loss.

Paper:    arXiv:2602.23057, Affine-Scaled Attention
Says:     weights that need not sum to 1 train more stably and reach a lower loss.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the loss is lower than plain attention's.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = ({'study': 'blocks', 'arm': {'attention.affine_scaled': True}, 'difference': (None, 0.0)},)
