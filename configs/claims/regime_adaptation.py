"""Large batches generalise as well as small ones where they have as many steps.

Paper:    arXiv:1705.08741, Train longer, generalize better
Says:     what large batches lose comes of few updates, and goes where they have as many as small
          ones; the distance from the start grows with the logarithm of the steps.
Here:     networks of two hidden layers of 128 units on 10 classes of Gaussian clusters, 2,048 rows
          seen 20 times in batches of 16 or 256, by SGD whose rate falls in the last half, each
          regime at the best of five rates, ten seeds; the paper trains convolutional networks on
          images, with batches of 128 and 4,096, and norms over parts of them.
Counts:   with as many passes large batches lose a point or more, with as many steps at most half of
          one, and a line in the logarithm leaves less unexplained than one in the square root.
"""

PART = 'recipes'
STUDIES = {
    'measure': 'measure:large_batches',
}
HOLDS = (
    {'study': 'measure', 'value': 'lost_by_large', 'within': (0.01, None)},
    {'study': 'measure', 'value': 'lost_by_adapted', 'within': (None, 0.005)},
    {'study': 'measure', 'value': 'unexplained_by_log_less_root', 'within': (None, 0.0)},
)
