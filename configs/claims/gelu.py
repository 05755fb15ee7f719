"""GELU reaches a lower loss than ReLU and ELU.

Paper:    arXiv:1606.08415, Gaussian Error Linear Units
Says:     Weighting inputs by their value improves on ReLU and ELU in all tasks that the paper
          tried.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the losses of ReLU and of ELU are higher than that of GELU.
"""

PART = 'activations'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.activation': 'relu'},
        'difference': (0.0, None),
        'label': 'loss difference, ReLU minus GELU (nats per token)',
    },
    {
        'study': 'blocks',
        'arm': {'model.activation': 'elu'},
        'difference': (0.0, None),
        'label': 'loss difference, ELU minus GELU (nats per token)',
    },
)
