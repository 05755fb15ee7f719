"""Likelihood with a moving-average normaliser learns faster than noise-contrastive estimation.

Paper:    arXiv:2306.07485, Learning Unnormalized Statistical Models via Compositional Optimization
Says:     Minimising the negative log-likelihood with a moving average of the estimated normaliser
          converges faster than noise-contrastive estimation, whose loss is flat.
Here:     A table of bigrams over 128 words of random text, with one moving average per context, 16
          noise words drawn by frequency, Adam at the best of three learning rates for each method,
          five seeds. The paper estimates the mean of a Gaussian, densities, and models of images,
          each with one distribution.
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
