"""Likelihood with a moving average of the normaliser learns faster than noise contrast.

Paper:    arXiv:2306.07485, Learning Unnormalized Statistical Models via Compositional Optimization
Says:     minimising the negative log-likelihood with a moving average of the estimated normaliser
          converges faster than noise-contrastive estimation, whose loss is flat.
Here:     a table of bigrams over 128 words of drawn text, with a moving average for each context,
          16 words of noise by frequency, Adam at the best of three rates for each method, five
          seeds; the paper estimates the mean of a Gaussian, densities, and models of images, each
          of one distribution.
Counts:   after equal pairs and noise words the cross-entropy above that of the counts is at most
          half of that of noise contrast.
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
    },
)
