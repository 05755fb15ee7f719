"""Attention that may attend to nothing costs nothing.

Paper:    arXiv:2309.17453, Efficient Streaming Language Models with Attention Sinks, and gpt-oss
Says:     a constant in the denominator of softmax takes the place of a sink, without loss of
          quality.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the losses are within 0.03 nats of each other.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {'study': 'blocks', 'arm': {'attention.sinks': 'off_by_one'}, 'difference': (-0.03, 0.03)},
)
