"""Under muP what a step changes keeps its size as a model gets wider.

Paper:    arXiv:2203.03466, Tensor Programs V, appendix D.1
Says:     with muP activations change as much at every width, so that one learning rate serves all;
          with the standard rule they grow with the width.
Here:     models of 32 to 256 in width and two layers, five steps of Adam at 0.003 on one random
          batch, five seeds.
Counts:   the largest slope of log change over log width is at most 0.15 under muP, and at least 0.3
          under the standard rule.
"""

PART = 'scaling'
STUDIES = {
    'measure': 'measure:sizes_over_width',
}
HOLDS = (
    {'study': 'measure', 'value': 'largest_slope_of_mup', 'within': (None, 0.15)},
    {'study': 'measure', 'value': 'largest_slope_of_standard', 'within': (0.3, None)},
)
