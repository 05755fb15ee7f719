"""Muon needs half the tokens of AdamW at 124 million parameters.

Paper:    arXiv:2502.16982, Muon is Scalable for LLM Training
Says:     For the loss that AdamW reaches after compute-optimal training, Muon needs about 52% of
          the FLOPs, at 400 million to 1.5 billion parameters.
Here:     A model with 124 million parameters is trained on 2.5 billion tokens of FineWeb-Edu, 20
          per parameter, in rows of 2,048 tokens. Both optimizers have their own tuned learning
          rate, whereas the paper uses AdamW's rate for both. The paper's models are 3 to 12 times
          as large.
Counts:   AdamW needs at least 1.5 times the tokens for the final loss of Muon.
"""

PART = 'optimizers'
STUDIES = {'pod': 'configs/studies/muon_124m.py on v5e:4x4'}
HOLDS = (
    {
        'study': 'pod',
        'arm': {'optim.name': 'muon'},
        'speedup': (1.5, None),
        'label': 'tokens that AdamW needs for the final loss of Muon, over the tokens of Muon',
    },
)
