"""Sophia reaches a lower loss than AdamW.

Paper:    arXiv:2305.14342, Sophia: A Scalable Stochastic Second-order Optimizer
Says:     A clipped step with the diagonal of the Hessian reaches the same loss in half the steps of
          AdamW.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, and separately for 100 steps. Each optimizer updates the hidden
          matrices at its own tuned learning rate; AdamW updates embeddings, readout and vectors in
          every run. The paper's models are at least 100 times as large and see at least 1,000 times
          as many tokens.
Counts:   the loss is lower than that of AdamW at both lengths.
"""

PART = 'optimizers'
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {
        'study': 'whole',
        'arm': {'optim.name': 'sophia'},
        'difference': (None, 0.0),
        'label': 'loss difference, Sophia minus AdamW (nats per token, 200 steps)',
    },
    {
        'study': 'half',
        'arm': {'optim.name': 'sophia'},
        'difference': (None, 0.0),
        'label': 'loss difference, Sophia minus AdamW (nats per token, 100 steps)',
    },
)
