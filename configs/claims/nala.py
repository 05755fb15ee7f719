"""Norm-aware linear attention is better than linear attention.

Paper:    arXiv:2506.21137, NaLaFormer
Says:     features that keep the norm of queries make linear attention sharper, and better.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the loss is lower than linear attention's with elu + 1.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.attention': 'nala'},
        'against': {'model.attention': 'linear'},
        'difference': (None, 0.0),
    },
)
