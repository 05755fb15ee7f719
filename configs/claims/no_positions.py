"""A causal model without positions is as good as one with RoPE.

Paper:    arXiv:2305.19466, The Impact of Positional Encoding on Length Generalization
Says:     The causal mask reveals positions, so models without position encoding do as well.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer. The paper is about rows longer than those
          of training, which are not tested here.
Counts:   the loss is at most 0.03 nats above that of RoPE.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.position': 'none'},
        'difference': (None, 0.03),
        'label': 'loss difference, no position encoding minus RoPE (nats per token)',
    },
)
