"""DeepNorm is better than post-norm, and not behind pre-norm.

Paper:    arXiv:2203.00555, DeepNet: Scaling Transformers to 1,000 Layers
Says:     scaled residuals and smaller starts give post-norm the stability of pre-norm, and keep its
          quality.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains deeper models for far longer.
Counts:   the loss is lower than post-norm's, and at most 0.03 nats above pre-norm's.
"""

PART = 'placements'
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'deepnorm'},
        'difference': (None, 0.03),
    },
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'deepnorm'},
        'against': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (None, 0.0),
    },
)
