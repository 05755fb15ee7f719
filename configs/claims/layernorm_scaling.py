"""Dividing each norm by the square root of its depth is better than pre-norm.

Paper:    arXiv:2502.05795, The Curse of Depth in Large Language Models
Says:     Dividing the output of each norm by the square root of its depth keeps the variance of
          deep layers small, which lowers the loss.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of pre-norm.
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
        'label': 'loss difference, LayerNorm Scaling minus pre-norm (nats per token)',
    },
)
