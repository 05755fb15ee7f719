"""Norm-aware linear attention is better than linear attention.

Paper:    arXiv:2506.21137, NaLaFormer
Says:     Features that keep the norm of the queries make linear attention sharper and better.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is lower than that of linear attention with elu + 1.
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
        'label': 'loss difference, norm-aware attention minus linear attention (nats per token)',
    },
)
