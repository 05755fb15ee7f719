"""In Peri-LN the variance of the stream grows linearly, however large the weights get.

Paper:    arXiv:2502.02732, Peri-LN
Says:     with norms on both sides each sublayer adds a variance that does not depend on its
          weights, so that the stream grows linearly with depth; in pre-norm it adds more as weights
          grow, which ends in massive activations.
Here:     causal models of width 64 and 36 layers at their start, random tokens, embeddings of
          deviation 1, five seeds; training is stood in for by hidden matrices four times as large.
Counts:   the slope of the log of the variance that blocks have added, over log depth, is within 0.1
          of 1; with larger matrices that variance changes by at most 10% in Peri-LN, and grows at
          least fourfold in pre-norm.
"""

PART = 'placements'
STUDIES = {
    'measure': 'measure:stream_over_depth',
}
HOLDS = (
    {'study': 'measure', 'value': 'slope_of_peri', 'within': (0.9, 1.1)},
    {'study': 'measure', 'value': 'added_by_grown_of_peri', 'within': (0.9, 1.1)},
    {'study': 'measure', 'value': 'added_by_grown_of_pre', 'within': (4.0, None)},
)
