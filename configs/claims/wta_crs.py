"""Keeping the largest rows for sure makes sampled products less noisy.

Paper:    arXiv:2305.15265, Winner-Take-All Column Row Sampling
Says:     gradients of matrices from 30% of the tokens are unbiased, and less noisy than plain
          column-row sampling.
Here:     drawn matrices of 1,024 rows, whose sizes are alike or differ as the log-normal of
          deviation 1, in place of activations of T5; rows are drawn by the size of the activations
          alone; memory and accuracy are not measured.
Counts:   where rows differ, the squared error is at most 0.9 of that of plain sampling, and where
          they are alike at most 1.02; at most 1% of it is bias.
"""

PART = 'optimizers'
STUDIES = {
    'measure': 'measure:sampled_products',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'error_over_plain_sampling_of_rows_different',
        'within': (None, 0.9),
    },
    {
        'study': 'measure',
        'value': 'error_over_plain_sampling_of_rows_alike',
        'within': (None, 1.02),
    },
    {'study': 'measure', 'value': 'bias_of_rows_different', 'within': (None, 0.01)},
    {'study': 'measure', 'value': 'bias_of_rows_alike', 'within': (None, 0.01)},
)
