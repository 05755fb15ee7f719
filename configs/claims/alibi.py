"""ALiBi is as good as RoPE at the training length.

Paper:    arXiv:2108.12409, Train Short, Test Long
Says:     A bias that grows with distance matches other position encodings at the training length,
          and extrapolates to longer rows.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer. Rows longer than those of training are not
          tested.
Counts:   the loss is at most 0.03 nats above that of RoPE.
"""

from configs.claims import _shared

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
    **_shared.BLOCKS_SETTINGS,
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.position': 'alibi'},
        'difference': (None, 0.03),
        'label': 'loss difference, ALiBi minus RoPE (nats per token)',
    },
)
CONTROL = (
    {
        'study': 'blocks',
        'arm': {'model.attention': 'linear'},
        'difference': (0.03, None),
        'label': 'loss difference, linear attention minus softmax attention (nats per token)',
    },
)
TWIN = (
    {
        'study': 'blocks',
        'arm': {'model.position': 'none'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, ALiBi with slopes of 0, which is no position encoding, '
            'minus RoPE (nats per token)'
        ),
    },
)
NUISANCES = _shared.BLOCKS_NUISANCES
FIDELITY = {
    'ALiBi': {
        'setting': (
            'fixed slopes 1/4, 1/16, 1/64 and 1/256 and no other positions; otherwise as RoPE, at '
            'its own rate'
        ),
        'published': (
            'fixed slopes by the number of heads; WikiText-103, rows of 512 tokens and more, '
            '286,000 steps of Nesterov momentum with a cosine, gradients clipped at 0.1'
        ),
        'source': 'arXiv:2108.12409; github.com/ofirpress/attention_with_linear_biases, README.md',
    },
    'RoPE': {
        'setting': (
            'base 10,000, all 16 features of a head; AdamW with betas 0.9 and 0.95 and decay 0.1, '
            '20 steps of warm-up, cosine to 0 at step 200, 8 rows of 128 tokens; each arm has its '
            'own tuned rate'
        ),
        'published': (
            'one of the compared methods besides sinusoidal positions and T5 biases, trained as '
            'ALiBi; its constants are not known here'
        ),
        'source': 'arXiv:2108.12409, figure 1',
    },
}
