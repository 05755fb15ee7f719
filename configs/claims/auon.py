"""AuON is as good as Muon without orthogonalising.

Paper:    arXiv:2509.24320
Says:     An update with a bounded spectral norm, computed in linear time, performs as well as
          Muon's.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, with embeddings that start at a deviation of 1, and separately of 1/8.
          Each of both updates the hidden matrices at its own tuned rate, and AdamW at 0.01 the
          rest. The paper's models are at least 100 times as large and see at least 1,000 times as
          many tokens.
Counts:   the loss is at most 0.03 nats above that of Muon at both starts.
"""

from configs.claims import _shared

PART = 'optimizers'
CAUTION = (
    'The result depends on the initial scale of the embeddings: as good as Muon at 1/8, where the '
    'largest rate tried is the best, and 0.31 nats worse at 1.'
)
STUDIES = {
    'unit': 'configs/studies/as_published.py:optimizers',
    'small_start': 'configs/studies/as_published.py:small_start',
    'twins': 'configs/studies/twins.py:auon',
}
HOLDS = (
    {
        'study': 'unit',
        'arm': {'optim.name': 'auon'},
        'against': {'optim.name': 'muon'},
        'difference': (None, 0.03),
        'label': ('loss difference, AuON minus Muon (nats per token, embeddings of deviation 1)'),
    },
    {
        'study': 'small_start',
        'arm': {'optim.name': 'auon'},
        'against': {'optim.name': 'muon'},
        'difference': (None, 0.03),
        'label': ('loss difference, AuON minus Muon (nats per token, embeddings of deviation 1/8)'),
    },
)
CONTROL = _shared.PUBLISHED_CONTROL
TWIN = (
    {
        'study': 'twins',
        'arm': {'optim.name': 'conda'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, hidden matrices that only decay minus Muon (nats per token, '
            'embeddings of deviation 1/8)'
        ),
    },
)
FIDELITY = {
    'AuON': {
        'setting': (
            'the form of the code with momentum 0.95, Nesterov and gamma 1.5, which is '
            'momentum alone; decay 0.01 times a tuned rate; warm-up for a tenth of the steps, '
            'cosine to 0, 8 x 128 tokens; AdamW at 0.01 for the rest'
        ),
        'published': (
            'the same update at rate 0.08 with decay 0.01; constant rate, then a linear fall '
            'to a tenth over the last 45% of 10,000 steps of 8,192 tokens; Adam at 0.008 for '
            'the rest'
        ),
        'source': 'github.com/ryyzn9/AuON, training/config.py and auon/optimizer.py',
    },
    'Muon': {
        'setting': (
            'momentum 0.95, five Newton-Schulz steps, factor sqrt(max(1, outputs / inputs)), '
            'tuned rate; decay 0.01 times the rate; schedule, batch and AdamW for the rest as '
            'for AuON here'
        ),
        'published': 'momentum 0.95, rate 0.05, decay 0.01, schedule and batch as for AuON',
        'source': 'github.com/ryyzn9/AuON, training/config.py',
    },
}
