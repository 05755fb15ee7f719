"""Averaging the weights replaces learning rate decay.

Paper:    arXiv:2405.18392
Says:     Averages of the weights at a constant learning rate recover most of the gain of a decay.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss of an exponential average at a constant rate is at most 0.03 nats above that of a
          cosine schedule, and lower than without the average.
"""

PART = 'recipes'
WITHDRAWN = (
    'The arm was not the method: it averaged all 200 steps with a decay of 0.999, and the paper '
    'averages a window of the last steps.'
)
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
}
HOLDS = (
    {
        'study': 'recipes',
        'arm': {'optim.average': 'ema'},
        'difference': (None, 0.03),
        'label': 'loss difference, average at a constant rate minus cosine (nats per token)',
    },
    {
        'study': 'recipes',
        'arm': {'optim.average': 'ema'},
        'against': {'optim.schedule': 'constant'},
        'difference': (None, 0.0),
        'label': 'loss difference, average at a constant rate minus constant rate (nats per token)',
    },
)
