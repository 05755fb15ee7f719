"""SCALE is as good as Adam with less than half of its memory.

Paper:    arXiv:2506.16659, Minimalist Optimizer Design for LLM Pretraining
Says:     gradients with columns of one length, and momentum in the last layer alone, reach the loss
          of Adam with 35 to 45% of the memory.
Here:     0.26 million parameters, 0.2 million tokens of Python sources in the longer of two
          lengths, of 100 and 200 steps; every optimizer at its own learning rate, beside one AdamW
          for embeddings, readout and vectors; the paper trains models at least a hundred times as
          large, for at least a thousand times as many tokens.
Counts:   the loss is at most 0.03 nats above AdamW's at both lengths.
"""

PART = 'optimizers'
WITHDRAWN = (
    'The arm is not SCALE, which has its momentum on the readout: here AdamW trained the readout '
    'and the embeddings.'
)
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {'study': 'whole', 'arm': {'optim.name': 'scale'}, 'difference': (None, 0.03)},
    {'study': 'half', 'arm': {'optim.name': 'scale'}, 'difference': (None, 0.03)},
)
