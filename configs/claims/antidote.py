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
CAUTION = (
    'All matrices of the blocks are pruned here, also weights from before fine-tuning. The '
    'authors prune what fine-tuning has added. The number of seeds was raised to 16 after 5 and 8 '
    'had left the first condition undecided, which makes a false verdict more likely.'
)
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
CONTROL = (
    {
        'study': 'measure',
        'value': 'loss_added_to_unwanted_text_by_half_at_random',
        'within': (0.5, None),
        'label': (
            'loss increase on unwanted text, half of the inputs removed at random (nats per token)'
        ),
    },
    {
        'study': 'measure',
        'value': 'loss_added_to_wanted_text_by_smallest_scores_above_random',
        'within': (None, 0.0),
        'label': (
            'loss increase on wanted text, smallest instead of largest scores, minus that of '
            'random removal (nats per token)'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'loss_added_to_unwanted_text_by_magnitude',
        'within': (0.5, None),
        'label': (
            'loss increase on unwanted text, scores |w| without the input size (nats per token)'
        ),
    },
)
FIDELITY = {
    'Antidote': {
        'setting': (
            'the tenth of the inputs of every output with the largest |w| times input size on 128 '
            'rows of unwanted text, in all matrices of the blocks: also in weights from before '
            'the fine-tuning, which wanted text needs'
        ),
        'published': (
            'a tenth per output too, with 2,000 harmful samples, but only in the LoRA factors '
            'that the fine-tuning added, or in queries, keys and values if all weights were '
            'tuned; 20 epochs on 5,000 samples, 20% harmful, at 1e-4'
        ),
        'source': (
            'github.com/git-disl/Antidote, utils.py, train.py and '
            'script/finetune/antidote_poison_ratio.sh'
        ),
    },
    'random removal': {
        'setting': 'as many inputs of every output at random, in the same matrices',
        'published': 'no such control is known here; they compare with other defences',
        'source': 'arXiv:2408.09600',
    },
}
