"""ARO reaches a lower loss than AdamW and Muon.

Paper:    arXiv:2602.09006
Says:     Rotating by the geometry of a norm trains 1.3 times as fast as AdamW, and 1.1 times as
          fast as methods that orthogonalise.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, and separately for 100 steps. Each optimizer updates the hidden
          matrices at its own tuned learning rate; AdamW updates embeddings, readout and vectors in
          every run. The paper's models are at least 100 times as large and see at least 1,000 times
          as many tokens.
Counts:   the loss is lower than that of AdamW at both lengths, and lower than that of Muon at the
          longer one.
"""

PART = 'optimizers'
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {
        'study': 'whole',
        'arm': {'optim.name': 'aro'},
        'difference': (None, 0.0),
        'label': 'loss difference, ARO minus AdamW (nats per token, 200 steps)',
    },
    {
        'study': 'half',
        'arm': {'optim.name': 'aro'},
        'difference': (None, 0.0),
        'label': 'loss difference, ARO minus AdamW (nats per token, 100 steps)',
    },
    {
        'study': 'whole',
        'arm': {'optim.name': 'aro'},
        'against': {'optim.name': 'muon'},
        'difference': (None, 0.0),
        'label': 'loss difference, ARO minus Muon (nats per token, 200 steps)',
    },
)
