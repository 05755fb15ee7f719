"""h-calibration is better calibrated than a temperature.

Paper:    arXiv:2506.17968, h-calibration
Says:     A map fitted to the h-calibration error has a lower calibration error than temperature
          scaling and other calibrators.
Here:     Instead of image classifiers, random logits for five events whose true probabilities are
          known, made overconfident in three ways; in the first, a single temperature is the correct
          calibration. Fitted on 20,000 places in 500 steps and judged on 50,000 others, five seeds.
          All classes count at once, whereas the paper leaves out each class in turn. The final
          parameters are used, whereas the paper's code keeps those of the lowest error. Only the
          most likely event is judged.
Counts:   the ECE in 15 bins is lower than that of a temperature if the correct calibration is not a
          temperature, and at most 0.005 higher if it is.
"""

PART = 'evaluation'
WITHDRAWN = (
    'The test does not discriminate: the same map, fitted by maximum likelihood instead of the '
    'h-calibration error, meets every condition too.'
)
STUDIES = {
    'measure': 'measure:overconfident_logits',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'ece_of_h_less_temperature_squared',
        'within': (None, 0.0),
        'label': 'ECE with h-calibration minus ECE with a temperature, squared logits',
    },
    {
        'study': 'measure',
        'value': 'ece_of_h_less_temperature_unevenly_scaled',
        'within': (None, 0.0),
        'label': 'ECE with h-calibration minus ECE with a temperature, unevenly scaled logits',
    },
    {
        'study': 'measure',
        'value': 'ece_of_h_less_temperature_scaled',
        'within': (None, 0.005),
        'label': 'ECE with h-calibration minus ECE with a temperature, scaled logits',
    },
)
