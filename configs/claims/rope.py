"""RoPE is better than learned positions.

Paper:    arXiv:2104.09864, RoFormer
Says:     Rotating queries and keys by position converges faster than adding position embeddings.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss of learned positions is higher than that of RoPE.
"""

from configs.claims import _shared

PART = 'attention'
WITHDRAWN = (
    'The baseline is not the published one: the learned positions started at a standard deviation '
    'of 1, as random vectors that 200 steps hardly move. Published models start near 0.02.'
)
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.position': 'learned'},
        'difference': (0.0, None),
        'label': 'loss difference, learned positions minus RoPE (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
FIDELITY = {
    'RoPE': {
        'setting': (
            'base 10,000, all 16 features of a head, halves paired; AdamW with betas 0.9 and 0.95 '
            'and decay 0.1, 20 steps of warm-up, cosine to 0 at step 200, 8 rows of 128 tokens; '
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
            'table of 128 vectors from N(0, 1), added to embeddings of deviation 1, not the '
            'published start; same rate and decay as the embeddings'
        ),
        'published': (
            'added position embeddings; those of BERT are learned and start at a deviation of 0.02'
        ),
        'source': 'arXiv:2104.09864; arXiv:1810.04805',
    },
}
