"""Likelihood with a moving-average normaliser learns faster than noise-contrastive estimation.

Paper:    arXiv:2306.07485, Learning Unnormalized Statistical Models via Compositional Optimization
Says:     Minimising the negative log-likelihood with a moving average of the estimated normaliser
          converges faster than noise-contrastive estimation, whose loss is flat.
Here:     A table of bigrams over 128 words of random text, with one moving average per context, 16
          noise words drawn by frequency. Both methods start at the exact normaliser. Each has the
          best of three learning rates of Adam, which three seeds choose; five other seeds count.
          The paper estimates the mean of a Gaussian, densities, and models of images, each with one
          distribution.
Counts:   after equally many pairs and noise words, the excess of the cross-entropy over that of the
          counts is at most half of that of noise-contrastive estimation.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:bigrams',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'excess_of_moving_average_over_noise_contrastive',
        'within': (None, 0.5),
        'label': 'excess cross-entropy with the moving average over that of noise contrast',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'excess_of_all_noise_words_over_one',
        'within': (None, 0.5),
        'label': 'excess cross-entropy of noise contrast with 16 noise words over that with one',
    },
)
FIDELITY = {
    'moving average': {
        'setting': (
            'one average for each of 128 contexts, decay 0.9 at each batch with the context, '
            'started at the exact normaliser of the initial table; Adam with a linear decay to 0, '
            'best of three rates, 1,500 steps of 256 pairs'
        ),
        'published': (
            'one moving average, for a single distribution; rates, decay and length are not known '
            'here'
        ),
        'source': 'arXiv:2306.07485',
    },
    'noise-contrastive estimation': {
        'setting': (
            '16 noise words by frequency; the table itself learns the normaliser, from a start '
            'that is normalised; the same Adam'
        ),
        'published': (
            'logistic loss against noise of a known density; how the normaliser starts is not '
            'known here'
        ),
        'source': 'arXiv:2306.07485; arXiv:1206.6426 for words',
    },
}
