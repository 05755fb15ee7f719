"""sigmaReparam is as good as plain matrices.

Paper:    arXiv:2303.06296, Stabilizing Transformer Training by Preventing Attention Entropy
          Collapse
Says:     dividing every matrix by its spectral norm, times a learned scale, trains stably and as
          well.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above that without.
"""

PART = 'reparametrisations'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = ({'study': 'blocks', 'arm': {'model.reparam': 'sigma'}, 'difference': (None, 0.03)},)
