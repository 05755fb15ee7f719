"""A calibrator that is trained on correctness says how often it is right.

Paper:    arXiv:2404.13016, Optimizing Calibration by Gaining Aware of Prediction Correctness
Says:     a temperature of each sample, trained to make confidence high where the prediction is
          right and low where it is wrong, calibrates.
Here:     the hardest case: drawn logits that say nothing about what is right, which 80% are, five
          events a place, ten seeds; a temperature from the place's own probabilities, without the
          paper's transformed inputs. Once all places weigh as much, and once the right and the
          wrong do, as in the code beside the paper, where 1/2 is the best that one can say. Five of
          the seeds, looked at before, left the even weights undecided.
Counts:   with either weights mean confidence is within 0.02 of the accuracy.
"""

PART = 'evaluation'
STUDIES = {
    'measure': 'measure:blind_correctness',
}
HOLDS = (
    {'study': 'measure', 'value': 'confidence_less_accuracy_even', 'within': (-0.02, 0.02)},
    {'study': 'measure', 'value': 'confidence_less_accuracy_balanced', 'within': (-0.02, 0.02)},
)
