"""Linear attention is as good as softmax attention.

Paper:    arXiv:2006.16236, Transformers are RNNs
Says:     Attention with the feature map elu + 1, whose cost is linear in the length, matches
          softmax attention.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer. Rows have 128 tokens, which is too short
          for linear attention to save time.
Counts:   the loss is at most 0.03 nats above that of softmax attention.
"""

from configs.claims import _shared

PART = 'attention'
CAUTION = (
    'RoPE turns the numerator alone here, so that weights may be negative and need not sum to '
    '1. The published form has no rotation.'
)
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
    **_shared.BLOCKS_SETTINGS,
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.attention': 'linear'},
        'difference': (None, 0.03),
        'label': 'loss difference, linear attention minus softmax attention (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
NUISANCES = _shared.BLOCKS_NUISANCES
FIDELITY = {
    'linear attention': {
        'setting': (
            'elu + 1, 1e-6 added to the divisor; RoPE turns the features in the numerator alone, '
            'so weights may be negative and need not sum to 1, which the published method '
            'excludes'
        ),
        'published': (
            'elu + 1 and 1e-6 without rotation, so weights are positive and sum to 1; images, '
            'speech and a copying task of 128 symbols with 4 layers, 8 heads, batches of 64 and '
            'RAdam'
        ),
        'source': (
            'arXiv:2006.16236, experiments; github.com/idiap/fast-transformers, '
            'fast_transformers/attention/causal_linear_attention.py'
        ),
    },
    'softmax attention': {
        'setting': (
            'RMSNorm in pre-norm, RoPE, GELU, four heads of 16 features, no query-key norms; '
            'AdamW with betas 0.9 and 0.95 and decay 0.1, 20 steps of warm-up, cosine to 0 at '
            'step 200, 8 rows of 128 tokens; each arm has its own tuned rate'
        ),
        'published': (
            'the same transformer with softmax, without rotation; the rest is not known here'
        ),
        'source': 'arXiv:2006.16236, experiments',
    },
}
