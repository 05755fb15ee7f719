"""Lion is as good as AdamW.

Paper:    arXiv:2302.06675, Symbolic Discovery of Optimization Algorithms
Says:     the sign of an interpolated momentum is as good as AdamW or better, with half of its
          state.
Here:     0.26 million parameters, 0.2 million tokens of Python sources in the longer of two
          lengths, of 100 and 200 steps; every optimizer at its own learning rate, beside one AdamW
          for embeddings, readout and vectors; the paper trains models at least a hundred times as
          large, for at least a thousand times as many tokens. Gains that the paper has grow with
          the batch, which is small here.
Counts:   the loss is at most 0.03 nats above AdamW's at both lengths.
"""

PART = 'optimizers'
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {'study': 'whole', 'arm': {'optim.name': 'lion'}, 'difference': (None, 0.03)},
    {'study': 'half', 'arm': {'optim.name': 'lion'}, 'difference': (None, 0.03)},
)
