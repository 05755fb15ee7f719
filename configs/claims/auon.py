"""AuON is as good as Muon without orthogonalising.

Paper:    arXiv:2509.24320
Says:     An update with a bounded spectral norm, computed in linear time, performs as well as
          Muon's.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, and separately for 100 steps. Each optimizer updates the hidden
          matrices at its own tuned learning rate; AdamW updates embeddings, readout and vectors in
          every run. The paper's models are at least 100 times as large and see at least 1,000 times
          as many tokens.
Counts:   the loss is at most 0.03 nats above that of Muon at both lengths.
"""

from configs.claims import _shared

PART = 'optimizers'
WITHDRAWN = (
    'The rank of AuON depends on the initial scale of the embeddings: this study used a standard '
    'deviation of 1/8, and the default is 1.'
)
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {
        'study': 'whole',
        'arm': {'optim.name': 'auon'},
        'against': {'optim.name': 'muon'},
        'difference': (None, 0.03),
        'label': 'loss difference, AuON minus Muon (nats per token, 200 steps)',
    },
    {
        'study': 'half',
        'arm': {'optim.name': 'auon'},
        'against': {'optim.name': 'muon'},
        'difference': (None, 0.03),
        'label': 'loss difference, AuON minus Muon (nats per token, 100 steps)',
    },
)
CONTROL = _shared.OPTIMIZERS_CONTROL
FIDELITY = {
    'AuON': {
        'setting': (
            'the form of the code with momentum 0.95, Nesterov and gamma 1.5, which is '
            'momentum alone; decay 0.1 times a tuned rate, up to a third of a matrix in a '
            'step; warm-up for a tenth of the steps, cosine to 0, 8 x 128 tokens; embeddings '
            'start at a deviation of 1/8; AdamW at 0.01 for the rest'
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
            'tuned rate; decay 0.1 times the rate; schedule, batch and AdamW for the rest as '
            'for AuON here'
        ),
        'published': 'momentum 0.95, rate 0.05, decay 0.01, schedule and batch as for AuON',
        'source': 'github.com/ryyzn9/AuON, training/config.py',
    },
}
