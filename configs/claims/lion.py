"""Lion is as good as AdamW.

Paper:    arXiv:2302.06675, Symbolic Discovery of Optimization Algorithms
Says:     The sign of an interpolated momentum is as good as AdamW or better, with half of AdamW's
          state.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, and separately for 100 steps. Each optimizer updates the hidden
          matrices at its own tuned learning rate; AdamW updates embeddings, readout and vectors in
          every run. The paper's models are at least 100 times as large and see at least 1,000 times
          as many tokens. In the paper the gains grow with the batch size, which is small here.
Counts:   the loss is at most 0.03 nats above that of AdamW at both lengths.
"""

PART = 'optimizers'
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {
        'study': 'whole',
        'arm': {'optim.name': 'lion'},
        'difference': (None, 0.03),
        'label': 'loss difference, Lion minus AdamW (nats per token, 200 steps)',
    },
    {
        'study': 'half',
        'arm': {'optim.name': 'lion'},
        'difference': (None, 0.03),
        'label': 'loss difference, Lion minus AdamW (nats per token, 100 steps)',
    },
)
