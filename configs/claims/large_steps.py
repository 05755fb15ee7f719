"""Gradient descent with larger steps separates points sooner, at a higher loss.

Paper:    arXiv:2412.08424, From Logistic Regression to the Perceptron Algorithm
Says:     on separable points larger steps lead gradient descent of logistic regression to higher
          losses, and to a solution in fewer steps: it becomes a perceptron.
Here:     600 drawn points of 32 coordinates in [0, 1], half on each side of a hyperplane, at least
          0.05 away from it, fifty seeds, rates of 1 and 100; the paper has two classes of images.
Counts:   the rate of 100 takes fewer steps than that of 1; the largest loss on the way is at least
          twice the first at 100, and at 1 the first.
"""

PART = 'optimizers'
STUDIES = {
    'measure': 'measure:steps_to_separate',
}
HOLDS = (
    {'study': 'measure', 'value': 'plain_steps_at_large_over_small_rate', 'within': (None, 1.0)},
    {'study': 'measure', 'value': 'largest_loss_over_first_at_large_rate', 'within': (2.0, None)},
    {'study': 'measure', 'value': 'largest_loss_over_first_at_small_rate', 'within': (None, 1.01)},
)
