"""RMSNorm hides the scale of weights and data, as LayerNorm does, and not their centre.

Paper:    arXiv:1910.07467, Root Mean Square Layer Normalization
Says:     both norms leave the result as it is where weights, the data or single cases are scaled,
          and neither where one neuron's weights are scaled or the data are shifted; LayerNorm alone
          where all neurons' weights are shifted (table 1). The gradient falls as weights grow.
Here:     a layer of 64 neurons on 256 cases of 48 inputs, drawn, ten seeds; scales are up to 10.
          That centring may be left out at no loss is another claim, of training.
Counts:   the result changes by at most 0.01% where it is said to stay, and by at least 10% where it
          is said not to; the gradient in weights ten times as large is a tenth, to 0.1%.
"""

PART = 'norms'
STUDIES = {
    'measure': 'measure:invariances',
}
HOLDS = (
    {'study': 'measure', 'value': 'rmsnorm_of_scaled_weights', 'within': (None, 1e-4)},
    {'study': 'measure', 'value': 'rmsnorm_of_centred_weights', 'within': (0.1, None)},
    {'study': 'measure', 'value': 'rmsnorm_of_a_scaled_neuron', 'within': (0.1, None)},
    {'study': 'measure', 'value': 'rmsnorm_of_scaled_data', 'within': (None, 1e-4)},
    {'study': 'measure', 'value': 'rmsnorm_of_centred_data', 'within': (0.1, None)},
    {'study': 'measure', 'value': 'rmsnorm_of_scaled_cases', 'within': (None, 1e-4)},
    {'study': 'measure', 'value': 'gradient_times_scale_of_rmsnorm', 'within': (0.999, 1.001)},
    {'study': 'measure', 'value': 'layernorm_of_scaled_weights', 'within': (None, 1e-4)},
    {'study': 'measure', 'value': 'layernorm_of_centred_weights', 'within': (None, 1e-4)},
    {'study': 'measure', 'value': 'layernorm_of_a_scaled_neuron', 'within': (0.1, None)},
    {'study': 'measure', 'value': 'layernorm_of_scaled_data', 'within': (None, 1e-4)},
    {'study': 'measure', 'value': 'layernorm_of_centred_data', 'within': (0.1, None)},
    {'study': 'measure', 'value': 'layernorm_of_scaled_cases', 'within': (None, 1e-4)},
    {'study': 'measure', 'value': 'gradient_times_scale_of_layernorm', 'within': (0.999, 1.001)},
)
