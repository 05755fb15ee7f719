"""A learning rate that falls to 0 is better than a constant one.

Paper:    arXiv:1706.03762 and arXiv:2405.18392
Says:     Most of the gain of a schedule comes from its end, where the learning rate falls.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss with a constant rate is more than 0.03 nats above that of a cosine schedule.
"""

PART = 'recipes'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
}
HOLDS = (
    {
        'study': 'recipes',
        'arm': {'optim.schedule': 'constant'},
        'difference': (0.03, None),
        'label': 'loss difference, constant rate minus cosine (nats per token)',
    },
)
