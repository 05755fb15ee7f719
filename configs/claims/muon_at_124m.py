"""Muon needs half of the tokens of AdamW at 124 million parameters.

Paper:    arXiv:2502.16982, Muon is Scalable for LLM Training
Says:     for the loss that AdamW has after training that is optimal in compute, Muon needs about
          52% of the operations, at 400 million to 1.5 billion parameters.
Here:     124 million parameters, 2.5 billion tokens of FineWeb-Edu, 20 a parameter, rows of 2,048
          tokens; both optimizers at a learning rate tuned for them, where the paper takes that of
          AdamW for both; the paper's models are 3 to 12 times as large.
Counts:   AdamW needs at least 1.5 times the tokens for the loss that Muon has at the end.
"""

PART = 'optimizers'
STUDIES = {'pod': 'configs/studies/muon_124m.py on v5e:4x4'}
HOLDS = ({'study': 'pod', 'arm': {'optim.name': 'muon'}, 'speedup': (1.5, None)},)
