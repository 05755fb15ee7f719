"""Normalised queries and keys cost nothing.

Paper:    arXiv:2302.05442, Scaling Vision Transformers to 22 Billion Parameters
Says:     norms of queries and keys keep logits of attention small, and do not harm quality.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above that without.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = ({'study': 'blocks', 'arm': {'model.qk_norm': 'rmsnorm'}, 'difference': (None, 0.03)},)
