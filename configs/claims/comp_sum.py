"""The logistic loss is the best of comp-sum losses in likelihood on clean labels.

Paper:    arXiv:2304.07288, Cross-Entropy Loss Functions
Says:     tau = 1, cross-entropy, is best where labels are clean; others help where they are not.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the cross-entropies at tau = 0.5 and 1.5 are higher.
"""

PART = 'losses'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
}
HOLDS = (
    {
        'study': 'recipes',
        'arm': {'loss.name': 'comp_sum', 'loss.tau': 0.5},
        'difference': (0.0, None),
    },
    {
        'study': 'recipes',
        'arm': {'loss.name': 'comp_sum', 'loss.tau': 1.5},
        'difference': (0.0, None),
    },
)
