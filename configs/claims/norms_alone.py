"""Training only the norms of a random network is better than training equally many weights.

Paper:    arXiv:2003.00152, Training BatchNorm and Only BatchNorm
Says:     Networks with random weights that train only the gains and biases of BatchNorm are far
          more accurate than networks that train as many weights, and many of the gains go to 0.
Here:     Networks with four hidden layers of 128 units classify 10 classes of Gaussian clusters:
          4,096 rows seen 20 times. Each variant has the best of five learning rates, which three
          seeds choose; ten other seeds count. The readout stays at its random initial values. The
          paper trains convolutional networks of up to 866 layers on images, in which a third or
          more of the gains are below 0.01.
Counts:   the accuracy is at least five points above that of training two weights of each unit, and
          at least a fifth of the gains are below 0.01.
"""

PART = 'norms'
CAUTION = (
    "Nothing decays here. The authors' code decays all parameters, gains included, which may "
    'decide how many gains end near 0.'
)
STUDIES = {
    'measure': 'measure:norms_alone',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'gain_of_norms_over_weights',
        'within': (0.05, None),
        'label': 'accuracy difference, trained norms minus trained weights (fraction)',
    },
    {
        'study': 'measure',
        'value': 'share_of_gains_near_0',
        'within': (0.2, None),
        'label': 'share of gains below 0.01 (fraction)',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'gain_of_all_weights_over_weights',
        'within': (0.05, None),
        'label': (
            'accuracy difference, all weights of hidden layers trained minus two of each unit '
            '(fraction)'
        ),
    },
    {
        'study': 'measure',
        'value': 'share_of_decayed_gains_near_0',
        'within': (0.2, None),
        'label': 'share of gains below 0.01 if norms decay by 0.5% in each step (fraction)',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'gain_of_gains_over_weights',
        'within': (0.05, None),
        'label': (
            'accuracy difference, norms whose biases stay at 0 minus trained weights (fraction)'
        ),
    },
)
FIDELITY = {
    'trained norms': {
        'setting': (
            'gains from U(0, 1), biases 0, no weight decay, Adam with cosine to 0, the best of '
            'five rates, 1,280 steps of 64 rows; no residual connections, readout frozen, test '
            'inputs normalised as one batch'
        ),
        'published': (
            'gains from U(0, 1), biases 0, SGD with momentum 0.9 and, by default, decay 1e-4 of '
            'all parameters, rate 0.1 divided by 10 after 80 and 120 of 160 epochs, batches of '
            '128; ResNets on CIFAR-10, test images with running statistics'
        ),
        'source': (
            'arXiv:2003.00152; facebookresearch/open_lth, models/cifar_resnet.py, '
            'models/bn_initializers.py and training/optimizers.py'
        ),
    },
    'trained weights': {
        'setting': (
            'two random weights of each hidden unit, the others and the norms frozen; the same '
            'optimizer with its own best rate'
        ),
        'published': (
            'as many randomly chosen parameters elsewhere in the network; the rest is not known '
            'here'
        ),
        'source': 'arXiv:2003.00152, abstract',
    },
}
