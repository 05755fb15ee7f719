"""Muon brings singular values into a band around 1.

Paper:    Muon, https://kellerjordan.github.io/posts/muon/, and its code
Says:     Five Newton-Schulz iterations bring the singular values into the range from 0.5 to 1.5.
Here:     The update of 20 random gradients of shapes 128 x 128 and 64 x 256, ten seeds, without
          training, in float64 instead of the bfloat16 of the code. The gradients include random
          ones and some with a condition number of 1,000.
Counts:   at least 95% of the singular values are in the band for both kinds of gradients, none is
          above 1.5, and the condition number is at most a tenth of that of momentum.
"""

PART = 'optimizers'
STUDIES = {
    'measure': 'measure:singular_values_of_updates',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'share_of_singular_values_of_muon_in_band_of_random_gradients',
        'within': (0.95, None),
        'label': 'share of singular values in the band, random gradients',
    },
    {
        'study': 'measure',
        'value': 'share_of_singular_values_of_muon_in_band_of_ill_conditioned_gradients',
        'within': (0.95, None),
        'label': 'share of singular values in the band, ill-conditioned gradients',
    },
    {
        'study': 'measure',
        'value': 'largest_singular_value_of_muon',
        'within': (None, 1.5),
        'label': 'largest singular value',
    },
    {
        'study': 'measure',
        'value': 'condition_number_of_muon_over_that_of_momentum',
        'within': (None, 0.1),
        'label': 'condition number of the Muon update over that of momentum',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': (
            'share_of_singular_values_of_12_convergent_steps_in_band_of_ill_conditioned_gradients'
        ),
        'within': (0.95, None),
        'label': (
            'share of singular values in the band, ill-conditioned gradients, after 12 '
            'steps of the polynomial that converges to 1'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'share_of_singular_values_of_5_convergent_steps_in_band_of_random_gradients',
        'within': (0.95, None),
        'label': (
            'share of singular values in the band, random gradients, with the coefficients '
            '2, -1.5 and 0.5 of a slower polynomial'
        ),
    },
)
FIDELITY = {
    'Muon': {
        'setting': (
            'coefficients 3.4445, -4.7750 and 2.0315, five steps, eps 1e-7, momentum 0.95, '
            'Nesterov, no factor by shape, float64'
        ),
        'published': (
            'the same constants in bfloat16, with the factor sqrt(max(1, outputs / inputs)) '
            'after the iterations'
        ),
        'source': 'github.com/KellerJordan/Muon, muon.py',
    },
    'momentum': {
        'setting': 'Nesterov momentum 0.95 of the same gradients, in float64',
        'published': (
            'the same momentum, before the iterations; the authors state no ratio of condition '
            'numbers'
        ),
        'source': 'github.com/KellerJordan/Muon, muon.py',
    },
}
