"""A basis of fewer models than there are rebuilds each, at half of what their mean costs.

Paper:    arXiv:2510.14163, Towards Reversible Model Merging For Low-rank Weights
Says:     a compact basis, from which each fine-tuned model is recovered by coefficients of its own,
          keeps what they can do, where merging to one set of weights loses much of it.
Here:     three directions for six tiny models of width 32 and two blocks, fine-tuned whole on drawn
          languages for 100 steps; directions are of whole matrices, where the paper has one set for
          each row or column of low-rank factors of language models. Two errors are of drawn
          vectors: unrelated ones, of which any three directions lose about the root of a half, and
          ones that share three directions.
Counts:   the loss that rebuilt models have above their own is at most half of that of the mean; the
          error is between 0.9 and 1 of sqrt(1 - p / n) where nothing is shared, and at most 0.2
          where directions are.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:merged_models',
}
HOLDS = (
    {'study': 'measure', 'value': 'cost_over_that_of_the_mean', 'within': (None, 0.5)},
    {'study': 'measure', 'value': 'error_of_unrelated_differences', 'within': (0.9, 1.0)},
    {'study': 'measure', 'value': 'error_of_shared_differences', 'within': (None, 0.2)},
)
