"""Muon reaches a lower loss than AdamW.

Paper:    arXiv:2502.16982, Muon is Scalable for LLM Training
Says:     orthogonalised momentum needs about half of the compute of AdamW for the same loss,
          without tuning anew.
Here:     0.26 million parameters, 0.2 million tokens of Python sources in the longer of two
          lengths, of 100 and 200 steps; every optimizer at its own learning rate, beside one AdamW
          for embeddings, readout and vectors; the paper trains models at least a hundred times as
          large, for at least a thousand times as many tokens.
Counts:   the loss is lower than AdamW's at both lengths, each tuned.
"""

PART = 'optimizers'
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {'study': 'whole', 'arm': {'optim.name': 'muon'}, 'difference': (None, 0.0)},
    {'study': 'half', 'arm': {'optim.name': 'muon'}, 'difference': (None, 0.0)},
)
