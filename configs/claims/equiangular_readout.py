"""A readout with fixed equiangular rows is as good as a learned one.

Paper:    arXiv:2303.11637, Equiangular Basis Vectors
Says:     Fixed vectors at nearly equal angles, which classify by the cosine with the last features,
          replace a trained classifier and its parameters without loss of accuracy.
Here:     A model with 0.26 million parameters is trained for 1,000 steps on 1.0 million tokens of
          Python source code. There are 512 classes in 64 dimensions, so rows cannot all be nearly
          orthogonal; the paper has 1,000 image classes mostly in as many dimensions, and at least
          in 100. The temperature is the published one.
Counts:   the loss is at most 0.03 nats above that of a learned readout, and below that of random
          rows, which do not have equal angles.
"""

PART = 'weights'
CAUTION = (
    'With learned rows the cosine costs nothing that is seen; what costs 1.2 nats is that rows are '
    'fixed. The control was first on MLPs, and was put on readouts with the results in view.'
)
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
CONTROL = (
    {
        'study': 'frozen',
        'arm': {'model.readout': 'random'},
        'against': {'model.readout': 'cosines'},
        'difference': (0.03, None),
        'label': (
            'loss difference, random rows minus learned rows, both by the cosine (nats per token)'
        ),
    },
)
TWIN = (
    {
        'study': 'frozen',
        'arm': {'model.readout': 'random'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, rows at random angles, which are not equal, minus learned readout '
            '(nats per token)'
        ),
    },
)
FIDELITY = {
    'equiangular rows': {
        'setting': (
            'the last 64 activations directly on 512 fixed rows, temperature 0.07, no learned '
            'projection, z-loss 1e-4, no smoothing; rows by our own descent; AdamW with decay '
            '0.1, 1,000 steps, rate tuned'
        ),
        'published': (
            'a trained layer maps features to the dimension of the rows (1,000, also 100 to '
            '2,000) for 1,000 classes, temperature 0.07, smoothing 0.1 with mixup and cutmix; SGD '
            'at 0.5, decay 2e-5, batch 1,024, 105 epochs of ResNet-50'
        ),
        'source': (
            'arXiv:2303.11637; github.com/aassxun/Equiangular-Basis-Vectors, '
            'EBV_Dim_Experiment/EBV_Dim_ImageNet.py and Generate_EBV/Generate_EBV.py'
        ),
    },
    'learned readout': {
        'setting': (
            'plain logits with a learned matrix, no cosine and no temperature; the same training '
            'at a tuned rate of its own'
        ),
        'published': (
            'a fully connected layer on plain logits, smoothing 0.1, mixup and cutmix, decay '
            '2e-5, 105 epochs; SGD or AdamW, at rates of its own'
        ),
        'source': (
            'github.com/aassxun/Equiangular-Basis-Vectors, '
            'ImageNet_Validation_Experiment/base(fc)_ImageNet.py'
        ),
    },
    'random rows': {
        'setting': 'fixed Gaussian rows of unit length, the same cosine and temperature',
        'published': 'no such control is known here',
        'source': 'arXiv:2303.11637',
    },
}
