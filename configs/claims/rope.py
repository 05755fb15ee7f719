"""RoPE is better than positions that are added to the embeddings.

Paper:    arXiv:2104.09864, RoFormer
Says:     Rotating queries and keys by position converges faster than adding position embeddings.
Here:     A 4-layer model with 0.26 million parameters is trained for 800 steps on 0.8 million
          tokens of Python source code, beside one with the sinusoidal positions of the Transformer,
          which the paper replaces in translation. The paper trains larger models for far longer.
Counts:   the loss of sinusoidal positions is higher than that of RoPE.
"""

PART = 'attention'
CAUTION = (
    'Against learned positions, which the paper replaces in BERT, a test cannot tell at this size: '
    'they are 0.04 nats worse than none (configs/studies/results/as_published.md).'
)
STUDIES = {
    'sinusoidal': 'configs/studies/as_published.py:sinusoidal',
}
HOLDS = (
    {
        'study': 'sinusoidal',
        'arm': {'model.position': 'sinusoidal'},
        'difference': (0.0, None),
        'label': 'loss difference, sinusoidal positions minus RoPE (nats per token)',
    },
)
CONTROL = (
    {
        'study': 'sinusoidal',
        'arm': {'model.position': 'none'},
        'difference': (0.0, None),
        'label': 'loss difference, no position encoding minus RoPE (nats per token)',
    },
)
TWIN = (
    {
        'study': 'sinusoidal',
        'arm': {'model.position': 'sinusoidal'},
        'against': {'model.position': 'none'},
        'difference': (0.0, None),
        'label': (
            'loss difference, sinusoidal positions minus rotations by 0, which encode no position '
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
    'sinusoidal positions': {
        'setting': (
            'the equations of the Transformer, added to embeddings of initial deviation 1; the '
            'same training at a tuned rate of its own'
        ),
        'published': (
            'the positions of the Transformer, whose embeddings are multiplied by the root of '
            'their width, in machine translation; its rates and steps are not known here'
        ),
        'source': 'arXiv:2104.09864; arXiv:1706.03762, sections 3.4 and 3.5',
    },
}
