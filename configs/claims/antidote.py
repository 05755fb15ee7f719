"""Removing what matters most to unwanted text leaves wanted text as it was.

Paper:    arXiv:2408.09600, Antidote
Says:     the weights with the largest scores on harmful text can be set to 0 after fine-tuning, in
          one shot: the harm falls much, and the accuracy of the task little.
Here:     tiny models of width 32 and two blocks on a drawn language, of which another mode, a fifth
          of 100 steps of fine-tuning, is unwanted; a tenth of the inputs of every output of all
          matrices is removed. What is measured are losses, in nats a token; the paper judges
          answers of language models of billions of weights by another model, and prunes factors of
          LoRA.
Counts:   the loss of unwanted text rises by 0.5 or more, that of wanted text by at most 0.1, and by
          less than where as many weights are removed at random.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:pruned_by_text',
}
HOLDS = (
    {'study': 'measure', 'value': 'loss_added_to_unwanted_text', 'within': (0.5, None)},
    {'study': 'measure', 'value': 'loss_added_to_wanted_text', 'within': (None, 0.1)},
    {
        'study': 'measure',
        'value': 'loss_added_to_wanted_text_above_random',
        'within': (None, 0.0),
    },
)
