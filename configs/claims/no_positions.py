"""A causal model without positions is as good as one with RoPE.

Paper:    arXiv:2305.19466, The Impact of Positional Encoding on Length Generalization
Says:     causal masks tell positions, so that models without any encoding do as well.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer. The paper is about longer rows than those of
          training, which are not read.
Counts:   the loss is at most 0.03 nats above RoPE's.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = ({'study': 'blocks', 'arm': {'model.position': 'none'}, 'difference': (None, 0.03)},)
