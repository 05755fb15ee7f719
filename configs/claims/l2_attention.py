"""Attention scores from distances are as good as dot products.

Paper:    arXiv:2504.12588, a paper on plain graph transformers
Says:     Negative squared distances between queries and keys work as well as scaled dot products.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above that of dot-product attention.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.attention': 'l2'},
        'difference': (None, 0.03),
        'label': 'loss difference, L2 attention minus dot-product attention (nats per token)',
    },
)
