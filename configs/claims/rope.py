"""RoPE is better than learned positions.

Paper:    arXiv:2104.09864, RoFormer
Says:     rotating queries and keys by position converges faster than adding embeddings of
          positions.
Here:     0.26 million parameters, 0.2 million tokens of Python sources, in 200 steps; four layers,
          embeddings that start at a deviation of 1, every variant at its own learning rate; the
          paper trains larger models for far longer.
Counts:   the loss of learned positions is higher than RoPE's.
"""

PART = 'attention'
WITHDRAWN = (
    'The baseline is not the published one: its learned positions started at a deviation of 1, '
    'as random vectors that 200 steps hardly move; published models start near 0.02.'
)
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = ({'study': 'blocks', 'arm': {'model.position': 'learned'}, 'difference': (0.0, None)},)
