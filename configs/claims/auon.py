"""AuON is as good as Muon without orthogonalising.

Paper:    arXiv:2509.24320
Says:     an update of bounded spectral norm, made in linear time, performs as Muon's does.
Here:     0.26 million parameters, 0.2 million tokens of Python sources in the longer of two
          lengths, of 100 and 200 steps; every optimizer at its own learning rate, beside one AdamW
          for embeddings, readout and vectors; the paper trains models at least a hundred times as
          large, for at least a thousand times as many tokens.
Counts:   the loss is within 0.03 nats of Muon's, or below it, at both lengths.
"""

PART = 'optimizers'
WITHDRAWN = (
    'Its rank depends on how the embeddings start: this study used a deviation of 1/8, and the '
    'default is 1.'
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
    },
    {
        'study': 'half',
        'arm': {'optim.name': 'auon'},
        'against': {'optim.name': 'muon'},
        'difference': (None, 0.03),
    },
)
