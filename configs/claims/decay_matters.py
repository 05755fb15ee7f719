"""A rate that falls to 0 is better than a constant one.

Paper:    arXiv:1706.03762 and arXiv:2405.18392
Says:     most of the gain of a schedule is in its end, where the rate falls.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the loss with a constant rate is more than 0.03 nats above the cosine's.
"""

PART = 'recipes'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
}
HOLDS = ({'study': 'recipes', 'arm': {'optim.schedule': 'constant'}, 'difference': (0.03, None)},)
