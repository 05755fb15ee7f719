"""Blocks over the root of their number keep the stream the same size at every depth.

Paper:    arXiv:2310.02244, Tensor Programs VI: Feature Learning in Infinite-Depth Neural Networks
Says:     residual branches times 1 / sqrt(depth) (Depth-muP) keep features stable as depth grows,
          where without a factor their size grows with it.
Here:     causal transformers in pre-norm of width 64 and 4 to 36 layers at their start, random
          tokens, embeddings of deviation 1, five seeds; the paper's theory is of blocks of one
          layer, and says that for deeper ones, as here, no such rule serves training as well.
Counts:   the slope of the log root mean square of the stream over log depth is within 0.1 of 0
          under Depth-muP, and at least 0.3 without.
"""

PART = 'scaling'
STUDIES = {
    'measure': 'measure:stream_over_depth',
}
HOLDS = (
    {'study': 'measure', 'value': 'slope_of_size_of_depth_mup', 'within': (-0.1, 0.1)},
    {'study': 'measure', 'value': 'slope_of_size_of_standard', 'within': (0.3, None)},
)
