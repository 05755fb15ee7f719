"""A network that learns to weight rows helps against wrong labels.

Paper:    arXiv:2412.12955, Learning from Noisy Labels via Self-Taught On-the-Fly Meta Loss
          Rescaling
Says:     Rescaling the loss of each row by a function of the model's own signals gives a better
          model. The function is learned without clean data, by a step on other noisy rows; wrong
          labels lose their weight.
Here:     Networks with two hidden layers of 64 units and dropout classify 10 classes of Gaussian
          clusters: 1,024 rows, 30% of which have the label of another class, 1,000 steps. Each
          method has the best of five learning rates, which three seeds choose; ten other seeds
          count. Accuracies are those on rows with correct labels. The paper fine-tunes pretrained
          transformers on text. One rescaler for all classes, which reads statistics of one batch,
          is an option of its code; the default has one per class. Weights are in (0, 1), as
          published.
Counts:   the accuracy is at least one point above that of cross-entropy, and the mean weight of
          corrupted rows is below that of the others.
"""

PART = 'losses'
CAUTION = (
    "The gain is as large if the rescaler's gradient omits the step, so that lower weights for "
    'large losses are enough here. One network weights the rows of all classes, while the '
    "authors' default has one for each class."
)
STUDIES = {
    'measure': 'measure:rescaled_rows',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'gain_of_published',
        'within': (0.01, None),
        'label': 'accuracy minus that of cross-entropy (fraction)',
    },
    {
        'study': 'measure',
        'value': 'weight_of_corrupted_over_clean_by_published',
        'within': (None, 1.0),
        'label': 'mean weight of corrupted rows over that of clean rows',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'gain_of_clean_rows',
        'within': (0.01, None),
        'label': 'accuracy of cross-entropy on clean rows alone minus that on all rows (fraction)',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'gain_of_gradient_through_step',
        'within': (0.01, None),
        'label': (
            'accuracy minus that of cross-entropy (fraction), with a gradient of the rescaler that '
            'omits the weights of the second batch'
        ),
    },
    {
        'study': 'measure',
        'value': 'weight_of_corrupted_over_clean_by_gradient_through_step',
        'within': (None, 1.0),
        'label': (
            'mean weight of corrupted rows over that of clean rows, with a gradient of the '
            'rescaler that omits the weights of the second batch'
        ),
    },
    {
        'study': 'measure',
        'value': 'gain_of_direct_gradient',
        'within': (0.01, None),
        'label': (
            'accuracy minus that of cross-entropy (fraction), with a gradient of the rescaler that '
            'omits the step'
        ),
    },
    {
        'study': 'measure',
        'value': 'weight_of_corrupted_over_clean_by_direct_gradient',
        'within': (None, 1.0),
        'label': (
            'mean weight of corrupted rows over that of clean rows, with a gradient of the '
            'rescaler that omits the step'
        ),
    },
)
FIDELITY = {
    'rescaled rows': {
        'setting': (
            'one rescaler for all ten classes, 19 features of one batch from three passes with '
            'dropout 0.1, Adam at 0.01, weights in (0, 1); the network by Adam at a constant '
            'rate, the best of five, batch 32, 1,000 steps from scratch'
        ),
        'published': (
            'one rescaler for each class by default, 19 features of one batch from three passes, '
            'Adam at 0.01, weights in (0, 1); Adam at a constant 5e-5, batch 8, 3 epochs of a '
            'pretrained transformer with 10 to 40% random labels'
        ),
        'source': (
            'arXiv:2412.12955, algorithm 1; github.com/stylcreed1/STORM-NER-Thesis, storm.py and '
            'modeling.py (a copy of the code, with changes)'
        ),
    },
    'cross-entropy': {
        'setting': (
            'the same network, dropout, batches and five rates, one pass and one batch a step'
        ),
        'published': 'the same fine-tuning without the rescaler',
        'source': 'arXiv:2412.12955',
    },
}
