"""Conda reaches a lower loss than AdamW.

Paper:    arXiv:2509.24218, Conda: Column-Normalized Adam for Training Large Language Models Faster
Says:     Adam in a rotated space, with one scale per column, trains LLaMA models 2 to 2.5 times as
          fast as AdamW, in steps and in time.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, and separately for 100 steps. Each optimizer updates the hidden
          matrices at its own tuned learning rate; AdamW updates embeddings, readout and vectors in
          every run. The paper's models are at least 100 times as large and see at least 1,000 times
          as many tokens. Testing the speed-up itself would need several training lengths of the
          baseline, which this study does not have.
Counts:   the loss is lower than that of AdamW at both lengths, which the speed-up requires.
"""

PART = 'optimizers'
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {
        'study': 'whole',
        'arm': {'optim.name': 'conda'},
        'difference': (None, 0.0),
        'label': 'loss difference, Conda minus AdamW (nats per token, 200 steps)',
    },
    {
        'study': 'half',
        'arm': {'optim.name': 'conda'},
        'difference': (None, 0.0),
        'label': 'loss difference, Conda minus AdamW (nats per token, 100 steps)',
    },
)
