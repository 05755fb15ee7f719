"""Unit vectors far more in number than dimensions can be spread to nearly equal angles.

Paper:    arXiv:2303.11637, Equiangular Basis Vectors
Says:     descent on the cosines of pairs gives a fixed vector to each of many classes, all about
          as far from each other, and as near to orthogonal as can be.
Here:     512 vectors in 64 dimensions and 2,048 in 128, where the authors' code has 1,000 in 1,000;
          the loss is squared, and its threshold follows the largest cosine down, where theirs is
          given; 300 steps. Only the vectors are looked at: no classifier is trained.
Counts:   at both sizes the largest |cosine| is at most twice the Welch bound, below which none can
          be, and at most half of that of random vectors.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:equiangular_rows',
}
HOLDS = (
    {'study': 'measure', 'value': 'over_welch_of_512_rows', 'within': (None, 2.0)},
    {'study': 'measure', 'value': 'over_welch_of_2048_rows', 'within': (None, 2.0)},
    {'study': 'measure', 'value': 'over_random_of_512_rows', 'within': (None, 0.5)},
    {'study': 'measure', 'value': 'over_random_of_2048_rows', 'within': (None, 0.5)},
)
