"""h-calibration is better calibrated than a temperature.

Paper:    arXiv:2506.17968, h-calibration
Says:     a map that makes the error of h-calibration small has a lower calibration error than
          temperature scaling and other calibrators.
Here:     drawn logits of five events in place of classifiers of images, whose true probabilities
          are known; three ways to be too sure, of which one temperature is the truth of the first;
          20,000 places to fit on, in 500 steps, and 50,000 others to judge by, five seeds; all
          count at once, where the paper leaves out each class in turn, and the last parameters are
          kept, where the paper's code keeps those of the best error. Only the likeliest event is
          judged.
Counts:   the ECE in 15 bins is lower than a temperature's where the truth is no temperature, and at
          most 0.005 higher where it is one.
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
    {'study': 'measure', 'value': 'ece_of_h_less_temperature_squared', 'within': (None, 0.0)},
    {
        'study': 'measure',
        'value': 'ece_of_h_less_temperature_unevenly_scaled',
        'within': (None, 0.0),
    },
    {'study': 'measure', 'value': 'ece_of_h_less_temperature_scaled', 'within': (None, 0.005)},
)
