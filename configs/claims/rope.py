"""RoPE is better than learned positions.

Paper:    arXiv:2104.09864, RoFormer
Says:     Rotating queries and keys by position converges faster than adding position embeddings.
Here:     A 4-layer model with 0.26 million parameters is trained for 800 steps on 0.8 million
          tokens of Python source code. Tokens and learned positions start at a standard deviation
          of 0.02, as in BERT, whose positions the paper replaces. The paper trains larger models
          for far longer.
Counts:   the loss of learned positions is higher than that of RoPE.
"""

PART = 'attention'
CAUTION = (
    'Learned positions are 0.04 nats worse than none here, so that any model without them passes. '
    'RoPE itself is 0.32 nats better than no positions.'
)
STUDIES = {
    'positions': 'configs/studies/as_published.py:positions_800',
}
HOLDS = (
    {
        'study': 'positions',
        'arm': {'model.position': 'learned'},
        'difference': (0.0, None),
        'label': 'loss difference, learned positions minus RoPE (nats per token)',
    },
)
CONTROL = (
    {
        'study': 'positions',
        'arm': {'model.position': 'none'},
        'difference': (0.0, None),
        'label': 'loss difference, no position encoding minus RoPE (nats per token)',
    },
)
TWIN = (
    {
        'study': 'positions',
        'arm': {'model.position': 'learned'},
        'against': {'model.position': 'none'},
        'difference': (0.0, None),
        'label': (
            'loss difference, learned positions minus rotations by 0, which encode no position '
            '(nats per token)'
        ),
    },
)
FIDELITY = {
    'RoPE': {
        'setting': (
            'base 10,000, all 16 features of a head, halves paired; AdamW with betas 0.9 and 0.95 '
            'and decay 0.1, 80 steps of warm-up, cosine to 0 at step 800, 8 rows of 128 tokens; '
            'each arm has its own tuned rate'
        ),
        'published': (
            'all features of a head, neighbours paired; masked language models of 6 or 12 layers '
            'among others; rates and steps are not known here'
        ),
        'source': 'arXiv:2104.09864; github.com/ZhuiyiTechnology/roformer, README.md',
    },
    'learned positions': {
        'setting': (
            'table of 128 vectors, added to the embeddings; both start at a deviation of 0.02 and '
            'have the same rate and decay; no norm behind the sum'
        ),
        'published': (
            'added position embeddings; those of BERT are learned, start at a deviation of 0.02 '
            'as the embeddings do, and have a norm behind the sum'
        ),
        'source': 'arXiv:2104.09864; arXiv:1810.04805',
    },
}
