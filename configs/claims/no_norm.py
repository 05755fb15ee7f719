"""A transformer needs its norms to train.

Paper:    arXiv:1910.07467 and arXiv:2503.10622, which hold it against models without
Says:     without any norm training is worse, at any learning rate.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains deeper models for far longer.
Counts:   the loss without norms is more than 0.03 nats above RMSNorm's.
"""

PART = 'norms'
CAUTION = (
    'The sign depends on how the embeddings start. Here, at a deviation of 1 and with each rate '
    'tuned, the loss without norms minus that of RMSNorm is +0.046 [+0.017, +0.071] nats; in '
    'configs/studies/results/norm_placement_lr.md, at a deviation of 1/8 and with rates of a '
    'grid, it was -0.309 ± 0.047.'
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'none', 'model.placement': 'pre'},
        'difference': (0.03, None),
    },
)
