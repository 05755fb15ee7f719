"""Dice loss per row is better than cross-entropy in the F1 of a rare class.

Paper:    arXiv:1911.02855, Dice Loss for Data-imbalanced NLP Tasks
Says:     A loss like F1, which gives less weight to easy rows, reaches a higher F1 on rare classes
          than cross-entropy and focal loss.
Here:     Networks with two hidden layers of 128 units classify two classes of Gaussian clusters,
          one of which has 1% of 8,192 rows, seen 24 times in batches of 512; each loss at the best
          of five learning rates, ten seeds. The paper fine-tunes pretrained models for tagging and
          reading comprehension. Each row has its own fraction, as in the paper's equation 11, with
          1 added to numerator and denominator; the authors' code computes one fraction per batch,
          which is a separate claim. Because a threshold alone changes F1, the best threshold is
          tested too. The criterion was written before batches of 64 were tried, for which F1 was
          nearly 0, and was not changed.
Counts:   with alpha = 1, F1 is at least one point above that of cross-entropy if both use a
          threshold of 1/2, and not below it if both use their best threshold.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:rare_class',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'f1_at_half_gain_of_dice_1.0',
        'within': (0.01, None),
        'label': 'F1 with Dice loss minus F1 with cross-entropy, threshold 1/2 (fraction)',
    },
    {
        'study': 'measure',
        'value': 'f1_gain_of_dice_1.0',
        'within': (0.0, None),
        'label': 'F1 with Dice loss minus F1 with cross-entropy, best thresholds (fraction)',
    },
)
