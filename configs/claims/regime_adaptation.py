"""Large batches generalise as well as small ones when trained for as many steps.

Paper:    arXiv:1705.08741, Train longer, generalize better
Says:     Large batches lose accuracy because they make fewer updates; with as many updates as small
          batches they lose none. The distance from the initial weights grows with the logarithm of
          the steps.
Here:     Networks with two hidden layers of 128 units classify 10 classes of Gaussian clusters:
          2,048 rows seen 20 times in batches of 16 or 256, by SGD whose learning rate falls in the
          second half, each regime at the best of five rates, ten seeds. The paper trains
          convolutional networks on images, with batches of 128 and 4,096, and norms over parts of a
          batch.
Counts:   after equal passes large batches lose at least one point of accuracy, after equal steps at
          most half a point. A line in the logarithm of the steps leaves less unexplained than a
          line in their square root.
"""

PART = 'recipes'
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
        'value': 'lost_by_adapted',
        'within': (None, 0.005),
        'label': 'accuracy lost by large batches after equal steps (fraction)',
    },
    {
        'study': 'measure',
        'value': 'unexplained_by_log_less_root',
        'within': (None, 0.0),
        'label': 'unexplained share of the logarithmic fit minus that of the square-root fit',
    },
)
