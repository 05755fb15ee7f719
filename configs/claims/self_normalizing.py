"""SELU layers keep mean 0 and variance 1.

Paper:    arXiv:1706.02515, Self-Normalizing Neural Networks
Says:     Mean 0 and variance 1 are an attracting fixed point of a SELU layer, so deep networks need
          no norms.
Here:     The mean and variance after one layer are computed in closed form. In addition, inputs
          pass through 32 plain layers of 512 units with untrained Gaussian weights, ten seeds. The
          test has no residual connections, which transformers have.
Counts:   one layer returns mean 0 and variance 1 up to 1e-6, and the slope at this point is below
          1. After 32 layers the variance is between 0.9 and 1.1.
"""

PART = 'activations'
STUDIES = {
    'measure': 'measure:self_normalizing',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'mean',
        'within': (-1e-06, 1e-06),
        'label': 'mean after one SELU layer',
    },
    {
        'study': 'measure',
        'value': 'variance',
        'within': (0.999999, 1.000001),
        'label': 'variance after one SELU layer',
    },
    {
        'study': 'measure',
        'value': 'slope',
        'within': (None, 1.0),
        'label': 'slope of the map at the fixed point',
    },
    {
        'study': 'measure',
        'value': 'variance_behind_32_layers_of_selu',
        'within': (0.9, 1.1),
        'label': 'variance after 32 SELU layers',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'variance_behind_32_layers_of_selu_with_large_weights',
        'within': (1.1, None),
        'label': 'variance after 32 SELU layers, weights of variance 1.1 / fan_in',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'mean_of_half_scaled_selu',
        'within': (-1e-06, 1e-06),
        'label': 'mean after one layer of SELU that is scaled above 0 only',
    },
    {
        'study': 'measure',
        'value': 'variance_of_half_scaled_selu',
        'within': (0.999999, 1.000001),
        'label': 'variance after one layer of SELU that is scaled above 0 only',
    },
    {
        'study': 'measure',
        'value': 'variance_behind_32_layers_of_half_scaled_selu',
        'within': (0.9, 1.1),
        'label': 'variance after 32 layers of SELU that is scaled above 0 only',
    },
)
FIDELITY = {
    'SELU': {
        'setting': (
            'scale 1.0507 and alpha 1.6733; closed form, and 32 layers of 512 units with Gaussian '
            'weights of variance 1 / fan_in, no biases, no dropout, untrained'
        ),
        'published': (
            'the same constants and initial variance; the theorem asks for weights of sum 0 and '
            'sum of squares 1 in each unit; trained by SGD, with alpha-dropout in some tests'
        ),
        'source': 'arXiv:1706.02515, equations 2 and 14; bioinf-jku/SNNs, figure1/run.py',
    },
}
