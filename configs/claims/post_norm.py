"""Post-norm is worse than pre-norm with a short warm-up.

Paper:    arXiv:2002.04745, On Layer Normalization in the Transformer Architecture
Says:     Gradients near the output of a post-norm model are large at initialisation, so post-norm
          needs a careful warm-up and pre-norm does not.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is higher than that of pre-norm after a warm-up of 20 of 200 steps.
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
        'label': 'loss difference, post-norm minus pre-norm (nats per token)',
    },
)
