"""Norm-aware linear attention is better than linear attention.

Paper:    arXiv:2506.21137, NaLaFormer
Says:     Features that keep the norm of the queries make linear attention sharper and better.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is lower than that of linear attention with elu + 1.
"""

from configs.claims import _shared

PART = 'attention'
CAUTION = (
    'Both arms have RoPE, which turns the numerator alone, and the convolution, LayerNorm and '
    'gate of the published layer are missing. Heads have 16 features instead of 32 to 96.'
)
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
    **_shared.BLOCKS_SETTINGS,
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.attention': 'nala'},
        'against': {'model.attention': 'linear'},
        'difference': (None, 0.0),
        'label': 'loss difference, norm-aware attention minus linear attention (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
NUISANCES = _shared.BLOCKS_NUISANCES
FIDELITY = {
    'norm-aware attention': {
        'setting': (
            'features relu(q / |q|)^p and relu(-q / |q|)^p with p = 3 (1/2 + tanh |q|), and of '
            'k^3; causal, four heads of 16; without the convolution of the values, the LayerNorm '
            'and the SiLU gate behind the attention'
        ),
        'published': (
            'the same features; images, no mask, heads of 32 to 96, with convolutions, LayerNorm '
            'and SiLU gate; softmax attention in the last two of four stages; 300 epochs of '
            'AdamW, decay 0.05, cosine'
        ),
        'source': (
            'arXiv:2506.21137; github.com/ZacharyMeng/NaLaFormer, NaLaformer/NALA.py and main.py'
        ),
    },
    'linear attention': {
        'setting': 'elu + 1 with the same RoPE in the numerator alone, at its own rate',
        'published': 'other linear attentions for images; their settings are not known here',
        'source': 'arXiv:2506.21137, abstract',
    },
}
