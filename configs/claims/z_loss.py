"""A z-loss of 1e-4 costs nothing.

Paper:    arXiv:2204.02311, PaLM
Says:     An auxiliary loss on log Z keeps the logits near 0 without harming quality.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the losses with and without z-loss are within 0.03 nats of each other.
"""

PART = 'losses'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
}
HOLDS = (
    {
        'study': 'recipes',
        'arm': {'loss.z_loss': 0.0},
        'difference': (-0.03, 0.03),
        'label': 'loss difference, no z-loss minus z-loss of 1e-4 (nats per token)',
    },
)
