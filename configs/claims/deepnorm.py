"""DeepNorm is better than post-norm, and no worse than pre-norm.

Paper:    arXiv:2203.00555, DeepNet: Scaling Transformers to 1,000 Layers
Says:     Scaled residuals and smaller initial weights give post-norm the stability of pre-norm and
          keep its quality.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of post-norm, and at most 0.03 nats above that of pre-norm.
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
        'label': 'loss difference, DeepNorm minus pre-norm (nats per token)',
    },
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'deepnorm'},
        'against': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (None, 0.0),
        'label': 'loss difference, DeepNorm minus post-norm (nats per token)',
    },
)
