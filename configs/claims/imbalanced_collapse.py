"""Classes of unequal size collapse to orthogonal vectors whose lengths have a closed form.

Paper:    arXiv:2301.00437, Neural Collapse in Deep Linear Networks: From Balanced to Imbalanced
          Data
Says:     With the squared loss and no bias, the readout and free features of imbalanced classes
          converge to orthogonal vectors, one direction per class, whose lengths depend on the size
          of the class. A class below a size threshold vanishes.
Here:     No network and no text: one linear layer on free features, with 161 samples of seven
          classes of 2 to 64 samples, two of which are below the threshold. Optimisation is plain
          gradient descent; the theorem is about the global minimum. Several linear layers and
          cross-entropy are not tested.
Counts:   squared lengths are within 1% of the largest, no two rows have a cosine above 0.01,
          vanishing classes have at most 1% of the largest squared length, and features differ
          within their class by at most 1% of their squares.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:imbalanced_collapse',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'error_of_squared_lengths',
        'within': (None, 0.01),
        'label': 'error of squared lengths (fraction of the largest)',
    },
    {
        'study': 'measure',
        'value': 'cosine_of_rows',
        'within': (None, 0.01),
        'label': 'largest cosine of two rows',
    },
    {
        'study': 'measure',
        'value': 'vanishing_length',
        'within': (None, 0.01),
        'label': 'squared length of vanishing classes (fraction of the largest)',
    },
    {
        'study': 'measure',
        'value': 'spread_within_classes',
        'within': (None, 0.01),
        'label': 'spread within classes (fraction of the squared features)',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'cosine_of_rows_with_bias',
        'within': (0.16, 0.17),
        'label': 'largest cosine of two rows for equal classes and a bias, 1/6 in a simplex',
    },
    {
        'study': 'measure',
        'value': 'spread_within_classes_without_decay',
        'within': (0.01, None),
        'label': (
            'spread within classes (fraction of the squared features), features without decay, '
            'which keep their initial part that the readout does not see'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'error_of_squared_lengths_of_half_the_decay',
        'within': (None, 0.01),
        'label': (
            'error of squared lengths (fraction of the largest), closed form for half of both '
            'decays'
        ),
    },
)
FIDELITY = {
    'free features': {
        'setting': (
            'one linear layer without bias, width 10, seven classes of 2 to 64 samples, decay '
            '0.02 of the readout and 0.01 of the features, gradient descent at 1.0 for 30,000 '
            'steps from normal values of deviation 0.3'
        ),
        'published': (
            'a theorem on the global minimum for one layer, any class sizes and decays, width at '
            'least the number of classes; also shown with networks; sizes and decays of their '
            'experiments are not known here'
        ),
        'source': 'arXiv:2301.00437, the theorem on imbalanced data without bias',
    },
}
