"""Normalised queries and keys cost nothing.

Paper:    arXiv:2302.05442, Scaling Vision Transformers to 22 Billion Parameters
Says:     Normalising queries and keys keeps attention logits small and does not harm quality.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above that without query-key norms.
"""

from configs.claims import _shared

PART = 'attention'
CAUTION = (
    'Heads have 16 features here, and the norm is RMSNorm. The paper has LayerNorm, and needs '
    'it against a divergence of models of 8 billion parameters. At 800 steps the difference is '
    '+0.005 [-0.019, +0.029] nats: configs/studies/results/ladder.md.'
)
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.qk_norm': 'rmsnorm'},
        'difference': (None, 0.03),
        'label': 'loss difference, query-key norms minus no query-key norms (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
FIDELITY = {
    'query-key norms': {
        'setting': (
            'RMSNorm over the 16 features of each head before RoPE, with a learned gain that '
            'starts at 1 and is shared by all heads'
        ),
        'published': (
            'LayerNorm without bias, image classifiers with attention and MLP in parallel and '
            '22 billion parameters; to prevent the divergence of a model of 8 billion; rates '
            'and steps are not known here'
        ),
        'source': 'arXiv:2302.05442, model architecture',
    },
    'no query-key norms': {
        'setting': (
            'RMSNorm in pre-norm, RoPE, GELU, four heads of 16 features, no query-key norms; '
            'AdamW with betas 0.9 and 0.95 and decay 0.1, 20 steps of warm-up, cosine to 0 at '
            'step 200, 8 rows of 128 tokens; each arm has its own tuned rate'
        ),
        'published': 'models without the norms diverge near 8 billion parameters',
        'source': 'arXiv:2302.05442, model architecture',
    },
}
