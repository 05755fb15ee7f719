"""ResiDual is better than both pre-norm and post-norm.

Paper:    arXiv:2304.14802, ResiDual: Transformer with Dual Residual Connections
Says:     A model with one residual stream of each kind combines the strengths of pre-norm and
          post-norm, and is better than either.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of pre-norm and that of post-norm.
"""

PART = 'placements'
CAUTION = (
    'The sign depends on the initial scale of the embeddings. The loss difference from pre-norm '
    'is +0.189 [+0.128, +0.258] nats here, at scale 1 with tuned learning rates, but -0.332 ± '
    '0.091 nats in configs/studies/results/norm_placement_lr.md, at scale 1/8 with a grid of '
    'rates.'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'resi_dual'},
        'difference': (None, 0.0),
        'label': 'loss difference, ResiDual minus pre-norm (nats per token)',
    },
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'resi_dual'},
        'against': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (None, 0.0),
        'label': 'loss difference, ResiDual minus post-norm (nats per token)',
    },
)
