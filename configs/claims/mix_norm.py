"""Post-norm in the first layers and pre-norm in the rest is better than pre-norm.

Paper:    arXiv:2412.13795, Mix-LN: Unleashing the Power of Deeper Layers by Combining Pre-LN and
          Post-LN
Says:     Post-norm in the early layers lets the deep layers learn, which lowers the loss.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of pre-norm.
"""

PART = 'placements'
CAUTION = (
    'The sign depends on the initial scale of the embeddings. The loss difference from pre-norm '
    'is +0.101 [+0.066, +0.144] nats here, at scale 1 with tuned learning rates, but -0.378 ± '
    '0.087 nats in configs/studies/results/norm_placement_lr.md, at scale 1/8 with a grid of '
    'rates.'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'mix'},
        'difference': (None, 0.0),
        'label': 'loss difference, Mix-LN minus pre-norm (nats per token)',
    },
)
