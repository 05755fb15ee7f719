"""A constant rate with a short decay is as good as a cosine.

Paper:    arXiv:2405.18392, Scaling Laws and Compute-Optimal Training Beyond Fixed Training
          Durations
Says:     a constant learning rate with a cooldown in the end matches a cosine.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above the cosine's.
"""

PART = 'recipes'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
}
HOLDS = (
    {
        'study': 'recipes',
        'arm': {'optim.schedule': 'warmup_stable_decay'},
        'difference': (None, 0.03),
    },
)
