"""A constant learning rate with a short final decay is as good as a cosine.

Paper:    arXiv:2405.18392, Scaling Laws and Compute-Optimal Training Beyond Fixed Training
          Durations
Says:     A constant learning rate with a cooldown at the end matches a cosine.
Here:     A 4-layer model with 0.26 million parameters is trained for 400 steps on 0.4 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above that of the cosine.
"""

from configs.claims import _shared

PART = 'recipes'
CAUTION = "The cosine ends at 0 here, and at a tenth of the peak in the authors' code."
STUDIES = {
    'both': 'configs/studies/optimizers_and_schedules.py',
    **_shared.BOTH_SETTINGS,
}
HOLDS = (
    {
        'study': 'both',
        'arm': {'optim.schedule': 'warmup_stable_decay'},
        'difference': (None, 0.03),
        'label': 'loss difference, constant rate with final decay minus cosine (nats per token)',
    },
)
CONTROL = _shared.LOST_UPDATES_CONTROL
TWIN = (
    {
        'study': 'both',
        'arm': {'optim.schedule': 'constant'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, a constant rate without the final decay minus cosine (nats per token)'
        ),
    },
)
NUISANCES = _shared.BOTH_NUISANCES
FIDELITY = {
    'constant rate with final decay': {
        'setting': (
            '40 steps of warm-up, constant, then linear to 0 in the last 80 of 400 steps; rate '
            'tuned for each arm'
        ),
        'published': (
            'constant, then by 1 - sqrt to 0, which they find better than linear; their code '
            'decays in the last 10% by default and 20% in its example, after 300 steps of warm-up '
            'of 15,000'
        ),
        'source': (
            'arXiv:2405.18392; github.com/epfml/schedules-and-scaling, src/config/base.py, '
            'src/main.py and README.md'
        ),
    },
    'cosine': {
        'setting': (
            'falls to 0 at the last of 400 steps, not to a tenth of the peak; 40 steps of '
            'warm-up, rate tuned for each arm'
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
