"""SCALE is as good as Adam with less than half of its memory.

Paper:    arXiv:2506.16659, Minimalist Optimizer Design for LLM Pretraining
Says:     Gradients whose columns have equal norms, with momentum only in the last layer, reach the
          loss of Adam with 35 to 45% of the memory.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, and separately for 100 steps. Each optimizer updates the hidden
          matrices at its own tuned learning rate; AdamW updates embeddings, readout and vectors in
          every run. The paper's models are at least 100 times as large and see at least 1,000 times
          as many tokens.
Counts:   the loss is at most 0.03 nats above that of AdamW at both lengths.
"""

PART = 'optimizers'
WITHDRAWN = (
    'The arm was not SCALE, which keeps its momentum on the readout: here AdamW trained the '
    'readout and the embeddings.'
)
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {
        'study': 'whole',
        'arm': {'optim.name': 'scale'},
        'difference': (None, 0.03),
        'label': 'loss difference, SCALE minus AdamW (nats per token, 200 steps)',
    },
    {
        'study': 'half',
        'arm': {'optim.name': 'scale'},
        'difference': (None, 0.03),
        'label': 'loss difference, SCALE minus AdamW (nats per token, 100 steps)',
    },
)
