"""A loss between cross-entropy and absolute error is robust to wrong labels.

Paper:    arXiv:1805.07836, Generalized Cross Entropy Loss for Training Deep Neural Networks with
          Noisy Labels
Says:     (1 - p^q) / q with q = 0.7 trains more accurate networks than cross-entropy if many labels
          are wrong, and hardly less accurate ones if none is.
Here:     Networks with two hidden layers of 128 units classify 10 classes of Gaussian clusters:
          1,024 rows seen 40 times, with none or 40% of their labels wrong. Three seeds choose the
          best of seven learning rates for each loss, and ten other seeds are evaluated on correct
          labels. The loss is comp-sum with tau = 1.7. The paper trains convolutional networks on
          images, and later leaves out rows with a large loss, which is not tested here.
Counts:   with 40% wrong labels the accuracy is at least one point above that of cross-entropy, and
          with none at most one point below it.
"""

from configs.claims import _shared

PART = 'losses'
STUDIES = {
    'measure': 'measure:wrong_labels',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'accuracy_at_0.4_gain_of_comp_sum_1.7',
        'within': (0.01, None),
        'label': 'accuracy minus that of cross-entropy, 40% wrong labels (fraction)',
    },
    {
        'study': 'measure',
        'value': 'accuracy_at_0.0_gain_of_comp_sum_1.7',
        'within': (-0.01, None),
        'label': 'accuracy minus that of cross-entropy, no wrong labels (fraction)',
    },
)
CONTROL = _shared.WRONG_LABELS_CONTROL
TWIN = (
    {
        'study': 'measure',
        'value': 'accuracy_at_0.4_gain_of_comp_sum_0.7',
        'within': (0.01, None),
        'label': (
            'accuracy of comp-sum with tau = q in place of tau = 1 + q, minus that of '
            'cross-entropy, 40% wrong labels (fraction)'
        ),
    },
)
FIDELITY = {
    'generalised cross-entropy': {
        'setting': (
            'q = 0.7 without truncation; Adam with betas 0.9 and 0.999, no decay, no warm-up, a '
            'cosine to 0, batch 64, 40 passes over 1,024 rows, best of seven rates by clean '
            'accuracy, 40% of labels uniformly wrong'
        ),
        'published': (
            'q = 0.7, also truncated at 0.5 from epoch 40; a re-implementation has ResNet-34, SGD '
            'at 0.01 with momentum 0.9, decay 1e-4, batch 128 and 120 epochs; the rest is not '
            'known here'
        ),
        'source': (
            'arXiv:1805.07836; github.com/AlanChou/Truncated-Loss, main.py (not by the authors)'
        ),
    },
    'cross-entropy': {
        'setting': 'the same training, without early stopping',
        'published': 'the same networks and training as for the other loss',
        'source': 'arXiv:1805.07836',
    },
}
