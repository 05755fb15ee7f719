"""GELU reaches a lower loss than ReLU and ELU.

Paper:    arXiv:1606.08415, Gaussian Error Linear Units
Says:     Weighting inputs by their value improves on ReLU and ELU in all tasks that the paper
          tried.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the losses of ReLU and of ELU are higher than that of GELU.
"""

from configs.claims import _shared

PART = 'activations'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
    'equations': 'configs/studies/twins.py:equations',
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
CONTROL = _shared.BLOCKS_CONTROL
TWIN = (
    {
        'study': 'equations',
        'arm': {'model.activation': 'relu'},
        'against': {'model.activation': 'silu'},
        'difference': (0.0, None),
        'label': 'loss difference, ReLU minus GELU without its factor of 1.702 (nats per token)',
    },
    {
        'study': 'equations',
        'arm': {'model.activation': 'elu'},
        'against': {'model.activation': 'silu'},
        'difference': (0.0, None),
        'label': 'loss difference, ELU minus GELU without its factor of 1.702 (nats per token)',
    },
)
FIDELITY = {
    'GELU': {
        'setting': (
            'tanh form; pre-norm with RMSNorm, no biases, AdamW with betas 0.9 and 0.95 and decay '
            '0.1, its own tuned rate, warm-up of 20 of 200 steps and cosine to 0'
        ),
        'published': (
            'tanh form in the code; MLPs of eight layers and 128 units on MNIST, columns of unit '
            'length, biases, Adam at 1e-3, 1e-4 or 1e-5, 50 epochs of batches of 128, dropout 0 or '
            '0.5, no norms'
        ),
        'source': 'arXiv:1606.08415; hendrycks/GELUs, mnist_fcn.py',
    },
    'ReLU': {
        'setting': 'trained as GELU, at its own tuned rate',
        'published': 'the same networks and rates as GELU',
        'source': 'hendrycks/GELUs, mnist_fcn.py',
    },
    'ELU': {
        'setting': 'alpha 1, trained as GELU, at its own tuned rate',
        'published': 'alpha 1, the same networks and rates as GELU',
        'source': 'arXiv:1606.08415, figure 1; hendrycks/GELUs, mnist_fcn.py',
    },
}
