"""Cross-entropy becomes too confident for many tries, which direct coverage avoids.

Paper:    arXiv:2502.07154, Rethinking Fine-Tuning when Scaling Test-Time Compute: Limiting
          Confidence Improves Mathematical Reasoning
Says:     Longer training with cross-entropy raises pass@1 and lowers pass@N. A loss on N tries,
          which gives less weight to confident rows, keeps pass@N up.
Here:     Networks with two hidden layers of 128 units classify 64 classes of overlapping Gaussian
          clusters: 2,048 rows seen 40 times, N = 16 computed exactly, each loss at the best of five
          learning rates, ten seeds. The paper fine-tunes language models for mathematical answers
          of many tokens, with N up to 1,024.
Counts:   pass@16 of cross-entropy falls by at least one point from its best stage while pass@1
          rises, and at the end pass@16 of direct coverage is at least two points above that of
          cross-entropy.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:tries',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'pass_at_16_lost',
        'within': (0.01, None),
        'label': 'pass@16 of cross-entropy: best stage minus end (fraction)',
    },
    {
        'study': 'measure',
        'value': 'pass_at_1_gained_since',
        'within': (0.0, None),
        'label': 'pass@1 of cross-entropy: end minus that stage (fraction)',
    },
    {
        'study': 'measure',
        'value': 'pass_at_16_gain_of_dco',
        'within': (0.02, None),
        'label': 'pass@16 of direct coverage minus that of cross-entropy (fraction)',
    },
)
