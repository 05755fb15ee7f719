"""Norms before and after each sublayer are better than pre-norm.

Paper:    arXiv:2502.02732, Peri-LN
Says:     Norms before and after each sublayer give lower losses and fewer instabilities than
          pre-norm.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of pre-norm.
"""

PART = 'placements'
CAUTION = (
    'The sign depends on the initial scale of the embeddings. The loss difference from pre-norm '
    'is +0.075 [+0.037, +0.107] nats here, at scale 1 with tuned learning rates, but -0.082 ± '
    '0.029 nats in configs/studies/results/norm_placement_lr.md, at scale 1/8 with a grid of '
    'rates.'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'peri'},
        'difference': (None, 0.0),
        'label': 'loss difference, Peri-LN minus pre-norm (nats per token)',
    },
)
