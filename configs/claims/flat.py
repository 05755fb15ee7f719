"""Unlearning by preferring a template answer costs what is kept less than gradient ascent.

Paper:    arXiv:2410.11143, LLM Unlearning via Loss Adjustment with Only Forget Data
Says:     maximising an f-divergence between a template answer and the answer to forget takes
          neither data to keep nor a reference model, and keeps more of a model than ascent on the
          loss of what is to be forgotten.
Here:     a transformer of two blocks of width 64 that has memorised 100 random keys with values of
          four tokens, and a template for 20 other keys; ten strings are forgotten, five seeds,
          Adam at the best of three rates for each method; each stops once none of the ten is given
          in full. The paper unlearns authors and books from language models of 1 to 7 billion
          weights at fixed rates and epochs. Mean probabilities are of answers alone.
Counts:   with each of four divergences the loss on the kept strings rises by half or less of what
          it rises by in gradient ascent.
"""

PART = 'losses'
STUDIES = {
    'measure': 'measure:forgetting',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'cost_of_flat_total_variation_over_ascent',
        'within': (None, 0.5),
    },
    {'study': 'measure', 'value': 'cost_of_flat_kl_over_ascent', 'within': (None, 0.5)},
    {'study': 'measure', 'value': 'cost_of_flat_jensen_shannon_over_ascent', 'within': (None, 0.5)},
    {'study': 'measure', 'value': 'cost_of_flat_pearson_over_ascent', 'within': (None, 0.5)},
)
