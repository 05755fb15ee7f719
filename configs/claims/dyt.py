"""Dynamic Tanh takes the place of a norm.

Paper:    arXiv:2503.10622, Transformers without Normalization
Says:     an elementwise tanh with a learned scale matches RMSNorm in transformers, language models
          among them.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains deeper models for far longer.
Counts:   the loss is at most 0.03 nats above RMSNorm's.
"""

PART = 'norms'
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'dyt', 'model.placement': 'pre'},
        'difference': (None, 0.03),
    },
)
