"""Attention by distances is as good as by products.

Paper:    arXiv:2504.12588, of plain graph transformers
Says:     logits of negative squared distances serve as well as scaled products.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above that of products.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = ({'study': 'blocks', 'arm': {'model.attention': 'l2'}, 'difference': (None, 0.03)},)
