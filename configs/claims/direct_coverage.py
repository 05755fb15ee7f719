"""Cross-entropy grows too sure for many tries, which direct coverage mends.

Paper:    arXiv:2502.07154, Rethinking Fine-Tuning when Scaling Test-Time Compute: Limiting
          Confidence Improves Mathematical Reasoning
Says:     longer training by cross-entropy raises pass@1 and lowers pass@N; a loss of N tries, which
          counts confident rows less, keeps pass@N up.
Here:     networks of two hidden layers of 128 units on 64 classes of overlapping Gaussian clusters,
          2,048 rows seen 40 times, N = 16 exact, each loss at the best of five rates, ten seeds;
          the paper fine-tunes language models for mathematical answers of many tokens, with N to
          1,024.
Counts:   pass@16 by cross-entropy falls from its best stage by a point or more as pass@1 rises, and
          by direct coverage it is at least two points above that of cross-entropy in the end.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:tries',
}
HOLDS = (
    {'study': 'measure', 'value': 'pass_at_16_lost', 'within': (0.01, None)},
    {'study': 'measure', 'value': 'pass_at_1_gained_since', 'within': (0.0, None)},
    {'study': 'measure', 'value': 'pass_at_16_gain_of_dco', 'within': (0.02, None)},
)
