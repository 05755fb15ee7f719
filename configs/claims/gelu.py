"""GELU reaches a lower loss than ReLU and ELU.

Paper:    arXiv:1606.08415, Gaussian Error Linear Units
Says:     weighing inputs by their value improves over ReLU and ELU in all tasks tried.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   ReLU's and ELU's losses are higher than GELU's.
"""

PART = 'activations'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {'study': 'blocks', 'arm': {'model.activation': 'relu'}, 'difference': (0.0, None)},
    {'study': 'blocks', 'arm': {'model.activation': 'elu'}, 'difference': (0.0, None)},
)
