"""A readout of fixed equiangular rows is as good as one that is learned.

Paper:    arXiv:2303.11637, Equiangular Basis Vectors
Says:     fixed vectors at nearly equal angles, with which the cosine of the last features is
          classified, take the place of a trained classifier without loss, and of its parameters.
Here:     0.26 million parameters, 1.0 million tokens of Python sources, in 1,000 steps; 512 classes
          in 64 dimensions, so that no two rows can be nearly orthogonal, where the paper has 1,000
          classes of images in as many dimensions; the published temperature, and a learning rate
          of its own for every variant.
Counts:   the loss is at most 0.03 nats above that of a learned readout, and below that of random
          rows, which have no equal angles.
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
    },
    {
        'study': 'frozen',
        'arm': {'model.readout': 'equiangular'},
        'against': {'model.readout': 'random'},
        'difference': (None, 0.0),
    },
)
