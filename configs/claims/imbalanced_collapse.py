"""Classes of unequal size collapse to orthogonal vectors, whose lengths follow a closed form.

Paper:    arXiv:2301.00437, Neural Collapse in Deep Linear Networks: From Balanced to Imbalanced
          Data
Says:     with the squared loss and no bias, the readout and free features of imbalanced classes
          end as orthogonal vectors, a direction a class, whose lengths depend on the size of the
          class; a class below a threshold vanishes.
Here:     no network and no text: one linear layer on features that are free, 161 samples of seven
          classes of 2 to 64, of which two lie below the threshold; plain gradient descent, where
          the theorem is about the global minimum. Several linear layers, and the cross-entropy, are
          not tried.
Counts:   squared lengths are within 1% of the largest, no two rows have a cosine above 0.01, what
          should vanish has at most 1% of the largest squared length, and features differ within
          their class by at most 1% of their squares.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:imbalanced_collapse',
}
HOLDS = (
    {'study': 'measure', 'value': 'error_of_squared_lengths', 'within': (None, 0.01)},
    {'study': 'measure', 'value': 'cosine_of_rows', 'within': (None, 0.01)},
    {'study': 'measure', 'value': 'vanishing_length', 'within': (None, 0.01)},
    {'study': 'measure', 'value': 'spread_within_classes', 'within': (None, 0.01)},
)
