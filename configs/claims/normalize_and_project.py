"""Projected weights keep the effective learning rate, which falls as free ones grow.

Paper:    arXiv:2407.01800, Normalization and effective learning rates in reinforcement learning
Says:     behind norms the growth of weights decays the effective learning rate; with weights that
          are projected to their first length after each step it stays constant.
Here:     a causal transformer of two layers and width 64, whose matrices are not all behind a norm,
          300 steps of Adam at a constant 0.01 without weight decay, on drawn chains of tokens, five
          seeds. What is asked is how far a step goes, in which the size of Adam's direction has a
          part that the paper's rate over length has not; plasticity and scores are not asked.
Counts:   |dW| / |W| of hidden matrices in steps 250 to 300, over that in steps 50 to 100, is from
          0.95 to 1.05 where weights are projected, and at most 0.8 where they are free.
"""

PART = 'reparametrisations'
STUDIES = {
    'measure': 'measure:relative_changes_over_training',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'late_over_early_change_of_projected_weights',
        'within': (0.95, 1.05),
    },
    {
        'study': 'measure',
        'value': 'late_over_early_change_of_free_weights',
        'within': (None, 0.8),
    },
)
