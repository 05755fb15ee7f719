"""Attention that may attend to nothing costs nothing.

Paper:    arXiv:2309.17453, Efficient Streaming Language Models with Attention Sinks, and gpt-oss
Says:     A constant in the denominator of the softmax replaces the attention sink without loss of
          quality.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the two losses are within 0.03 nats of each other.
"""

PART = 'attention'
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
