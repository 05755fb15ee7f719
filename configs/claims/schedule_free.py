"""Schedule-Free AdamW is as good as AdamW with a cosine schedule.

Paper:    arXiv:2405.15682, The Road Less Scheduled
Says:     Averaging instead of a schedule matches or beats a cosine schedule that knows the last
          step.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, and separately for 100 steps. Each optimizer updates the hidden
          matrices at its own tuned learning rate; AdamW updates embeddings, readout and vectors in
          every run. The paper's models are at least 100 times as large and see at least 1,000 times
          as many tokens.
Counts:   the loss is at most 0.03 nats above that of AdamW with a cosine schedule at both lengths.
"""

from configs.claims import _shared

PART = 'optimizers'
WITHDRAWN = (
    'The arm was not the method: it kept the momentum of AdamW (b1 = 0.9), which Schedule-Free '
    'replaces. The published setting, b1 = 0, was not run.'
)
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {
        'study': 'whole',
        'arm': {'optim.average': 'schedule_free'},
        'difference': (None, 0.03),
        'label': 'loss difference, Schedule-Free AdamW minus AdamW (nats per token, 200 steps)',
    },
    {
        'study': 'half',
        'arm': {'optim.average': 'schedule_free'},
        'difference': (None, 0.03),
        'label': 'loss difference, Schedule-Free AdamW minus AdamW (nats per token, 100 steps)',
    },
)
CONTROL = _shared.OPTIMIZERS_CONTROL
FIDELITY = {
    'Schedule-Free AdamW': {
        'setting': (
            'not the method: b1 0.9 in AdamW stays on, with beta 0.9; b2 0.95, decay 0.1 at '
            'the point of the gradient, warm-up for a tenth of the steps, then constant; tuned '
            'rate for hidden matrices, 0.01 for the rest'
        ),
        'published': (
            'no momentum in AdamW; beta 0.9, or 0.95 to 0.98 for long runs, b2 0.999 by '
            'default, warm-up, then constant, at 1 to 10 times the rate with a schedule; rate '
            'and decay are tuned'
        ),
        'source': (
            'github.com/facebookresearch/schedule_free, README.md and '
            'schedulefree/adamw_schedulefree.py'
        ),
    },
    'AdamW': {
        'setting': _shared.ADAMW_SETTING,
        'published': (
            'AdamW with a cosine schedule that ends at the last step; the rest is not known here'
        ),
        'source': 'arXiv:2405.15682',
    },
}
