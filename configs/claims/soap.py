"""SOAP reaches a lower loss than AdamW, and than Shampoo.

Paper:    arXiv:2409.11321, SOAP: Improving and Stabilizing Shampoo using Adam
Says:     Adam in the eigenbasis of Shampoo's preconditioner needs 40% fewer iterations than AdamW,
          and about 20% fewer than Shampoo.
Here:     0.26 million parameters, 0.2 million tokens of Python sources in the longer of two
          lengths, of 100 and 200 steps; every optimizer at its own learning rate, beside one AdamW
          for embeddings, readout and vectors; the paper trains models at least a hundred times as
          large, for at least a thousand times as many tokens.
Counts:   the loss is lower than AdamW's at both lengths; and lower than Shampoo's at the longer
          one.
"""

PART = 'optimizers'
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {'study': 'whole', 'arm': {'optim.name': 'soap'}, 'difference': (None, 0.0)},
    {'study': 'half', 'arm': {'optim.name': 'soap'}, 'difference': (None, 0.0)},
    {
        'study': 'whole',
        'arm': {'optim.name': 'soap'},
        'against': {'optim.name': 'shampoo'},
        'difference': (None, 0.0),
    },
)
