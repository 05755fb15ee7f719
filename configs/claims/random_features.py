"""Random features estimate the kernel of a ReLU layer, and orthogonal ones do so better.

Paper:    arXiv:2310.13225, Scalable Neural Network Kernels
Says:     A layer's output is a kernel of its input and its weights. Random features of each
          estimate this kernel without bias, and the error falls with the number of features.
Here:     The kernel alone, of pairs of unit vectors in 64 dimensions at angles from 0 to 180
          degrees, with 64 to 4,096 features and ReLU. No network, and no other activation.
Counts:   the error falls as a power of the number of features between -0.6 and -0.4, for
          independent and for orthogonal directions, and is lower for orthogonal ones.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:random_features',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'slope_of_gaussian',
        'within': (-0.6, -0.4),
        'label': 'slope of log error over log number of features, independent directions',
    },
    {
        'study': 'measure',
        'value': 'slope_of_orthogonal',
        'within': (-0.6, -0.4),
        'label': 'slope of log error over log number of features, orthogonal directions',
    },
    {
        'study': 'measure',
        'value': 'orthogonal_over_gaussian',
        'within': (None, 1.0),
        'label': 'error with orthogonal directions over that with independent ones',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'all_over_half_of_gaussian',
        'within': (None, 0.8),
        'label': 'error with independent directions over that with half as many',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'slope_of_repeated',
        'within': (-0.6, -0.4),
        'label': (
            'slope of log error over log number of features, orthogonal directions with the same '
            'random key for each 64'
        ),
    },
    {
        'study': 'measure',
        'value': 'repeated_over_gaussian',
        'within': (None, 1.0),
        'label': (
            'error with orthogonal directions that have the same random key for each 64, over that '
            'with independent ones'
        ),
    },
)
FIDELITY = {
    'independent directions': {
        'setting': (
            'ReLU features with Gaussian directions, 64 to 4,096, unit vectors in 64 dimensions, '
            'compared with the exact kernel, not with relu(w.x); 128 pairs, 16 draws, ten seeds'
        ),
        'published': (
            'the same map, max(0, g.x) / sqrt(m) of inputs and weights, as one of several '
            'kernels; sizes of their test of pointwise errors are not known here'
        ),
        'source': (
            'arXiv:2310.13225; github.com/arijitthegame/neural-network-kernels, src/nnk/nnk.py'
        ),
    },
    'orthogonal directions': {
        'setting': 'orthogonal within each 64 directions, lengths of independent Gaussian vectors',
        'published': (
            'an option of the code, from performer attention, with lengths of Gaussian vectors '
            '(scaling 0)'
        ),
        'source': 'github.com/arijitthegame/neural-network-kernels, src/nnk/nnk.py',
    },
}
