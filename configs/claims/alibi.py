"""ALiBi is as good as RoPE at the length of training.

Paper:    arXiv:2108.12409, Train Short, Test Long
Says:     biases that grow with distance match other positions at the length of training, and
          extrapolate.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer. Longer rows are not read.
Counts:   the loss is at most 0.03 nats above RoPE's.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = ({'study': 'blocks', 'arm': {'model.position': 'alibi'}, 'difference': (None, 0.03)},)
