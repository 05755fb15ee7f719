"""Norms on both sides of a sublayer are better than in front alone.

Paper:    arXiv:2502.02732, Peri-LN
Says:     norms in front of and behind each sublayer give lower losses and fewer instabilities than
          pre-norm.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains deeper models for far longer.
Counts:   the loss is lower than pre-norm's.
"""

PART = 'placements'
CAUTION = (
    'The sign depends on how the embeddings start. Here, at a deviation of 1 and with each rate '
    'tuned, its loss minus that of pre-norm is +0.075 [+0.037, +0.107] nats; in '
    'configs/studies/results/norm_placement_lr.md, at a deviation of 1/8 and with rates of a '
    'grid, it was -0.082 ± 0.029.'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'peri'},
        'difference': (None, 0.0),
    },
)
