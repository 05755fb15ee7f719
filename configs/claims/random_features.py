"""Random features estimate the kernel of a ReLU layer, and better at right angles.

Paper:    arXiv:2310.13225, Scalable Neural Network Kernels
Says:     what a layer makes of an input and of its weights is a kernel of the two, which features
          of each alone estimate without bias: the error falls with the number of features.
Here:     the kernel itself, of pairs of unit vectors in 64 dimensions at angles from 0 to 180
          degrees, 64 to 4,096 features, ReLU; no network, and no other activation.
Counts:   the error falls as a power of the number between -0.6 and -0.4, of independent directions
          and of those at right angles, and is lower at right angles.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:random_features',
}
HOLDS = (
    {'study': 'measure', 'value': 'slope_of_gaussian', 'within': (-0.6, -0.4)},
    {'study': 'measure', 'value': 'slope_of_orthogonal', 'within': (-0.6, -0.4)},
    {'study': 'measure', 'value': 'orthogonal_over_gaussian', 'within': (None, 1.0)},
)
