"""Unlearning by preferring a template answer costs less retained knowledge than gradient ascent.

Paper:    arXiv:2410.11143, LLM Unlearning via Loss Adjustment with Only Forget Data
Says:     Maximising an f-divergence between a template answer and the answer to forget needs
          neither retained data nor a reference model, and preserves more of the model than ascent
          on the loss of the data to forget.
Here:     A transformer with two blocks of width 64 has memorised 100 random keys with values of
          four tokens, and a template for 20 other keys. Ten strings are forgotten, with five seeds
          and Adam at the learning rate of three that is best for each method on three other seeds;
          each stops once the model gives none of the ten in full. The paper unlearns authors and
          books from language models with 1 to 7 billion weights, at fixed rates and epochs. Mean
          probabilities cover the answers only.
Counts:   with each of four divergences, the loss on the retained strings rises by at most half as
          much as with gradient ascent.
"""

PART = 'losses'
CAUTION = (
    'The cost of FLAT still falls at the lowest of the three learning rates, so that it could be '
    'lower; FLAT without its template costs about the same.'
)
STUDIES = {
    'measure': 'measure:forgetting',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'cost_of_flat_total_variation_over_ascent',
        'within': (None, 0.5),
        'label': 'loss increase on retained strings over that of gradient ascent, total variation',
    },
    {
        'study': 'measure',
        'value': 'cost_of_flat_kl_over_ascent',
        'within': (None, 0.5),
        'label': 'loss increase on retained strings over that of gradient ascent, KL',
    },
    {
        'study': 'measure',
        'value': 'cost_of_flat_jensen_shannon_over_ascent',
        'within': (None, 0.5),
        'label': 'loss increase on retained strings over that of gradient ascent, Jensen-Shannon',
    },
    {
        'study': 'measure',
        'value': 'cost_of_flat_pearson_over_ascent',
        'within': (None, 0.5),
        'label': 'loss increase on retained strings over that of gradient ascent, Pearson',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'cost_of_retraining_over_ascent',
        'within': (None, 0.5),
        'label': (
            'loss increase on retained strings over that of gradient ascent, training without the '
            'forgotten strings'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'cost_of_flat_without_template_over_ascent',
        'within': (None, 0.5),
        'label': (
            'loss increase on retained strings over that of gradient ascent, total variation '
            'without the template'
        ),
    },
)
FIDELITY = {
    'FLAT': {
        'setting': (
            'mean probability of answer tokens only, template of four fixed tokens that the model '
            'already gives to unknown keys; Adam without decay at the best of three constant '
            'rates on all ten strings, stopped once none is given'
        ),
        'published': (
            'mean over all positions, where ignored ones count as 0, with refusals as templates; '
            'rate 1e-5 and 5 epochs on TOFU (2e-7 on Harry Potter), decay 0.01, batches of 16 x '
            '4, no early stop; total variation is the default'
        ),
        'source': (
            'arXiv:2410.11143; github.com/UCSC-REAL/FLAT, dataloader.py, config/forget.yaml and '
            'README.md'
        ),
    },
    'gradient ascent': {
        'setting': 'minus the mean loss of the answer tokens; the same Adam, rates and stop',
        'published': 'minus the mean loss of the answer tokens, for the same fixed epochs and rate',
        'source': 'github.com/UCSC-REAL/FLAT, dataloader.py and config/forget.yaml',
    },
}
