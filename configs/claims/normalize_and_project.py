"""Projected weights keep the relative size of a step, which falls as free weights grow.

Paper:    arXiv:2407.01800, Normalization and effective learning rates in reinforcement learning
Says:     Behind norms, the growth of the weights reduces the effective learning rate, which is the
          rate over their norm. If weights are projected to their initial norm after each step, it
          stays constant.
Here:     A causal transformer with two layers and width 64, whose matrices are not all behind a
          norm, is trained for 300 steps of Adam at a constant 0.01 without weight decay on random
          Markov chains, five seeds. The test measures the relative size of a step, which is the
          paper's rate over norm times the size of Adam's direction. The paper's rate of projected
          weights is constant by construction. Plasticity and scores are not tested.
Counts:   |dW| / |W| of the hidden matrices in steps 250 to 300, divided by that in steps 50 to 100,
          is between 0.95 and 1.05 for projected weights, and at most 0.8 for free weights.
"""

PART = 'reparametrisations'
CAUTION = (
    "The test measures another quantity than the paper's rate over norm, which behaves here as the "
    'paper says: see the controls. The paper wants a norm before each nonlinearity. Here GELU, '
    'queries and keys have none, and gains are free.'
)
STUDIES = {
    'measure': 'measure:relative_changes_over_training',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'late_over_early_change_of_projected_weights',
        'within': (0.95, 1.05),
        'label': 'late over early relative step size, projected weights',
    },
    {
        'study': 'measure',
        'value': 'late_over_early_change_of_free_weights',
        'within': (None, 0.8),
        'label': 'late over early relative step size, free weights',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'late_over_early_norm_of_projected_weights',
        'within': (0.999, 1.001),
        'label': 'late over early norm, projected weights (1 by construction)',
    },
    {
        'study': 'measure',
        'value': 'late_over_early_norm_of_free_weights',
        'within': (1.05, None),
        'label': 'late over early norm, free weights',
    },
    {
        'study': 'measure',
        'value': 'late_over_early_change_of_free_weights_at_half_the_rate',
        'within': (None, 0.8),
        'label': 'late over early relative step size, free weights, half the rate in late steps',
    },
)
FIDELITY = {
    'projected weights': {
        'setting': (
            'query, key, value, output and MLP matrices projected to their initial norm after each '
            'step; RMSNorm before sublayers only, none before GELU or of queries and keys; gains '
            'learned and not projected; Adam with betas 0.9 and 0.95, gradients clipped at 1'
        ),
        'published': (
            'a norm before every nonlinearity, matrices projected every step or every 1,000 steps, '
            'output layer not projected, gains and biases normalised or regularised too; the '
            'effective rate is rate over norm'
        ),
        'source': 'arXiv:2407.01800, read in notes of others; no official code is known',
    },
    'free weights': {
        'setting': 'the same model, rate 0.01 after 20 steps of warm-up, no decay',
        'published': (
            'networks with norms whose weights grow, over millions of steps with changing labels '
            'or games; Adam at 1e-4 on CIFAR-10'
        ),
        'source': 'arXiv:2407.01800, read in notes of others',
    },
}
