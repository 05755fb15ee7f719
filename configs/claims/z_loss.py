"""A z-loss of 1e-4 costs nothing.

Paper:    arXiv:2204.02311, PaLM
Says:     an auxiliary loss on log Z keeps logits near 0 without harm to quality.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the losses are within 0.03 nats of each other.
"""

PART = 'losses'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
}
HOLDS = ({'study': 'recipes', 'arm': {'loss.z_loss': 0.0}, 'difference': (-0.03, 0.03)},)
