"""Dice loss of a batch is better than cross-entropy in F1 of a rare class.

Paper:    arXiv:1911.02855, Dice Loss for Data-imbalanced NLP Tasks, and its code
Says:     a loss like F1 gives a higher F1 of rare classes than cross-entropy and focal loss.
Here:     networks of two hidden layers of 128 units on two classes of Gaussian clusters, of which
          one has 1% of 8,192 rows seen 24 times in batches of 512, each loss at the best of five
          rates, ten seeds; the paper fine-tunes pretrained models for tagging and reading. The
          fraction is of a batch, with squares below it, alpha = 0.01 and 1 on both sides, as in the
          scripts of its code. A threshold moves F1 without any other loss, so that the best one is
          asked for too.
Counts:   F1 is at least a point above that of cross-entropy where both take what is above a half,
          and not below it where both have their best threshold.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:rare_class',
}
HOLDS = (
    {'study': 'measure', 'value': 'f1_at_half_gain_of_dice_of_batches', 'within': (0.01, None)},
    {'study': 'measure', 'value': 'f1_gain_of_dice_of_batches', 'within': (0.0, None)},
)
