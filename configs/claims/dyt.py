"""Dynamic Tanh replaces a norm.

Paper:    arXiv:2503.10622, Transformers without Normalization
Says:     An elementwise tanh with a learned scale matches RMSNorm in transformers, including
          language models.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is at most 0.03 nats above that of RMSNorm.
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
        'label': 'loss difference, Dynamic Tanh minus RMSNorm (nats per token)',
    },
)
