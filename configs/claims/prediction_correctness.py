"""A calibrator trained on correctness reports how often it is right.

Paper:    arXiv:2404.13016, Optimizing Calibration by Gaining Aware of Prediction Correctness
Says:     A temperature per sample, trained to make confidence high for correct predictions and low
          for wrong ones, calibrates.
Here:     The hardest case: random logits that are uninformative about which prediction is correct,
          with 80% correct, five events per place, ten seeds. The temperature is computed from the
          place's own probabilities, without the paper's transformed inputs. Places are weighted in
          two ways: equally, or so that correct and wrong ones have equal total weight, as in the
          paper's code, for which a confidence of 1/2 is the best answer. Five of the seeds, looked
          at before, left the equal weights undecided.
Counts:   with both weightings the mean confidence is within 0.02 of the accuracy.
"""

PART = 'evaluation'
STUDIES = {
    'measure': 'measure:blind_correctness',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'confidence_less_accuracy_even',
        'within': (-0.02, 0.02),
        'label': 'mean confidence minus accuracy, equal weights',
    },
    {
        'study': 'measure',
        'value': 'confidence_less_accuracy_balanced',
        'within': (-0.02, 0.02),
        'label': 'mean confidence minus accuracy, balanced weights',
    },
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
}
