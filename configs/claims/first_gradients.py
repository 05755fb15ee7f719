"""Gradients of the last layer shrink with depth in pre-norm and not in post-norm.

Paper:    arXiv:2002.04745, On Layer Normalization in the Transformer Architecture
Says:     at the start the gradient of the last layers is of order 1 in post-norm, whatever the
          depth, and falls as 1 / sqrt(depth) in pre-norm: post-norm needs a warm-up.
Here:     causal models of width 64 and 2 to 16 layers, random tokens, one batch, five seeds; the
          theorem is of one linear layer behind each sublayer.
Counts:   the slope of log gradient over log depth is nearer to -1/2 than to 0 in pre-norm, and
          nearer to 0 in post-norm.
"""

PART = 'placements'
STUDIES = {
    'measure': 'measure:gradients_at_the_start',
}
HOLDS = (
    {'study': 'measure', 'value': 'slope_of_pre_norm', 'within': (None, -0.25)},
    {'study': 'measure', 'value': 'slope_of_post_norm', 'within': (-0.25, None)},
)
