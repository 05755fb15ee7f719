"""Post-norm is worse than pre-norm with a short warm-up.

Paper:    arXiv:2002.04745, On Layer Normalization in the Transformer Architecture
Says:     gradients near the output of a post-norm model are large at the start, so that it needs a
          careful warm-up, and pre-norm does not.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains deeper models for far longer.
Counts:   the loss is higher than pre-norm's after a warm-up of 20 of 200 steps.
"""

PART = 'placements'
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'post'},
        'difference': (0.0, None),
    },
)
