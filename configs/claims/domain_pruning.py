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
