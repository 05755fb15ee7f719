"""ResiDual is better than both pre-norm and post-norm.

Paper:    arXiv:2304.14802, ResiDual: Transformer with Dual Residual Connections
Says:     a stream of each kind has the strengths of both, and is better than either.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains deeper models for far longer.
Counts:   the loss is lower than pre-norm's, and lower than post-norm's.
"""

PART = 'placements'
CAUTION = (
    'The sign depends on how the embeddings start. Here, at a deviation of 1 and with each rate '
    'tuned, its loss minus that of pre-norm is +0.189 [+0.128, +0.258] nats; in '
    'configs/studies/results/norm_placement_lr.md, at a deviation of 1/8 and with rates of a '
    'grid, it was -0.332 ± 0.091.'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'resi_dual'},
        'difference': (None, 0.0),
    },
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'resi_dual'},
        'against': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (None, 0.0),
    },
)
