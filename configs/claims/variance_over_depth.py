"""Dividing each norm by the root of its depth keeps the variance of deep layers small.

Paper:    arXiv:2502.05795, The Curse of Depth in Large Language Models
Says:     in pre-norm the variance of the stream grows with depth, at least in proportion to it and
          at most exponentially; outputs of norms over the root of the depth keep that growth down.
Here:     causal models of width 64 and 36 layers at their start, random tokens, embeddings of
          deviation 1, five seeds; the paper looks at trained models, where growth is faster.
Counts:   the slope of the log of the variance that blocks have added, over log depth, is at least
          0.8 in pre-norm, and at most 0.5 with LayerNorm Scaling.
"""

PART = 'placements'
STUDIES = {
    'measure': 'measure:stream_over_depth',
}
HOLDS = (
    {'study': 'measure', 'value': 'slope_of_pre', 'within': (0.8, None)},
    {'study': 'measure', 'value': 'slope_of_layernorm_scaling', 'within': (None, 0.5)},
)
