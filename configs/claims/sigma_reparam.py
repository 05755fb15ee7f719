"""sigmaReparam is as good as plain matrices.

Paper:    arXiv:2303.06296, Stabilizing Transformer Training by Preventing Attention Entropy
          Collapse
Says:     Dividing every matrix by its spectral norm and multiplying it by a learned scale trains
          stably and as well as plain matrices.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above that of plain matrices.
"""

PART = 'reparametrisations'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.reparam': 'sigma'},
        'difference': (None, 0.03),
        'label': 'loss difference, sigmaReparam minus plain matrices (nats per token)',
    },
)
