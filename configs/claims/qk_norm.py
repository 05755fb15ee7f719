"""Normalised queries and keys cost nothing.

Paper:    arXiv:2302.05442, Scaling Vision Transformers to 22 Billion Parameters
Says:     Normalising queries and keys keeps attention logits small and does not harm quality.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss is at most 0.03 nats above that without query-key norms.
"""

PART = 'attention'
STUDIES = {
    'blocks': 'configs/studies/blocks_tuned.py',
}
HOLDS = (
    {
        'study': 'blocks',
        'arm': {'model.qk_norm': 'rmsnorm'},
        'difference': (None, 0.03),
        'label': 'loss difference, query-key norms minus no query-key norms (nats per token)',
    },
)
