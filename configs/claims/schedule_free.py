"""Schedule-Free AdamW is as good as AdamW with a cosine schedule.

Paper:    arXiv:2405.15682, The Road Less Scheduled
Says:     Averaging instead of a schedule matches or beats a cosine schedule that knows the last
          step.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, with embeddings that start at a deviation of 1, and separately of 1/8.
          A single tuned rate serves all parameters, as in the paper. The paper's
          language models are at least 100 times as large and see at least 1,000 times as many
          tokens.
Counts:   the loss is at most 0.03 nats above that of AdamW with a cosine schedule at both starts.
"""

from configs.claims import _shared

PART = 'optimizers'
STUDIES = {
    'unit': 'configs/studies/as_published.py:optimizers',
    'small_start': 'configs/studies/as_published.py:small_start',
}
HOLDS = (
    {
        'study': 'unit',
        'arm': {'optim.average': 'schedule_free'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, Schedule-Free minus AdamW (nats per token, embeddings of deviation 1)'
        ),
    },
    {
        'study': 'small_start',
        'arm': {'optim.average': 'schedule_free'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, Schedule-Free minus AdamW (nats per token, '
            'embeddings of deviation 1/8)'
        ),
    },
)
CONTROL = _shared.PUBLISHED_CONTROL
TWIN = (
    {
        'study': 'unit',
        'arm': {'optim.schedule_free_beta': 0.1},
        'difference': (None, 0.03),
        'label': (
            'loss difference, Schedule-Free with the weights of mean and iterate exchanged minus '
            'AdamW (nats per token, embeddings of deviation 1)'
        ),
    },
)
FIDELITY = {
    'Schedule-Free AdamW': {
        'setting': (
            'no momentum in AdamW (b1 0), beta 0.9, b2 0.95, decay 0.1 at the point of the '
            'gradient, gradients clipped at 1, warm-up for a tenth of the steps, then constant; '
            'one tuned rate for all parameters; the decay is not tuned'
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
        'setting': _shared.ONE_RATE_SETTING,
        'published': (
            'AdamW with a cosine schedule that ends at the last step; the rest is not known here'
        ),
        'source': 'arXiv:2405.15682',
    },
}
