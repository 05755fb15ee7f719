"""ARO reaches a lower loss than AdamW, and than Muon.

Paper:    arXiv:2602.09006
Says:     rotating by the geometry of a norm trains 1.3 times as fast as AdamW, and 1.1 times as
          fast as methods that orthogonalise.
Here:     0.26 million parameters, 0.2 million tokens of Python sources in the longer of two
          lengths, of 100 and 200 steps; every optimizer at its own learning rate, beside one AdamW
          for embeddings, readout and vectors; the paper trains models at least a hundred times as
          large, for at least a thousand times as many tokens.
Counts:   the loss is lower than AdamW's at both lengths; and lower than Muon's at the longer one.
"""

PART = 'optimizers'
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {'study': 'whole', 'arm': {'optim.name': 'aro'}, 'difference': (None, 0.0)},
    {'study': 'half', 'arm': {'optim.name': 'aro'}, 'difference': (None, 0.0)},
    {
        'study': 'whole',
        'arm': {'optim.name': 'aro'},
        'against': {'optim.name': 'muon'},
        'difference': (None, 0.0),
    },
)
