"""RMSNorm is as good as LayerNorm.

Paper:    arXiv:1910.07467, Root Mean Square Layer Normalization
Says:     Leaving out the mean subtraction of LayerNorm does not reduce quality.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the two losses are within 0.03 nats of each other.
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
        'label': 'loss difference, LayerNorm minus RMSNorm (nats per token)',
    },
)
