"""A learning rate that falls to 0 is better than a constant one.

Paper:    arXiv:2405.18392, Scaling Laws and Compute-Optimal Training Beyond Fixed Training
          Durations
Says:     Most of the gain of a schedule comes from its end, where the learning rate falls.
Here:     A 4-layer model with 0.26 million parameters is trained for 400 steps on 0.4 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss with a constant rate is more than 0.03 nats above that of a cosine schedule.
"""

from configs.claims import _shared

PART = 'recipes'
CAUTION = (
    'The broken method trains like the constant rate and tests only the noise. The control is an '
    'effect of 0.5 nats, so that it does not show that one of 0.03 would be found.'
)
STUDIES = {
    'both': 'configs/studies/optimizers_and_schedules.py',
    **_shared.BOTH_SETTINGS,
}
HOLDS = (
    {
        'study': 'both',
        'arm': {'optim.schedule': 'constant'},
        'difference': (0.03, None),
        'label': 'loss difference, constant rate minus cosine (nats per token)',
    },
)
CONTROL = _shared.LOST_UPDATES_CONTROL
TWIN = (
    {
        'study': 'both',
        'arm': {'optim.schedule': 'constant'},
        'against': {'optim.schedule': 'inverse_sqrt'},
        'difference': (0.03, None),
        'label': (
            'loss difference, constant rate minus a schedule whose fall begins after the last step '
            '(nats per token)'
        ),
    },
)
NUISANCES = _shared.BOTH_NUISANCES
FIDELITY = {
    'constant rate': {
        'setting': (
            '40 steps of warm-up, then constant, rate tuned for each arm; AdamW with betas 0.9 '
            'and 0.95 and decay 0.1, 400 steps'
        ),
        'published': (
            'a constant rate before the cooldown, at which the loss falls sharply; the first '
            'paper has no constant rate: its rate falls with the inverse root of the step after '
            '4,000 steps, not to 0'
        ),
        'source': (
            'arXiv:2405.18392; github.com/epfml/schedules-and-scaling, src/config/base.py, '
            'src/main.py and README.md; arXiv:1706.03762'
        ),
    },
    'cosine': {
        'setting': (
            'falls to 0 at the last of 400 steps, 40 steps of warm-up, rate tuned for each arm'
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
}
