"""A causal model without positions is as good as one with RoPE.

Paper:    arXiv:2305.19466, The Impact of Positional Encoding on Length Generalization
Says:     The causal mask reveals positions, so models without position encoding do as well.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer. The paper is about rows longer than those
          of training, which are not tested here.
Counts:   the loss is at most 0.03 nats above that of RoPE.
"""

from configs.claims import _shared

PART = 'attention'
CAUTION = (
    'Rows begin in the middle of a text, without a first token that marks the start, on which '
    "the paper's argument about positions relies. The paper tests longer rows than those of "
    'training.'
)
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
    **_shared.BLOCKS_SETTINGS,
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.position': 'none'},
        'difference': (None, 0.03),
        'label': 'loss difference, no position encoding minus RoPE (nats per token)',
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
NUISANCES = _shared.BLOCKS_NUISANCES
FIDELITY = {
    'no position encoding': {
        'setting': (
            'causal mask only; rows are cut from the text at any place, without a token that '
            'marks their start; judged by the loss on code at the length of training, 128 tokens'
        ),
        'published': (
            'decoder of about 107 million parameters on tasks such as addition and copying, '
            'lengths up to 20 in training and 40 in tests, exact matches; AdamW at 3e-5, decay '
            '0.05, 40,000 steps of 64 rows'
        ),
        'source': (
            'arXiv:2305.19466; github.com/McGill-NLP/length-generalization, '
            'configs/trainer/base_model.jsonnet and configs/models/pe_none.jsonnet'
        ),
    },
    'RoPE': {
        'setting': (
            'base 10,000, all 16 features of a head; AdamW with betas 0.9 and 0.95 and decay 0.1, '
            '20 steps of warm-up, cosine to 0 at step 200, 8 rows of 128 tokens; each arm has its '
            'own tuned rate'
        ),
        'published': (
            'trained as the model without positions, beside ALiBi, T5 biases and sinusoidal '
            'positions'
        ),
        'source': 'arXiv:2305.19466; github.com/McGill-NLP/length-generalization, configs/models',
    },
}
