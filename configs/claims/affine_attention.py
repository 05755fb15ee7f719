"""Affine-scaled attention lowers the loss.

Paper:    arXiv:2602.23057, Affine-Scaled Attention
Says:     Scaling and shifting the attention weights with learned values, so that they need not sum
          to 1, makes training more stable and lowers the loss.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is lower than with plain attention.
"""

from configs.claims import _shared

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'attention.affine_scaled': True},
        'difference': (None, 0.0),
        'label': 'loss difference, affine-scaled attention minus plain attention (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
FIDELITY = {
    'affine-scaled attention': {
        'setting': (
            'sigmoid scale per query and head, near 0.5 at the start; its running mean has decay '
            '0.9, starts at 0.5 and has no gradient; trained on cross-entropy alone'
        ),
        'published': (
            'the same decay, but the mean starts at 0; 0.5 to 3 billion parameters learn from a '
            'teacher on 20 billion tokens, batches of 1,024 rows of 2,048, rate 0.001, decay 0.1; '
            'initial matrix and causal form are not known here'
        ),
        'source': 'arXiv:2602.23057, as quoted in notes on it; no official code is known',
    },
    'plain attention': {
        'setting': (
            'RMSNorm in pre-norm, RoPE, GELU, four heads of 16 features, no query-key norms; '
            'AdamW with betas 0.9 and 0.95 and decay 0.1, 20 steps of warm-up, cosine to 0 at '
            'step 200, 8 rows of 128 tokens; each arm has its own tuned rate'
        ),
        'published': (
            'softmax attention, and attention with sinks, trained in the same way; the rest is '
            'not known here'
        ),
        'source': 'arXiv:2602.23057, abstract, and notes on it',
    },
}
