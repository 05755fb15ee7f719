"""Always keeping the largest rows makes sampled products less noisy.

Paper:    arXiv:2305.15265, Winner-Take-All Column Row Sampling
Says:     Gradients of matrices computed from 30% of the tokens are unbiased, and less noisy than
          with plain column-row sampling.
Here:     Random matrices with 1,024 rows, whose norms are alike or vary as a log-normal with
          deviation 1, instead of activations of T5. Rows are drawn by the norm of the activations
          alone. Memory and accuracy are not measured.
Counts:   if rows differ, the squared error is at most 0.9 of that of plain sampling; if they are
          alike, at most 1.02. At most 1% of the error is bias.
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
        'label': 'squared error over that of plain sampling, rows of different norms',
    },
    {
        'study': 'measure',
        'value': 'error_over_plain_sampling_of_rows_alike',
        'within': (None, 1.02),
        'label': 'squared error over that of plain sampling, rows of similar norms',
    },
    {
        'study': 'measure',
        'value': 'bias_of_rows_different',
        'within': (None, 0.01),
        'label': 'share of squared bias in the error, rows of different norms',
    },
    {
        'study': 'measure',
        'value': 'bias_of_rows_alike',
        'within': (None, 0.01),
        'label': 'share of squared bias in the error, rows of similar norms',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'error_over_plain_sampling_of_uniform_draws_of_rows_different',
        'within': (1.1, None),
        'label': (
            'squared error of uniform draws over that of plain sampling, rows of different norms'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'error_over_plain_sampling_of_rows_different_divided_by_all',
        'within': (None, 0.9),
        'label': (
            'squared error over that of plain sampling, rows of different norms, draws divided by '
            'the number of all rows kept in place of that of draws'
        ),
    },
    {
        'study': 'measure',
        'value': 'bias_of_rows_different_divided_by_all',
        'within': (None, 0.01),
        'label': (
            'share of squared bias in the error, rows of different norms, draws divided by the '
            'number of all rows kept in place of that of draws'
        ),
    },
)
FIDELITY = {
    'WTA-CRS': {
        'setting': (
            '307 of 1,024 rows, drawn by the norm of the activations alone; the number of rows '
            'that are always included is the best one; activations 64 and gradients 32 wide, '
            'independent'
        ),
        'published': (
            '0.3 or 0.1 of the tokens, drawn by that norm times the norm of the gradient when '
            'the sample was last seen; fine-tuning of T5 and BERT, such as T5-large with 100 '
            'rows of 128 tokens'
        ),
        'source': (
            'arXiv:2305.15265; github.com/zirui-ray-liu/WTACRS, '
            'seq2seq/configs/approx_linear/approx_linear_cola_t5-large_level2_s0.3.json'
        ),
    },
    'plain sampling': {
        'setting': (
            'all 307 rows drawn with replacement by the same norms; its error is computed exactly'
        ),
        'published': 'column-row sampling from the same probabilities',
        'source': 'arXiv:2305.15265',
    },
}
