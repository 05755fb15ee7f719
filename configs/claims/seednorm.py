"""SeeDNorm reaches a lower loss than RMSNorm.

Paper:    arXiv:2510.22777, SeeDNorm: Self-Rescaled Dynamic Normalization
Says:     a gain that depends on the token reaches lower losses in language models, dense and
          sparse.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains deeper models for far longer.
Counts:   the loss is lower than RMSNorm's.
"""

PART = 'norms'
CAUTION = (
    'The sign depends on how the embeddings start. Here, at a deviation of 1 and with each rate '
    'tuned, its loss minus that of RMSNorm is +0.098 [+0.061, +0.137] nats; in '
    'configs/studies/results/norm_placement_lr.md, at a deviation of 1/8 and with rates of a '
    'grid, it was -0.182 ± 0.152.'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'seednorm', 'model.placement': 'pre'},
        'difference': (None, 0.0),
    },
)
