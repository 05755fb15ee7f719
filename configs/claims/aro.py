"""ARO reaches a lower loss than AdamW and Muon.

Paper:    arXiv:2602.09006
Says:     Rotating by the geometry of a norm trains 1.3 times as fast as AdamW, and 1.1 times as
          fast as methods that orthogonalise.
Here:     A model with 0.26 million parameters is trained for 400 steps on 0.4 million tokens of
          Python source code, with embeddings initialised at a standard deviation of 1. Each
          optimizer updates the hidden matrices at its own tuned learning rate, and AdamW at 0.01
          the rest; the baseline is AdamW with one tuned rate for all. The paper's models are at
          least 100 times as large and see at least 500 times as many tokens.
Counts:   the loss is lower than that of AdamW, and lower than that of Muon.
"""

from configs.claims import _shared

PART = 'optimizers'
STUDIES = {
    'both': 'configs/studies/optimizers_and_schedules.py',
}
HOLDS = (
    {
        'study': 'both',
        'arm': {'optim.name': 'aro'},
        'difference': (None, 0.0),
        'label': 'loss difference, ARO minus AdamW (nats per token)',
    },
    {
        'study': 'both',
        'arm': {'optim.name': 'aro'},
        'against': {'optim.name': 'muon'},
        'difference': (None, 0.0),
        'label': 'loss difference, ARO minus Muon (nats per token)',
    },
)
CONTROL = _shared.CONSTANT_RATE_CONTROL
TWIN = _shared.LOST_UPDATES_TWIN
FIDELITY = {
    'ARO': {
        'setting': (
            'momentum 0.95, no Nesterov, Sinkhorn map of 5 rounds, root mean square 0.2 times '
            'a tuned rate; rotates the side of the residual stream; hidden matrices only; '
            'decay, clipping, schedule and batch are those of AdamW here'
        ),
        'published': (
            'the paper gives all updates but those of AdamW a root mean square of 0.2; its '
            'code has momentum 0.95, decay 0.01 and recommends this map, but rotates the '
            'output side; the rest is not known here'
        ),
        'source': 'arXiv:2602.09006; github.com/microsoft/dion, dion/aro.py',
    },
    'AdamW': {
        'setting': _shared.ONE_RATE_SETTING,
        'published': 'its settings are not known here',
        'source': 'arXiv:2602.09006',
    },
    'Muon': {
        'setting': (
            'momentum 0.95, Nesterov, five Newton-Schulz steps, factor sqrt(max(1, outputs / '
            'inputs)); hidden matrices only, at their own tuned rate; decay, clipping, '
            'schedule and batch are those of AdamW here'
        ),
        'published': (
            'updates with a root mean square of 0.2, as for all methods but AdamW, in place of '
            'the factor by shape; the rest is not known here'
        ),
        'source': 'arXiv:2602.09006',
    },
}
