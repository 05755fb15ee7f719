"""Dividing each norm by the root of its depth is better than pre-norm.

Paper:    arXiv:2502.05795, The Curse of Depth in Large Language Models
Says:     outputs of norms over the root of the depth keep the variance of deep layers small, which
          lowers the loss.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains deeper models for far longer.
Counts:   the loss is lower than pre-norm's.
"""

PART = 'placements'
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'layernorm_scaling'},
        'difference': (None, 0.0),
    },
)
