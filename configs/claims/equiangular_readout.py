"""A readout with fixed equiangular rows is as good as a learned one.

Paper:    arXiv:2303.11637, Equiangular Basis Vectors
Says:     Fixed vectors at nearly equal angles, which classify by the cosine with the last features,
          replace a trained classifier and its parameters without loss of accuracy.
Here:     A model with 0.26 million parameters is trained for 1,000 steps on 1.0 million tokens of
          Python source code. There are 512 classes in 64 dimensions, so rows cannot all be nearly
          orthogonal; the paper has 1,000 image classes in as many dimensions. The temperature is
          the published one.
Counts:   the loss is at most 0.03 nats above that of a learned readout, and below that of random
          rows, which do not have equal angles.
"""

PART = 'weights'
STUDIES = {
    'frozen': 'configs/studies/frozen_tuned.py',
}
HOLDS = (
    {
        'study': 'frozen',
        'arm': {'model.readout': 'equiangular'},
        'difference': (None, 0.03),
        'label': 'loss difference, equiangular rows minus learned readout (nats per token)',
    },
    {
        'study': 'frozen',
        'arm': {'model.readout': 'equiangular'},
        'against': {'model.readout': 'random'},
        'difference': (None, 0.0),
        'label': 'loss difference, equiangular rows minus random rows (nats per token)',
    },
)
