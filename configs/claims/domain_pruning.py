"""A dual score of weights is best for pruning to a domain.

Paper:    arXiv:2405.06275, Pruning as a Domain-specific LLM Extractor
Says:     Scores that combine a weight's importance to the domain, from its gradient, with its
          importance to general text, from curvature, preserve both. Half of the weights are
          removed, and the model is better on the domain and more general than after pruning for one
          of the two.
Here:     Tiny models with width 32 and two blocks are trained for 400 steps on two random
          languages, one of which is the domain; half of the weights of each matrix is removed once.
          The test measures losses in nats per token. The paper prunes models with billions of
          weights while they train on texts of medicine and law, and also judges answers and
          summaries. The gradient is as in its code, in which the importance hardly has an effect;
          here its strength is the best of four, up to 10 billion times as large. Curvature scores
          select weights, and the remaining weights are not adjusted.
Counts:   the mean loss of both languages rises by at least 0.01 less than with magnitude pruning,
          with Wanda on the domain, with curvature on the general text, and with the gradient on the
          domain alone.
"""

PART = 'weights'
CAUTION = (
    "The score has neither the w^3 nor the factor 1/2000 of the authors' code, and the model is "
    'not trained while it is scored.'
)
STUDIES = {
    'measure': 'measure:pruned_for_a_domain',
}
HOLDS = (
    {
        'study': 'measure',
        'value': 'mean_added_by_dual_less_magnitude',
        'within': (None, -0.01),
        'label': 'loss increase, dual score minus magnitude (nats per token)',
    },
    {
        'study': 'measure',
        'value': 'mean_added_by_dual_less_wanda',
        'within': (None, -0.01),
        'label': 'loss increase, dual score minus Wanda (nats per token)',
    },
    {
        'study': 'measure',
        'value': 'mean_added_by_dual_less_obs',
        'within': (None, -0.01),
        'label': 'loss increase, dual score minus curvature (nats per token)',
    },
    {
        'study': 'measure',
        'value': 'mean_added_by_dual_less_taylor',
        'within': (None, -0.01),
        'label': 'loss increase, dual score minus domain gradient (nats per token)',
    },
)
CONTROL = (
    {
        'study': 'measure',
        'value': 'mean_added_by_magnitude_less_larger_share',
        'within': (None, -0.01),
        'label': (
            'loss increase, magnitude pruning of 50% minus that of 60% of weights (nats per token)'
        ),
    },
)
TWIN = (
    {
        'study': 'measure',
        'value': 'mean_added_by_dual_without_weights_less_obs',
        'within': (None, -0.01),
        'label': (
            'loss increase, dual score without the factor |w| minus curvature (nats per token)'
        ),
    },
)
FIDELITY = {
    'dual score': {
        'setting': (
            '|g w| + (g w)^2 / 2 per row, for a weight w whose gradient g is replaced by g + s '
            'G g^2, with the general importance G and a strength s; s is the published one or '
            '1e6 to 1e10 times that, the best on calibration text; 50% of each matrix, on a '
            'finished model, no further training'
        ),
        'published': (
            '|g w + (g w)^2 / 2000 + w^3|, summed over 5 epochs of SGD at 0.03 on the domain that '
            'also change the weights; 52% of each matrix at the end'
        ),
        'source': (
            'arXiv:2405.06275; github.com/compressionOrg/D-Pruner, code/src/lomo.py, '
            'code/config/args_lomo.yaml and code/save_model.py'
        ),
    },
    'magnitude': {
        'setting': '|w|, 50% of each matrix',
        'published': 'the same score; share and grouping are not known here',
        'source': 'arXiv:2405.06275',
    },
    'Wanda': {
        'setting': (
            '|w| times input size on 128 rows of the domain, 50% of the inputs of each output'
        ),
        'published': (
            'the same score per output; whether their baseline reads the domain is not known here'
        ),
        'source': 'arXiv:2306.11695; arXiv:2405.06275',
    },
    'curvature': {
        'setting': (
            'the score of SparseGPT on 128 rows of general text, damping 0.01, but the remaining '
            'weights are not adjusted'
        ),
        'published': (
            'as the general importance: 128 rows of C4, damping 0.01, computed while earlier '
            'columns are pruned and the rest compensates; SparseGPT as a baseline adjusts them '
            'too'
        ),
        'source': 'github.com/compressionOrg/D-Pruner, code/general.py; arXiv:2301.00774',
    },
    'domain gradient': {
        'setting': 'the dual score with s = 0',
        'published': 'a gradient score of the domain as a baseline; its form is not known here',
        'source': 'arXiv:2405.06275',
    },
}
