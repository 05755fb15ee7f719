"""Muon brings singular values into a band around 1.

Paper:    Muon, https://kellerjordan.github.io/posts/muon/, and its code
Says:     five iterations of Newton and Schulz make of singular values something between 0.5 and
          1.5.
Here:     the update behind 20 drawn gradients of 128 x 128 and 64 x 256, ten seeds, no training, in
          float64 where the code has bfloat16; random ones, and some of condition 1,000.
Counts:   at least 95% of the singular values are in the band for both kinds, none is above 1.5, and
          the condition number is at most a tenth of that of momentum.
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
    },
    {
        'study': 'measure',
        'value': 'share_of_singular_values_of_muon_in_band_of_ill_conditioned_gradients',
        'within': (0.95, None),
    },
    {'study': 'measure', 'value': 'largest_singular_value_of_muon', 'within': (None, 1.5)},
    {
        'study': 'measure',
        'value': 'condition_number_of_muon_over_that_of_momentum',
        'within': (None, 0.1),
    },
)
