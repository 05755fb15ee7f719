"""h-calibration has a lower calibration error than maximum likelihood and than a temperature.

Paper:    arXiv:2506.17968, h-calibration
Says:     A map fitted to the h-calibration error has a lower calibration error than temperature
          scaling and other calibrators.
Here:     Instead of image classifiers, random logits for five events whose true probabilities are
          known, made overconfident in three ways. In the first, a single temperature is the correct
          calibration; in the others no temperature is. A mixture of 16 temperatures is fitted on
          20,000 places in 1,000 steps, to the h-calibration error or by maximum likelihood. Both
          keep the parameters of the lowest ECE on these places, as the paper's code does, and are
          judged on 50,000 others, five seeds. Classes are equally frequent, and each step leaves
          out one, in turn; the paper's code averages over all of them in each step. Only the most
          likely event is judged.
Counts:   if the correct calibration is not a temperature, the ECE in 15 bins is lower than after
          maximum likelihood of the same map, and than after a temperature. If it is one, the ECE is
          at most 0.005 higher than after maximum likelihood.
"""

PART = 'evaluation'
STUDIES = {
    'measure': 'measure:overconfident_logits',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'ece_of_h_less_likelihood_squared',
        'within': (None, 0.0),
        'label': 'ECE with h-calibration minus ECE with maximum likelihood, squared logits',
    },
    {
        'study': 'measure',
        'value': 'ece_of_h_less_likelihood_unevenly_scaled',
        'within': (None, 0.0),
        'label': 'ECE with h-calibration minus ECE with maximum likelihood, unevenly scaled logits',
    },
    {
        'study': 'measure',
        'value': 'ece_of_h_less_likelihood_scaled',
        'within': (None, 0.005),
        'label': 'ECE with h-calibration minus ECE with maximum likelihood, scaled logits',
    },
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
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'ece_of_wrong_less_right_temperature',
        'within': (0.005, None),
        'label': (
            'ECE with a temperature that is 10% too low minus ECE with the right one, scaled logits'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'ece_of_absolute_less_likelihood_squared',
        'within': (None, 0.0),
        'label': (
            'ECE with absolute errors of single events, which are not averaged over a window '
            'before, minus ECE with maximum likelihood, squared logits'
        ),
    },
    {
        'study': 'measure',
        'value': 'ece_of_absolute_less_likelihood_unevenly_scaled',
        'within': (None, 0.0),
        'label': (
            'ECE with absolute errors of single events, which are not averaged over a window '
            'before, minus ECE with maximum likelihood, unevenly scaled logits'
        ),
    },
)
FIDELITY = {
    'h-calibration': {
        'setting': (
            'mixture of 16 temperatures, Adam at 0.005, 1,000 steps of 5,000 places less a class, '
            'the parameters of the lowest ECE of 250 epochs on the fitted places; windows of 201 '
            'events, 15 clusters, one class of 5 left out in each step'
        ),
        'published': (
            'the same windows, clusters and rate, which halves on a plateau; batches of 5,000, up '
            'to 2,000 epochs with a patience of 160, the parameters of the lowest debiased ECE in '
            'bins of equal mass on the fitted places; the mean over all classes left out, and one '
            'of several maps is chosen for each image classifier'
        ),
        'source': (
            'arXiv:2506.17968; github.com/WenjianHuang93/h-Calibration, loss/hCalib.py, '
            'models/tsensemble_linear.py, utils/builder.py, calibrate.py and README.md'
        ),
    },
    'maximum likelihood': {
        'setting': (
            'the same map, initial values, rate, steps and choice of parameters, with the mean log '
            'loss of 5,000 places'
        ),
        'published': (
            'the code has cross-entropy as another loss of its maps; results with it are not known '
            'here'
        ),
        'source': 'github.com/WenjianHuang93/h-Calibration, utils/builder.py',
    },
    'temperature': {
        'setting': (
            'one temperature from 1/4 to 4, of the lowest log loss on the same 20,000 places'
        ),
        'published': 'temperature scaling is one of many calibrators compared, by up to 19 metrics',
        'source': 'github.com/WenjianHuang93/h-Calibration, README.md and comparison',
    },
}
