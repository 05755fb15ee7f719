"""RMSNorm is as good as LayerNorm.

Paper:    arXiv:1910.07467, Root Mean Square Layer Normalization
Says:     leaving out the mean of LayerNorm costs nothing in quality.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains deeper models for far longer.
Counts:   the losses are within 0.03 nats of each other.
"""

PART = 'norms'
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'layernorm', 'model.placement': 'pre'},
        'difference': (-0.03, 0.03),
    },
)
