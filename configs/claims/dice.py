"""Dice loss per row is better than cross-entropy in the F1 of a rare class.

Paper:    arXiv:1911.02855, Dice Loss for Data-imbalanced NLP Tasks
Says:     A loss like F1, which gives less weight to easy rows, reaches a higher F1 on rare classes
          than cross-entropy and focal loss.
Here:     Networks with two hidden layers of 128 units classify two classes of Gaussian clusters,
          one of which has 1% of 8,192 rows, seen 24 times in batches of 512. Three seeds choose the
          best of seven learning rates for each loss, and ten other seeds count. The paper
          fine-tunes pretrained models for tagging and reading comprehension. Each row has a
          fraction for each of the two classes, with 1 added to numerator and denominator; the
          paper's equation 11 has the fraction of the rare class only. With alpha = 1, the sum of
          both is the same for either label, so that the network learns nothing from the labels. The
          authors' code computes one fraction per batch, which is a separate claim. Because a
          threshold alone changes F1, the best threshold is tested too. The criterion was written
          before batches of 64 were tried, for which F1 was nearly 0, and was not changed.
Counts:   with alpha = 1, F1 is at least one point above that of cross-entropy if both use a
          threshold of 1/2, and not below it if both use their best threshold.
"""

from configs.claims import _shared

PART = 'losses'
WITHDRAWN = (
    'The arm learns nothing from the labels: with two classes and alpha = 1 both classes have '
    'the same q, so that the sum over classes is the same for either label.'
)
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
CONTROL = _shared.F1_CONTROL
FIDELITY = {
    'Dice loss': {
        'setting': (
            'alpha 1, 1 added to numerator and denominator, and the fractions of both classes '
            'of a row are summed: with alpha = 1 and two classes their sum is the same for '
            'either label, so this arm learns nothing from labels; Adam with betas 0.9 and '
            '0.999, no decay, no warm-up, a cosine to 0, batch 512'
        ),
        'published': (
            'the fraction of the rare class only, with a factor (1 - p)^alpha; the scripts of the '
            'code have alpha 0.01, 1 added, BERT at a rate of 3e-5 and a decay of 0.003 to 0.01'
        ),
        'source': (
            'arXiv:1911.02855, equation 11; github.com/ShannonAI/dice_loss_for_NLP, '
            'loss/dice_loss.py and scripts/glue_mrpc/bert_base_dice.sh'
        ),
    },
    'cross-entropy': {
        'setting': 'the plain loss on two logits, without class weights, with the same training',
        'published': (
            'the plain loss on two logits, BERT at a rate of 2e-5, a decay of 0.01, batch 24, 3 '
            'epochs instead of 5'
        ),
        'source': (
            'github.com/ShannonAI/dice_loss_for_NLP, scripts/glue_mrpc/bert_base_ce.sh and '
            'tasks/glue/train.py'
        ),
    },
}
