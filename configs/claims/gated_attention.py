"""An output gate on attention lowers the loss.

Paper:    arXiv:2505.06708, Gated Attention for Large Language Models
Says:     An elementwise sigmoid gate on the output of the attention heads lowers the loss.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is lower than with plain attention.
"""

from configs.claims import _shared

PART = 'attention'
CAUTION = 'The gated arm has 6% more parameters, which alone may lower the loss.'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'attention.gate': 'elementwise'},
        'difference': (None, 0.0),
        'label': 'loss difference, gated attention minus plain attention (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
FIDELITY = {
    'gated attention': {
        'setting': (
            'sigmoid gate for each feature of each head, from the normalised input of the layer '
            'by a matrix without bias, which adds 6% parameters'
        ),
        'published': (
            'the same gate, as extra columns of the query matrix; Qwen3 models with query-key '
            'norms, 1.7 billion parameters dense or 15 billion with experts, up to 3.5 trillion '
            'tokens'
        ),
        'source': (
            'arXiv:2505.06708, abstract; github.com/qiuzh20/gated_attention, modeling_qwen3.py '
            'and README.md'
        ),
    },
    'plain attention': {
        'setting': (
            'RMSNorm in pre-norm, RoPE, GELU, four heads of 16 features, no query-key norms; '
            'AdamW with betas 0.9 and 0.95 and decay 0.1, 20 steps of warm-up, cosine to 0 at '
            'step 200, 8 rows of 128 tokens; each arm has its own tuned rate'
        ),
        'published': (
            'the same Qwen3 models without gate, but with query-key norms; rates and batches are '
            'not known here'
        ),
        'source': 'arXiv:2505.06708; github.com/qiuzh20/gated_attention, README.md',
    },
}
