"""A loss that adapts its temperature to each row is robust to wrong labels.

Paper:    arXiv:2112.14869, Label Distributionally Robust Losses for Multi-class Classification
Says:     The loss ALDR-KL, which has a separate lambda for each row, is more accurate than
          cross-entropy if labels are wrong, and as accurate if they are correct.
Here:     Networks with two hidden layers of 128 units classify 10 classes of Gaussian clusters:
          1,024 rows seen 40 times, with none or 40% of their labels wrong. Each loss is trained at
          the best of five learning rates, with ten seeds, and judged on correct labels. Scores are
          divided by their mean size, and lambda is 1. The paper trains convolutional networks on
          images and small networks on tables, tunes lambda, and keeps one lambda per row from epoch
          to epoch; here each is computed from the scores of the row.
Counts:   with 40% wrong labels the accuracy is at least one point above that of cross-entropy, and
          with none at most one point below it.
"""

PART = 'losses'
CAUTION = (
    "Lambda is 1 here and can fall near 0. The authors' script has lambda 10, margin 0.1 and "
    'alpha 2, so that lambda stays above 5.'
)
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
FIDELITY = {
    'ALDR-KL': {
        'setting': (
            'lambda 1, margin 1, alpha 1, scores divided by their mean size; the lambda of a '
            'row is computed anew in each batch, by one step from 1, and can come near 0 for '
            'confident rows; Adam with betas 0.9 and 0.999, no decay, no warm-up, a cosine to '
            '0, batch 64, 40 passes'
        ),
        'published': (
            'lambda 10 (of 0.1, 1 and 10), margin 0.1, alpha 2, so that lambda stays above 5; the '
            'same scores; lambda of a row carried from epoch to epoch; SGD with momentum 0.9, '
            'decay 5e-3, batch 64, 100 epochs (30 on images)'
        ),
        'source': (
            'arXiv:2112.14869, section 4.2; github.com/Optimization-AI/ICML2023_LDR, '
            'experiment.py, loss.py and README.md'
        ),
    },
    'cross-entropy': {
        'setting': 'plain logits, the same training and rates',
        'published': 'plain logits, the same SGD with the same decay of 5e-3',
        'source': 'github.com/Optimization-AI/ICML2023_LDR, experiment.py',
    },
}
