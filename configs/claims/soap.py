"""SOAP reaches a lower loss than AdamW and Shampoo.

Paper:    arXiv:2409.11321, SOAP: Improving and Stabilizing Shampoo using Adam
Says:     Adam in the eigenbasis of Shampoo's preconditioner needs 40% fewer iterations than AdamW,
          and about 20% fewer than Shampoo.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, and separately for 100 steps. Each optimizer updates the hidden
          matrices at its own tuned learning rate; AdamW updates embeddings, readout and vectors in
          every run. The paper's models are at least 100 times as large and see at least 1,000 times
          as many tokens.
Counts:   the loss is lower than that of AdamW at both lengths, and lower than that of Shampoo at
          the longer one.
"""

PART = 'optimizers'
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {
        'study': 'whole',
        'arm': {'optim.name': 'soap'},
        'difference': (None, 0.0),
        'label': 'loss difference, SOAP minus AdamW (nats per token, 200 steps)',
    },
    {
        'study': 'half',
        'arm': {'optim.name': 'soap'},
        'difference': (None, 0.0),
        'label': 'loss difference, SOAP minus AdamW (nats per token, 100 steps)',
    },
    {
        'study': 'whole',
        'arm': {'optim.name': 'soap'},
        'against': {'optim.name': 'shampoo'},
        'difference': (None, 0.0),
        'label': 'loss difference, SOAP minus Shampoo (nats per token, 200 steps)',
    },
)
