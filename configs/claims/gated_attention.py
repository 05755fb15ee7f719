"""A gate behind attention lowers the loss.

Paper:    arXiv:2505.06708, Gated Attention for Large Language Models
Says:     an elementwise sigmoid gate on what heads return lowers the loss.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the loss is lower than plain attention's.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = ({'study': 'blocks', 'arm': {'attention.gate': 'elementwise'}, 'difference': (None, 0.0)},)
