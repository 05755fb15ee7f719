"""A gated RMSNorm reaches a lower loss than RMSNorm.

Paper:    arXiv:2601.22966
Says:     A low-rank gate after a norm removes the need for outliers and attention sinks, and lowers
          the loss.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of RMSNorm.
"""

PART = 'norms'
CAUTION = (
    'The sign depends on the initial scale of the embeddings. The loss difference from RMSNorm is '
    '+0.062 [+0.017, +0.085] nats here, at scale 1 with tuned learning rates, but -0.162 ± 0.146 '
    'nats in configs/studies/results/norm_placement_lr.md, at scale 1/8 with a grid of rates.'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'gated_rmsnorm', 'model.placement': 'pre'},
        'difference': (None, 0.0),
        'label': 'loss difference, gated RMSNorm minus RMSNorm (nats per token)',
    },
)
