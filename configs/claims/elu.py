"""ELU learns faster than ReLU.

Paper:    arXiv:1511.07289, Fast and Accurate Deep Network Learning by Exponential Linear Units
Says:     Negative values push the mean activation towards 0, which speeds up learning compared with
          ReLU.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains image classifiers, without norms or with batch norm.
Counts:   the loss after the same number of steps is lower than that of ReLU.
"""

from configs.claims import _shared

PART = 'activations'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
    **_shared.BLOCKS_SETTINGS,
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.activation': 'elu'},
        'against': {'model.activation': 'relu'},
        'difference': (None, 0.0),
        'label': 'loss difference, ELU minus ReLU (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
NUISANCES = _shared.BLOCKS_NUISANCES
FIDELITY = {
    'ELU': {
        'setting': (
            'alpha 1; pre-norm with RMSNorm, no biases, AdamW with betas 0.9 and 0.95 and decay '
            '0.1, its own tuned rate, warm-up of 20 of 200 steps and cosine to 0'
        ),
        'published': (
            'alpha 1; MLPs of eight layers on MNIST by SGD at 0.01 with batches of 64; '
            'convolutional networks on CIFAR-100 by SGD with momentum 0.9, decay 5e-4 and a '
            'falling rate tuned for ReLU, with and without batch norm'
        ),
        'source': 'arXiv:1511.07289, section 4',
    },
    'ReLU': {
        'setting': 'trained as ELU, at its own tuned rate',
        'published': 'the same networks and rates as ELU',
        'source': 'arXiv:1511.07289, section 4',
    },
}
