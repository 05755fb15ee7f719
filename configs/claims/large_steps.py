"""Gradient descent with larger steps separates points sooner, at a higher loss.

Paper:    arXiv:2412.08424, From Logistic Regression to the Perceptron Algorithm
Says:     On separable points, larger steps lead gradient descent for logistic regression to higher
          losses, and to a solution in fewer steps: it becomes a perceptron.
Here:     600 random points with 32 coordinates in [0, 1], half on each side of a hyperplane and at
          least 0.05 away from it, fifty seeds, learning rates of 1 and 100. The paper uses two
          classes of images.
Counts:   a learning rate of 100 needs fewer steps than a rate of 1. The largest loss during descent
          is at least twice the initial loss at 100, and equals the initial loss at 1.
"""

PART = 'optimizers'
CAUTION = (
    'The broken method is gradient descent at a learning rate of 2, where its loss rises already. '
    'It shows that the condition at rate 1 can fail, and does not break the method.'
)
STUDIES = {
    'measure': 'measure:steps_to_separate',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'plain_steps_at_large_over_small_rate',
        'within': (None, 1.0),
        'label': 'steps at a learning rate of 100 over steps at 1',
    },
    {
        'study': 'measure',
        'value': 'largest_loss_over_first_at_large_rate',
        'within': (2.0, None),
        'label': 'largest loss over initial loss, learning rate 100',
    },
    {
        'study': 'measure',
        'value': 'largest_loss_over_first_at_small_rate',
        'within': (None, 1.01),
        'label': 'largest loss over initial loss, learning rate 1',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'plain_steps_at_small_rate_over_a_tenth',
        'within': (0.09, 0.11),
        'label': 'steps at a learning rate of 1 over steps at 0.1, 1/10 along the gradient flow',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'largest_loss_over_first_of_doubled_gradients',
        'within': (None, 1.01),
        'label': (
            'largest loss over initial loss, learning rate 1, gradients of the sum of the mean '
            'losses of both classes, which are twice as large'
        ),
    },
)
FIDELITY = {
    'gradient descent': {
        'setting': (
            'all points in each step, from 0, no momentum, float64, rates 1 and 100; '
            'coordinates in [0, 1] and a constant 1, margin at least 0.05'
        ),
        'published': (
            'all points in each step, from 0, rates 1 to 100 on two classes of FashionMNIST; '
            'number of points and margin are not known here'
        ),
        'source': 'arXiv:2412.08424',
    },
}
