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
    'The sign turns with the start of the embeddings: its loss less that of RMSNorm is +0.098 '
    '[+0.061, +0.137] nats here, where they start at a deviation of 1 and each rate is tuned, '
    'and was -0.182 ± 0.152 in configs/studies/results/norm_placement_lr.md, where they start '
    'at 1/8 and rates are those of a grid.'
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
