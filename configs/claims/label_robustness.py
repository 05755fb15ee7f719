"""A loss that adapts its temperature to each row withstands wrong labels.

Paper:    arXiv:2112.14869, Label Distributionally Robust Losses for Multi-class Classification
Says:     the loss ALDR-KL, with a lambda of its own for each row, is more accurate than
          cross-entropy where labels are wrong, and as accurate where they are right.
Here:     networks of two hidden layers of 128 units on 10 classes of Gaussian clusters, 1,024 rows
          seen 40 times, with none or 40% of their labels wrong, each loss at the best of five
          rates, ten seeds, judged by right labels. Scores are over their mean size and lambda is 1;
          the paper trains convolutional networks on images, tunes lambda, and keeps one of each row
          from epoch to epoch, where here each is computed from the row's scores.
Counts:   at 40% the accuracy is at least a point above that by cross-entropy, and at none at most a
          point below it.
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
    },
    {
        'study': 'measure',
        'value': 'accuracy_at_0.0_gain_of_aldr_of_l1_scores',
        'within': (-0.01, None),
    },
)
