"""Far more unit vectors than dimensions can be spread to nearly equal angles.

Paper:    arXiv:2303.11637, Equiangular Basis Vectors
Says:     Gradient descent on the cosines of pairs gives each of many classes a fixed vector, all
          about equally far from each other and as close to orthogonal as possible.
Here:     512 vectors in 64 dimensions and 2,048 in 128, for 300 steps; the authors' code has 1,000
          in 1,000. The loss is squared, and its threshold follows the largest cosine down; theirs
          is fixed. Only the vectors are examined: no classifier is trained.
Counts:   at both sizes the largest |cosine| is at most twice the Welch bound, which no set of
          vectors can beat, and at most half of that of random vectors.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:equiangular_rows',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'over_welch_of_512_rows',
        'within': (None, 2.0),
        'label': 'largest |cosine| over the Welch bound, 512 vectors',
    },
    {
        'study': 'measure',
        'value': 'over_welch_of_2048_rows',
        'within': (None, 2.0),
        'label': 'largest |cosine| over the Welch bound, 2,048 vectors',
    },
    {
        'study': 'measure',
        'value': 'over_random_of_512_rows',
        'within': (None, 0.5),
        'label': 'largest |cosine| over that of random vectors, 512 vectors',
    },
    {
        'study': 'measure',
        'value': 'over_random_of_2048_rows',
        'within': (None, 0.5),
        'label': 'largest |cosine| over that of random vectors, 2,048 vectors',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'over_welch_of_random_rows',
        'within': (2.0, None),
        'label': 'largest |cosine| over the Welch bound, 512 random vectors',
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'over_welch_of_unit_columns',
        'within': (None, 2.0),
        'label': (
            'largest |cosine| over the Welch bound, 512 vectors of which the descent sets the '
            'columns to unit length instead of the rows'
        ),
    },
)
FIDELITY = {
    'equiangular rows': {
        'setting': (
            'gradient steps on squared excesses over 0.9 of the largest |cosine|, step size 0.5 '
            'falling linearly to 0, 300 steps, rows set to unit length after each; 512 x 64 and '
            '2,048 x 128'
        ),
        'published': (
            'SGD at 1e-3 on the sum of excesses over a fixed threshold of 0.002, at most 100,000 '
            'steps, stopped at the threshold; 1,000 x 1,000, where the Welch bound is 0'
        ),
        'source': 'github.com/aassxun/Equiangular-Basis-Vectors, Generate_EBV/Generate_EBV.py',
    },
    'random rows': {
        'setting': (
            'Gaussian rows of unit length from the same key, which is also the start of the descent'
        ),
        'published': 'the start of the descent; not compared with, as far as known here',
        'source': 'github.com/aassxun/Equiangular-Basis-Vectors, Generate_EBV/Generate_EBV.py',
    },
}
