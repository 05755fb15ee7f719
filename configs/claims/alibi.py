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

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.position': 'alibi'},
        'difference': (None, 0.03),
        'label': 'loss difference, ALiBi minus RoPE (nats per token)',
    },
)
