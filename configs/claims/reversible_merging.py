"""A basis of fewer models than were merged rebuilds each at half the cost of their mean.

Paper:    arXiv:2510.14163, Towards Reversible Model Merging For Low-rank Weights
Says:     A compact basis, from which each fine-tuned model is recovered by its own coefficients,
          preserves what the models can do. Merging into one set of weights loses much of it.
Here:     Three directions for six tiny models with width 32 and two blocks, fully fine-tuned for
          100 steps on random languages. Directions cover whole matrices; the paper has one set for
          each row or column of low-rank factors of language models. The controls are a single
          direction, and errors of random vectors: unrelated ones, of which any three directions
          lose about the square root of one half, and ones that share three directions.
Counts:   the loss of rebuilt models above that of the originals is at most half of that of the
          mean.
"""

PART = 'weights'
CAUTION = (
    'Whole matrices of full models are merged here. The published method works on rows and '
    'columns of low-rank factors.'
)
STUDIES = {
    'measure': 'measure:merged_models',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'cost_over_that_of_the_mean',
        'within': (None, 0.5),
        'label': 'loss increase of rebuilt models over that of the mean',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'cost_of_one_direction',
        'within': (0.5, None),
        'label': 'loss increase of models rebuilt from one direction over that of the mean',
    },
    {
        'study': 'measure',
        'value': 'error_of_unrelated_differences',
        'within': (0.9, 1.0),
        'label': 'relative error over sqrt(1 - p / n), unrelated vectors',
    },
    {
        'study': 'measure',
        'value': 'error_of_shared_differences',
        'within': (None, 0.2),
        'label': 'relative error, vectors that share directions',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'cost_of_centred_differences',
        'within': (None, 0.5),
        'label': (
            'loss increase of rebuilt models over that of the mean, directions of the differences '
            'from the mean, added to the base'
        ),
    },
)
FIDELITY = {
    'basis': {
        'setting': (
            'three directions for six models in each whole matrix, from the uncentred singular '
            'vectors of the differences from the base; full fine-tuning, not low-rank factors, so '
            'this is not the published algorithm'
        ),
        'published': (
            'p < n directions for each row of A and each column of B, the low-rank factors of '
            'LoRA or of a difference of models, over n models; data-free, in closed form'
        ),
        'source': 'arXiv:2510.14163',
    },
    'mean': {
        'setting': 'the plain mean of all weights',
        'published': (
            'task arithmetic, TIES and DARE on the low-rank factors or products; a plain mean is '
            'not the only rival'
        ),
        'source': 'arXiv:2510.14163',
    },
}
