"""SwiGLU reaches a lower loss than GELU with the same number of parameters.

Paper:    arXiv:2002.05202, GLU Variants Improve Transformer
Says:     Gated MLPs with two thirds of the hidden width have lower perplexity than ReLU or GELU
          MLPs.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is lower than that of GELU.
"""

PART = 'activations'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.activation': 'swiglu'},
        'difference': (None, 0.0),
        'label': 'loss difference, SwiGLU minus GELU (nats per token)',
    },
)
