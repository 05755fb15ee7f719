"""Weight decay hardly matters in one short epoch.

Paper:    arXiv:2310.04415, Why Do We Need Weight Decay in Modern Deep Learning?
Says:     In training that sees its text once, weight decay does not regularise; it changes the
          effective learning rate.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the losses with and without weight decay are within 0.03 nats of each other, each at its
          own learning rate.
"""

PART = 'recipes'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
}
HOLDS = (
    {
        'study': 'recipes',
        'arm': {'optim.weight_decay': 0.0},
        'difference': (-0.03, 0.03),
        'label': 'loss difference, no weight decay minus weight decay of 0.1 (nats per token)',
    },
)
