"""Conda reaches a lower loss than AdamW.

Paper:    arXiv:2509.24218, Conda: Column-Normalized Adam for Training Large Language Models Faster
Says:     Adam in a rotated space, with one size a column, trains LLaMA models 2 to 2.5 times as
          fast as AdamW, in steps and in time.
Here:     0.26 million parameters, 0.2 million tokens of Python sources in the longer of two
          lengths, of 100 and 200 steps; every optimizer at its own learning rate, beside one AdamW
          for embeddings, readout and vectors; the paper trains models at least a hundred times as
          large, for at least a thousand times as many tokens. The speed-up itself asks for lengths
          of the baseline, which this does not train.
Counts:   the loss is lower than AdamW's at both lengths; a necessary condition of the speed-up.
"""

PART = 'optimizers'
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {'study': 'whole', 'arm': {'optim.name': 'conda'}, 'difference': (None, 0.0)},
    {'study': 'half', 'arm': {'optim.name': 'conda'}, 'difference': (None, 0.0)},
)
