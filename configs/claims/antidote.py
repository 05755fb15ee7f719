"""Removing the weights that matter most to unwanted text leaves wanted text intact.

Paper:    arXiv:2408.09600, Antidote
Says:     After fine-tuning, the weights with the largest scores on harmful text can be set to 0 in
          one shot: the harm falls considerably, and the accuracy of the task only a little.
Here:     Tiny models with width 32 and two blocks learn a random language. In 100 steps of
          fine-tuning, a fifth of the text is from a second, unwanted mode. Then a tenth of the
          inputs of every output of all matrices is removed. The test measures losses in nats per
          token. The paper judges the answers of language models with billions of weights by another
          model, and prunes LoRA factors.
Counts:   the loss of unwanted text rises by at least 0.5, and that of wanted text by at most 0.1
          and less than after removing as many weights at random.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:pruned_by_text',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'loss_added_to_unwanted_text',
        'within': (0.5, None),
        'label': 'loss increase on unwanted text (nats per token)',
    },
    {
        'study': 'measure',
        'value': 'loss_added_to_wanted_text',
        'within': (None, 0.1),
        'label': 'loss increase on wanted text (nats per token)',
    },
    {
        'study': 'measure',
        'value': 'loss_added_to_wanted_text_above_random',
        'within': (None, 0.0),
        'label': 'loss increase on wanted text minus that of random removal (nats per token)',
    },
)
