"""An output gate on attention lowers the loss.

Paper:    arXiv:2505.06708, Gated Attention for Large Language Models
Says:     An elementwise sigmoid gate on the output of the attention heads lowers the loss.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is lower than with plain attention.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'attention.gate': 'elementwise'},
        'difference': (None, 0.0),
        'label': 'loss difference, gated attention minus plain attention (nats per token)',
    },
)
