"""A dual score of weights prunes best for a domain.

Paper:    arXiv:2405.06275, Pruning as a Domain-specific LLM Extractor
Says:     weights that matter to a domain by its gradient, with the importance to general text, by
          curvature, in the loss, keep both: half of the weights go, and the model is better on the
          domain, and more general, than after pruning for one of these alone.
Here:     tiny models of width 32 and two blocks after 400 steps on two drawn languages, of which
          one is the domain; half of the weights of each matrix is removed, once. What is measured
          are losses, in nats a token. The paper prunes models of billions of weights while they
          take steps on texts of medicine and law, and judges answers and summaries too. The
          gradient is as in its code, where the importance hardly acts; its strength is here the
          best of four, up to 10 billion times as large. Scores by curvature choose weights, and no
          other weight makes up for these.
Counts:   the mean loss of both languages rises by less, by 0.01 or more, than with the magnitude,
          with Wanda of the domain, with curvature of the general text, and with the domain's
          gradient alone.
"""

PART = 'weights'
STUDIES = {
    'measure': 'measure:pruned_for_a_domain',
}
HOLDS = (
    {'study': 'measure', 'value': 'mean_added_by_dual_less_magnitude', 'within': (None, -0.01)},
    {'study': 'measure', 'value': 'mean_added_by_dual_less_wanda', 'within': (None, -0.01)},
    {'study': 'measure', 'value': 'mean_added_by_dual_less_obs', 'within': (None, -0.01)},
    {'study': 'measure', 'value': 'mean_added_by_dual_less_taylor', 'within': (None, -0.01)},
)
