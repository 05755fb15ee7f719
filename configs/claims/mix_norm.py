"""Post-norm in the first layers and pre-norm in the others is better than pre-norm.

Paper:    arXiv:2412.13795, Mix-LN: Unleashing the Power of Deeper Layers by Combining Pre-LN and
          Post-LN
Says:     early layers with post-norm let deep layers learn, which lowers the loss.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains deeper models for far longer.
Counts:   the loss is lower than pre-norm's.
"""

PART = 'placements'
CAUTION = (
    'The sign depends on how the embeddings start. Here, at a deviation of 1 and with each rate '
    'tuned, its loss minus that of pre-norm is +0.101 [+0.066, +0.144] nats; in '
    'configs/studies/results/norm_placement_lr.md, at a deviation of 1/8 and with rates of a '
    'grid, it was -0.378 ± 0.087.'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'mix'},
        'difference': (None, 0.0),
    },
)
