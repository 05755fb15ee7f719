"""Shampoo reaches a lower loss than AdamW.

Paper:    arXiv:2002.09018, Scalable Second Order Optimization for Deep Learning
Says:     Preconditioning both sides of a matrix needs fewer steps than diagonal methods.
Here:     A model with 0.26 million parameters is trained for 400 steps on 0.4 million tokens of
          Python source code, with embeddings initialised at a standard deviation of 1. Each
          optimizer updates the hidden matrices at its own tuned learning rate, and AdamW at 0.01
          the rest; the baseline is AdamW with one tuned rate for all. The paper's models are at
          least 100 times as large and see at least 500 times as many tokens. Matrix roots are
          computed every ten steps.
Counts:   the loss is lower than that of AdamW.
"""

from configs.claims import _shared

PART = 'optimizers'
CAUTION = (
    'The arm is grafted to Adam, which takes the first nine steps itself. The authors graft to '
    'SGD or AdaGrad.'
)
STUDIES = {
    'both': 'configs/studies/optimizers_and_schedules.py',
}
HOLDS = (
    {
        'study': 'both',
        'arm': {'optim.name': 'shampoo'},
        'difference': (None, 0.0),
        'label': 'loss difference, Shampoo minus AdamW (nats per token)',
    },
)
CONTROL = _shared.CONSTANT_RATE_CONTROL
TWIN = _shared.LOST_UPDATES_TWIN
FIDELITY = {
    'Shampoo': {
        'setting': (
            'exponents -1/4, averages with b1 0.9 and b2 0.999, corrected for their start; not '
            "the published form: scaled to the norm of Adam's direction, roots every ten steps "
            'and Adam itself for the first nine, no Nesterov; hidden matrices only, tuned '
            'rate; decay, schedule and batch are those of AdamW here'
        ),
        'published': (
            'exponents -1/4 and b2 0.999, but scaled to the step of SGD or AdaGrad; roots '
            'every step, then Nesterov momentum 0.9, blocks of 128, no decay, all parameters '
            'with sides up to 8,192; the settings of the language models are not known here'
        ),
        'source': 'github.com/google-research/google-research, scalable_shampoo/jax/shampoo.py',
    },
    'AdamW': {
        'setting': _shared.ONE_RATE_SETTING,
        'published': 'diagonal methods; their settings are not known here',
        'source': 'arXiv:2002.09018',
    },
}
