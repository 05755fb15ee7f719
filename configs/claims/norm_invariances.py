"""RMSNorm removes the scale of weights and data, as LayerNorm does, but not their mean.

Paper:    arXiv:1910.07467, Root Mean Square Layer Normalization
Says:     Both norms leave the result unchanged if all weights, the data or single cases are scaled,
          and neither does if the weights of one neuron are scaled or the data are shifted. Only
          LayerNorm is unchanged if the weights of all neurons are shifted (table 1). The gradient
          falls as weights grow.
Here:     A layer of 64 neurons on 256 random cases of 48 inputs, ten seeds, with scales of up to
          10. Whether leaving out the mean costs quality in training is a separate claim.
Counts:   the result changes by at most 0.01% where the paper says that it stays, and by at least
          10% where it does not. With weights ten times as large the gradient is a tenth, up to
          0.1%.
"""

PART = 'norms'
STUDIES = {
    'measure': 'measure:invariances',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'rmsnorm_of_scaled_weights',
        'within': (None, 1e-4),
        'label': 'relative change with RMSNorm, scaled weights',
    },
    {
        'study': 'measure',
        'value': 'rmsnorm_of_centred_weights',
        'within': (0.1, None),
        'label': 'relative change with RMSNorm, shifted weights',
    },
    {
        'study': 'measure',
        'value': 'rmsnorm_of_a_scaled_neuron',
        'within': (0.1, None),
        'label': 'relative change with RMSNorm, one scaled neuron',
    },
    {
        'study': 'measure',
        'value': 'rmsnorm_of_scaled_data',
        'within': (None, 1e-4),
        'label': 'relative change with RMSNorm, scaled data',
    },
    {
        'study': 'measure',
        'value': 'rmsnorm_of_centred_data',
        'within': (0.1, None),
        'label': 'relative change with RMSNorm, shifted data',
    },
    {
        'study': 'measure',
        'value': 'rmsnorm_of_scaled_cases',
        'within': (None, 1e-4),
        'label': 'relative change with RMSNorm, scaled cases',
    },
    {
        'study': 'measure',
        'value': 'gradient_times_scale_of_rmsnorm',
        'within': (0.999, 1.001),
        'label': 'gradient times scale over original gradient, RMSNorm',
    },
    {
        'study': 'measure',
        'value': 'layernorm_of_scaled_weights',
        'within': (None, 1e-4),
        'label': 'relative change with LayerNorm, scaled weights',
    },
    {
        'study': 'measure',
        'value': 'layernorm_of_centred_weights',
        'within': (None, 1e-4),
        'label': 'relative change with LayerNorm, shifted weights',
    },
    {
        'study': 'measure',
        'value': 'layernorm_of_a_scaled_neuron',
        'within': (0.1, None),
        'label': 'relative change with LayerNorm, one scaled neuron',
    },
    {
        'study': 'measure',
        'value': 'layernorm_of_scaled_data',
        'within': (None, 1e-4),
        'label': 'relative change with LayerNorm, scaled data',
    },
    {
        'study': 'measure',
        'value': 'layernorm_of_centred_data',
        'within': (0.1, None),
        'label': 'relative change with LayerNorm, shifted data',
    },
    {
        'study': 'measure',
        'value': 'layernorm_of_scaled_cases',
        'within': (None, 1e-4),
        'label': 'relative change with LayerNorm, scaled cases',
    },
    {
        'study': 'measure',
        'value': 'gradient_times_scale_of_layernorm',
        'within': (0.999, 1.001),
        'label': 'gradient times scale over original gradient, LayerNorm',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'rmsnorm_with_large_eps_of_scaled_weights',
        'within': (1e-4, None),
        'label': (
            'relative change with RMSNorm with eps 0.003, scaled weights (about 0.0015 expected)'
        ),
    },
    {
        'study': 'measure',
        'value': 'gradient_times_scale_of_rmsnorm_with_large_eps',
        'within': (1.001, None),
        'label': (
            'gradient times scale over original gradient, RMSNorm with eps 0.003 (about 1.0015 '
            'expected)'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'rmsnorm_over_cases_of_scaled_cases',
        'within': (None, 1e-4),
        'label': 'relative change with RMSNorm whose mean is over the cases, scaled cases',
    },
    {
        'study': 'measure',
        'value': 'rmsnorm_over_cases_of_a_scaled_neuron',
        'within': (0.1, None),
        'label': 'relative change with RMSNorm whose mean is over the cases, one scaled neuron',
    },
    {
        'study': 'measure',
        'value': 'rmsnorm_without_root_of_scaled_weights',
        'within': (None, 1e-4),
        'label': 'relative change with RMSNorm that divides by the mean square, scaled weights',
    },
    {
        'study': 'measure',
        'value': 'gradient_times_scale_of_rmsnorm_without_root',
        'within': (0.999, 1.001),
        'label': (
            'gradient times scale over original gradient, RMSNorm that divides by the mean square'
        ),
    },
)
FIDELITY = {
    'RMSNorm and LayerNorm': {
        'setting': (
            'gain 1, bias 0, eps 1e-6 inside the root, Gaussian inputs and weights, factors of up '
            'to 10, shifts from N(0, 1)'
        ),
        'published': (
            'a derivation for any weights, factor and shift, without eps; code with eps 1e-8 or '
            '1e-5'
        ),
        'source': (
            'arXiv:1910.07467, table 1 and section 4; bzhangGo/rmsnorm, README.md and '
            'rmsnorm_torch.py'
        ),
    },
}
