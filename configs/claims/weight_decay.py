"""Weight decay hardly matters in one short epoch.

Paper:    arXiv:2310.04415, Why Do We Need Weight Decay in Modern Deep Learning?
Says:     in training that sees its text once, weight decay is no regulariser; it changes the
          effective rate.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   without it the losses are within 0.03 nats of each other, each at its own rate.
"""

PART = 'recipes'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
}
HOLDS = ({'study': 'recipes', 'arm': {'optim.weight_decay': 0.0}, 'difference': (-0.03, 0.03)},)
