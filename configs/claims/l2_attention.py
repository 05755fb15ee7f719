"""Attention scores from distances are as good as dot products.

Paper:    arXiv:2504.12588, Plain Transformers Can be Powerful Graph Learners
Says:     Attention by distances between queries and keys measures how close their magnitudes are,
          which dot products lose. Whether it is as good for text is our question.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above that of dot-product attention.
"""

from configs.claims import _shared

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
    'equations': 'configs/studies/twins.py:equations',
    **_shared.BLOCKS_SETTINGS,
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.attention': 'l2'},
        'difference': (None, 0.03),
        'label': 'loss difference, L2 attention minus dot-product attention (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
TWIN = (
    {
        'study': 'equations',
        'arm': {'model.attention': 'l2'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, L2 attention whose queries and keys are not rotated minus '
            'dot-product attention (nats per token)'
        ),
    },
)
NUISANCES = _shared.BLOCKS_NUISANCES
FIDELITY = {
    'L2 attention': {
        'setting': (
            'scores (q k - |k|^2 / 2) / sqrt(16) with a causal mask and RoPE; without the learned '
            'biases and factors of pairs, and with RMSNorm'
        ),
        'published': (
            'a learned bias before and a learned factor after the softmax for each pair of nodes, '
            'AdaRMSNorm, no mask; the code divides only |k|^2 / 2 by sqrt(H); on ZINC 12 layers '
            'of width 64, 8 heads, AdamW at 0.002, decay 1e-5, attention dropout 0.2, 2,500 '
            'epochs'
        ),
        'source': (
            'arXiv:2504.12588; github.com/LiamMa/PPGT, ppgt/layer/ppgt.py and '
            'configs/zinc-PPGT.yaml'
        ),
    },
    'dot-product attention': {
        'setting': (
            'RMSNorm in pre-norm, RoPE, GELU, four heads of 16 features, no query-key norms; '
            'AdamW with betas 0.9 and 0.95 and decay 0.1, 20 steps of warm-up, cosine to 0 at '
            'step 200, 8 rows of 128 tokens; each arm has its own tuned rate'
        ),
        'published': (
            'their code can leave the term in |k|^2 out; how they train such a model is not known '
            'here'
        ),
        'source': 'github.com/LiamMa/PPGT, ppgt/layer/ppgt.py',
    },
}
