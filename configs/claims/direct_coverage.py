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
CAUTION = (
    'Each arm has the learning rate that is best by its own measure, pass@1 or pass@16, so that '
    'a part of the gain may come from tuning.'
)
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
FIDELITY = {
    'direct coverage': {
        'setting': (
            'N = 16, trained from scratch, one label per row, the factor F without a gradient; '
            'Adam with betas 0.9 and 0.999, no decay, no warm-up, a cosine to 0, batch 64, 40 '
            'passes, at the rate with the best final pass@16'
        ),
        'published': (
            'N up to 1,024, answers of many tokens, the same factor; Llama-3-8B fine-tuned at '
            '2e-5 in batches of 16 per device for 6 epochs'
        ),
        'source': (
            'arXiv:2502.07154, section 4; github.com/allanraventos/refine, refine/training/NCO.py '
            'and README.md'
        ),
    },
    'cross-entropy': {
        'setting': (
            'the same training, but at the rate with the best final pass@1: the other arm alone '
            'is tuned for pass@16'
        ),
        'published': 'N = 1 in the same script, at the same rate',
        'source': 'github.com/allanraventos/refine, README.md',
    },
}
