"""Attention that may attend to nothing costs nothing.

Paper:    arXiv:2309.17453, Efficient Streaming Language Models with Attention Sinks, and gpt-oss
Says:     A constant in the denominator of the softmax ("Zero Sink") removes the attention sink in
          part only: the model still uses other first tokens as sinks. A learned sink is better. We
          ask whether the constant costs anything.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the two losses are within 0.03 nats of each other.
"""

from configs.claims import _shared

PART = 'attention'
CAUTION = (
    'Models of this size have no attention sinks (configs/studies/results/attention_options.md), '
    'so that there is nothing for the method to replace.'
)
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'attention.sinks': 'off_by_one'},
        'difference': (-0.03, 0.03),
        'label': 'loss difference, off-by-one softmax minus plain softmax (nats per token)',
    },
)
CONTROL = _shared.BLOCKS_CONTROL
FIDELITY = {
    'off-by-one softmax': {
        'setting': (
            'a fixed logit of 0 in the denominator in all layers; sinks do not appear in the 200 '
            'steps, so there is none to replace'
        ),
        'published': (
            'the same constant, called Zero Sink, in a model trained on the Pile; their own choice '
            'is a learned token as sink; gpt-oss has a learned logit for each head that starts at '
            'a deviation of 0.02; sizes and rates are not known here'
        ),
        'source': (
            'arXiv:2309.17453, section 3.3 and table 3; gpt-oss in Hugging Face transformers, '
            'models/gpt_oss/modular_gpt_oss.py'
        ),
    },
    'plain softmax': {
        'setting': (
            'RMSNorm in pre-norm, RoPE, GELU, four heads of 16 features, no query-key norms; '
            'AdamW with betas 0.9 and 0.95 and decay 0.1, 20 steps of warm-up, cosine to 0 at '
            'step 200, 8 rows of 128 tokens; each arm has its own tuned rate'
        ),
        'published': 'plain softmax, trained on the same text; the rest is not known here',
        'source': 'arXiv:2309.17453',
    },
}
