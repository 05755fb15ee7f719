"""Weight decay that grows as the root of the width keeps singular values the same.

Paper:    arXiv:2510.15262, Robust Layerwise Scaling Rules by Proper Weight Decay Tuning
Says:     in steady state the largest singular value of a hidden matrix goes as the root of rate
          over decay, times width^0.75, so that with a rate of 1 / width a decay of sqrt(width)
          keeps it.
Here:     one layer of width 32, 64 and 128, trained for three times the steps that decay takes,
          120 to 480, at the high rate of 0.02 and a decay of 1.25, on a Markov chain of 63 tokens,
          five seeds; the paper trains far wider models of many layers on text, and lets vectors
          and embeddings decay not at all, where embeddings decay here.
Counts:   the slope over log width is within 0.08 of 1/4 with a constant decay, of 0 with
          sqrt(width), and of -1/4 with decay in proportion to width; that over log rate / decay is
          within 0.08 of 1/2.
"""

PART = 'scaling'
STUDIES = {
    'measure': 'measure:decayed_norms',
}
HOLDS = (
    {'study': 'measure', 'value': 'slope_over_width_of_constant', 'within': (0.17, 0.33)},
    {'study': 'measure', 'value': 'slope_over_width_of_sqrt_width', 'within': (-0.08, 0.08)},
    {'study': 'measure', 'value': 'slope_over_width_of_linear_width', 'within': (-0.33, -0.17)},
    {'study': 'measure', 'value': 'slope_over_rate_over_decay', 'within': (0.42, 0.58)},
)
