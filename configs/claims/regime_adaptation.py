"""Large batches generalise as well as small ones when trained for as many steps.

Paper:    arXiv:1705.08741, Train longer, generalize better
Says:     Large batches lose accuracy because they make fewer updates; with as many updates as small
          batches they lose none. The distance from the initial weights grows with the logarithm of
          the steps.
Here:     Networks with two hidden layers of 128 units classify 10 classes of Gaussian clusters:
          2,048 rows seen 20 times in batches of 16 or 256, by SGD whose learning rate falls in the
          second half. Each regime has its best rate, which three seeds choose; ten other seeds
          count. The paper trains convolutional networks on images, with batches of 128 and 4,096,
          and norms over parts of a batch.
Counts:   after equal passes large batches lose at least one point of accuracy, and after equal
          steps at most half of that loss. A line in the logarithm of the steps leaves at most 5% of
          the variance of the distances unexplained.
"""

PART = 'recipes'
CAUTION = (
    'Each regime has its own best learning rate, and there is no batch normalisation. Both help '
    'large batches; the authors keep or scale the rate of small ones.'
)
STUDIES = {
    'measure': 'measure:large_batches',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'lost_by_large',
        'within': (0.01, None),
        'label': 'accuracy lost by large batches after equal passes (fraction)',
    },
    {
        'study': 'measure',
        'value': 'lost_by_adapted_less_half_of_large',
        'within': (None, 0.0),
        'label': (
            'accuracy lost by large batches after equal steps, minus half of that after equal '
            'passes (fraction)'
        ),
    },
    {
        'study': 'measure',
        'value': 'unexplained_by_log',
        'within': (None, 0.05),
        'label': (
            'share of the variance of distances that the logarithm of the steps leaves (fraction)'
        ),
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'lost_by_large_at_rate_of_small',
        'within': (0.01, None),
        'label': (
            'accuracy lost by large batches after equal passes at the rate of small ones (fraction)'
        ),
    },
    {
        'study': 'measure',
        'value': 'unexplained_by_log_of_random_walk',
        'within': (0.05, None),
        'label': (
            'share of the variance of distances that the logarithm leaves for a random walk, which '
            'grow with the square root of the steps (fraction)'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'lost_by_early_drops_less_half_of_large',
        'within': (None, 0.0),
        'label': (
            'accuracy lost by large batches after equal steps, of which the schedule of the rate '
            'covers only as many as equal passes take, minus half of that after equal passes '
            '(fraction)'
        ),
    },
)
FIDELITY = {
    'small batches': {
        'setting': (
            '16 rows, 2,560 steps, momentum 0.9, no weight decay, no norm; rate times 0.1 and '
            '0.01 in the last two quarters, best of rates 0.01 to 0.1'
        ),
        'published': (
            '128 rows, momentum 0.9, weight decay 1e-4, batch norm, rate 0.1 or the regime of the '
            'model'
        ),
        'source': 'arXiv:1705.08741; github.com/eladhoffer/bigBatch, main_gbn.py',
    },
    'large batches, equal passes': {
        'setting': (
            '256 rows, 160 steps, the best of rates 0.01 to 1, not a scaled rate; no gradient '
            'clipping'
        ),
        'published': (
            '2,048 or 4,096 rows, with the rate of small batches or sqrt(batch / 128) times it; '
            'batch norm over parts of 128 rows, gradients clipped at 5'
        ),
        'source': (
            'arXiv:1705.08741; github.com/eladhoffer/bigBatch, main_gbn.py and run_experiments.sh'
        ),
    },
    'large batches, equal steps': {
        'setting': (
            '256 rows, 2,560 steps, the best of rates 0.1 to 1; the distance of all weights after '
            'each step at the first rate'
        ),
        'published': (
            'epochs and drops of the rate times batch / 128, with the scaled rate and norms over '
            'parts; the code logs the distance of the first weights after each epoch'
        ),
        'source': 'arXiv:1705.08741; github.com/eladhoffer/bigBatch, main_gbn.py',
    },
}
