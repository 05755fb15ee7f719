"""Layers of SELU keep mean 0 and variance 1.

Paper:    arXiv:1706.02515, Self-Normalizing Neural Networks
Says:     mean 0 and variance 1 are a fixed point of a layer of SELU that attracts, so that deep
          networks need no norms.
Here:     the moments of one layer in closed form; 32 plain layers of 512 units with Gaussian
          weights, not trained, ten seeds, and GELU with the same weights. Residual connections,
          which transformers have, are not part of it.
Counts:   mean 0 and variance 1 come out of one layer to 1e-6; the slope there is below 1; behind 32
          layers the variance is between 0.9 and 1.1, and that of GELU is below 0.1.
"""

PART = 'activations'
STUDIES = {
    'measure': 'measure:self_normalizing',
}
HOLDS = (
    {'study': 'measure', 'value': 'mean', 'within': (-1e-06, 1e-06)},
    {'study': 'measure', 'value': 'variance', 'within': (0.999999, 1.000001)},
    {'study': 'measure', 'value': 'slope', 'within': (None, 1.0)},
    {'study': 'measure', 'value': 'variance_behind_32_layers_of_selu', 'within': (0.9, 1.1)},
    {'study': 'measure', 'value': 'variance_behind_32_layers_of_gelu', 'within': (None, 0.1)},
)
