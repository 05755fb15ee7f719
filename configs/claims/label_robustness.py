"""A loss that adapts its temperature to each row is robust to wrong labels.

Paper:    arXiv:2112.14869, Label Distributionally Robust Losses for Multi-class Classification
Says:     The loss ALDR-KL, which has a separate lambda for each row, is more accurate than
          cross-entropy if labels are wrong, and as accurate if they are correct.
Here:     Networks with two hidden layers of 128 units classify 10 classes of Gaussian clusters:
          1,024 rows seen 40 times, with none or 40% of their labels wrong. Each loss is trained at
          the best of five learning rates, with ten seeds, and judged on correct labels. Scores are
          divided by their mean size, and lambda is 1. The paper trains convolutional networks on
          images, tunes lambda, and keeps one lambda per row from epoch to epoch; here each is
          computed from the scores of the row.
Counts:   with 40% wrong labels the accuracy is at least one point above that of cross-entropy, and
          with none at most one point below it.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:wrong_labels',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'accuracy_at_0.4_gain_of_aldr_of_l1_scores',
        'within': (0.01, None),
        'label': 'accuracy minus that of cross-entropy, 40% wrong labels (fraction)',
    },
    {
        'study': 'measure',
        'value': 'accuracy_at_0.0_gain_of_aldr_of_l1_scores',
        'within': (-0.01, None),
        'label': 'accuracy minus that of cross-entropy, no wrong labels (fraction)',
    },
)
