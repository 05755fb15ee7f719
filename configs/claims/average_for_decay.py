"""Averaging the weights replaces learning rate decay.

Paper:    arXiv:2405.18392
Says:     Averages of the weights at a constant learning rate recover most of the gain of a decay.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss of an exponential average at a constant rate is at most 0.03 nats above that of a
          cosine schedule, and lower than without the average.
"""

from configs.claims import _shared

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
CONTROL = _shared.RECIPES_CONTROL
FIDELITY = {
    'average at a constant rate': {
        'setting': (
            'exponential average of every step with decay 0.999 from step 1 and bias correction, '
            'close to the plain mean of all 200 steps; not the published average'
        ),
        'published': (
            'plain average of every 5th step in windows of 500 steps; as an alternative an '
            'exponential average of every 10th step with decay 0.95'
        ),
        'source': (
            'arXiv:2405.18392; github.com/epfml/schedules-and-scaling, '
            'src/optim/weight_averaging.py and src/config/base.py'
        ),
    },
    'cosine': {
        'setting': (
            'falls to 0 at the last of 200 steps, 20 steps of warm-up, rate tuned for each arm'
        ),
        'published': (
            'falls to a tenth of the peak in their code; AdamW with betas 0.9 and 0.95 and decay '
            '0.1, 300 steps of warm-up of 15,000 by default'
        ),
        'source': (
            'arXiv:2405.18392; github.com/epfml/schedules-and-scaling, src/config/base.py, '
            'src/main.py and README.md'
        ),
    },
    'constant rate': {
        'setting': '20 steps of warm-up, then constant, rate tuned for each arm',
        'published': 'constant after the warm-up; the rate is not known here',
        'source': (
            'arXiv:2405.18392; github.com/epfml/schedules-and-scaling, src/config/base.py, '
            'src/main.py and README.md'
        ),
    },
}
