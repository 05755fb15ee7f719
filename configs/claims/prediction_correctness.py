"""A calibrator trained on correctness has a lower calibration error than one of cross-entropy.

Paper:    arXiv:2404.13016, Optimizing Calibration by Gaining Aware of Prediction Correctness
Says:     Cross-entropy gives narrowly wrong predictions too much confidence. A temperature per
          sample, trained to make confidence high for correct predictions and low for wrong ones,
          calibrates.
Here:     Instead of image classifiers, random logits for five events, made overconfident in two
          ways that no single temperature undoes, or without information on which prediction is
          correct, with 80% correct. The same network, which computes a temperature from the
          place's own probabilities, without the paper's transformed inputs, is trained on
          correctness or with cross-entropy on 20,000 places, and judged on 50,000 others, ten
          seeds. Correctness is weighted in two ways: all places equally, or correct and wrong ones
          with equal total weight, as in the paper's code, for which a confidence of 1/2 is the best
          answer without information.
Counts:   with both weightings and all three kinds of logits, the ECE of the most likely event in 15
          bins is lower than with cross-entropy.
"""

PART = 'evaluation'
STUDIES = {
    'measure': 'measure:trained_on_correctness',
}
_LOGITS = {
    'squared': 'squared logits',
    'unevenly_scaled': 'unevenly scaled logits',
    'blind': 'logits without information',
}
HOLDS = tuple(
    {
        'study': 'measure',
        'value': f'ece_of_{weights}_less_cross_entropy_{link}',
        'within': (None, 0.0),
        'label': f'ECE with {words} weights minus ECE with cross-entropy, {logits}',
    }
    for weights, words in (('even', 'equal'), ('balanced', 'balanced'))
    for link, logits in _LOGITS.items()
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'ece_of_uncalibrated_less_cross_entropy_squared',
        'within': (0.05, None),
        'label': 'ECE without calibration minus ECE with cross-entropy, squared logits',
    },
)
TWIN = tuple(
    {
        'study': 'measure',
        'value': f'ece_of_true_event_less_cross_entropy_{link}',
        'within': (None, 0.0),
        'label': (
            'ECE with equal weights, from the probability of the event that happened instead of '
            f'the most likely one, minus ECE with cross-entropy, {_LOGITS[link]}'
        ),
    }
    for link in ('squared', 'unevenly_scaled')
)
FIDELITY = {
    'equal weights': {
        'setting': (
            'temperature from 0.1 to 10 by a network with 5 hidden units from the 5 probabilities '
            'of a place, starting near 1; Adam at 0.01, 2,000 steps of 1,000 places; all places '
            'weigh the same'
        ),
        'published': 'not known here: their code has the balanced weights alone',
        'source': (
            'github.com/liuyvchi/Correctness-aware-calibration, '
            'src/cal_metrics/temperature_scaling_CA.py'
        ),
    },
    'balanced weights': {
        'setting': (
            'the same, with weight 1 - accuracy for correct places and accuracy for wrong ones'
        ),
        'published': (
            'these weights; the same network on 10 probabilities of transformed images, from a '
            'random temperature; Adam at 1e-4, 10 epochs in batches of 1,000, ECE in 25 bins'
        ),
        'source': (
            'github.com/liuyvchi/Correctness-aware-calibration, '
            'src/cal_metrics/temperature_scaling_CA.py'
        ),
    },
    'cross-entropy': {
        'setting': 'the same network, initial values, rate and number of steps, with cross-entropy',
        'published': (
            'the same network as for correctness, cross-entropy '
            'with equal weights, Adam at 1e-4, 500 epochs in batches of 1,000'
        ),
        'source': (
            'github.com/liuyvchi/Correctness-aware-calibration, '
            'src/cal_metrics/temperature_scaling_CE.py'
        ),
    },
}
