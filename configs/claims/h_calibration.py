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
FIDELITY = {
    'h-calibration': {
        'setting': (
            'mixture of 16 temperatures, Adam at 0.005, batches of 5,000, 500 steps, final '
            'parameters; windows of 201 events, 15 clusters, 5 classes together'
        ),
        'published': (
            'the same windows, clusters, rate and batches; up to 2,000 epochs with a patience of '
            '160, the parameters of the lowest error; each class is left out in turn, and one of '
            'several maps is chosen for each image classifier'
        ),
        'source': (
            'arXiv:2506.17968; github.com/WenjianHuang93/h-Calibration, loss/hCalib.py, '
            'models/tsensemble_linear.py, calibrate.py and README.md'
        ),
    },
    'temperature': {
        'setting': (
            'one temperature from 1/4 to 4, of the lowest log loss on the same 20,000 places'
        ),
        'published': 'temperature scaling is one of many calibrators compared, by up to 19 metrics',
        'source': 'github.com/WenjianHuang93/h-Calibration, README.md and comparison',
    },
}
