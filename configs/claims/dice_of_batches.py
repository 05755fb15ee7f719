"""Dice loss per batch is better than cross-entropy in the F1 of a rare class.

Paper:    arXiv:1911.02855, Dice Loss for Data-imbalanced NLP Tasks, and its code
Says:     A loss like F1 reaches a higher F1 on rare classes than cross-entropy and focal loss.
Here:     Networks with two hidden layers of 128 units classify two classes of Gaussian clusters,
          one of which has 1% of 8,192 rows, seen 24 times in batches of 512. Three seeds choose the
          best of seven learning rates for each loss, and ten other seeds count. The paper
          fine-tunes pretrained models for tagging and reading comprehension. The fraction is
          computed per batch, with squares in the denominator, alpha = 0.01 and 1 added to numerator
          and denominator, as in the scripts of the authors' code. Because a threshold alone changes
          F1, the best threshold is tested too.
Counts:   F1 is at least one point above that of cross-entropy if both use a threshold of 1/2, and
          not below it if both use their best threshold.
"""

from configs.claims import _shared

PART = 'losses'
STUDIES = {
    'measure': 'measure:rare_class',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'f1_at_half_gain_of_dice_of_batches',
        'within': (0.01, None),
        'label': 'F1 with Dice loss minus F1 with cross-entropy, threshold 1/2 (fraction)',
    },
    {
        'study': 'measure',
        'value': 'f1_gain_of_dice_of_batches',
        'within': (0.0, None),
        'label': 'F1 with Dice loss minus F1 with cross-entropy, best thresholds (fraction)',
    },
)
CONTROL = _shared.F1_CONTROL
TWIN = (
    {
        'study': 'measure',
        'value': 'f1_at_half_gain_of_dice_without_sum_of_labels',
        'within': (0.01, None),
        'label': (
            'F1 with Dice loss without the sum of labels in its denominator, minus F1 with '
            'cross-entropy, threshold 1/2 (fraction)'
        ),
    },
    {
        'study': 'measure',
        'value': 'f1_gain_of_dice_without_sum_of_labels',
        'within': (0.0, None),
        'label': (
            'F1 with Dice loss without the sum of labels in its denominator, minus F1 with '
            'cross-entropy, best thresholds (fraction)'
        ),
    },
)
FIDELITY = {
    'Dice loss': {
        'setting': (
            'one fraction per batch of 512 rows (about 5 of the rare class), squares in the '
            'denominator, alpha 0.01, 1 added, no selection of negatives; Adam with betas 0.9 and '
            '0.999, no decay, no warm-up, a cosine to 0; best of seven rates'
        ),
        'published': (
            'the same fraction on a single logit; AdamW or Adam at 3e-5, decay 0.003 to 0.01, '
            'dropout 0.2, gradients clipped at 1, batches of 20 rows or 36 x 256 tokens, 5 to 10 '
            'epochs of BERT'
        ),
        'source': (
            'github.com/ShannonAI/dice_loss_for_NLP, scripts/glue_mrpc/bert_base_dice.sh, '
            'scripts/ner_enconll03/bert_dice.sh and loss/dice_loss.py'
        ),
    },
    'cross-entropy': {
        'setting': (
            'the plain loss on two logits, without class weights, with the same training and rates'
        ),
        'published': (
            'the plain loss on two logits, at 2e-5, decay 0.01, dropout 0.1, batch 24, 3 epochs: '
            'settings of its own'
        ),
        'source': 'github.com/ShannonAI/dice_loss_for_NLP, scripts/glue_mrpc/bert_base_ce.sh',
    },
}
