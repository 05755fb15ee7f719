"""SCALE is as good as Adam with less than half of its memory.

Paper:    arXiv:2506.16659, Minimalist Optimizer Design for LLM Pretraining
Says:     Gradients whose columns have equal norms, with momentum only in the last layer, reach the
          loss of Adam with 35 to 45% of the memory.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, with embeddings that start at a deviation of 1, and separately of
          1/8. SCALE updates all parameters, with one tuned rate, as AdamW does. Memory is not
          tested here. The paper's models are at least 100 times as large and see at least 1,000
          times as many tokens.
Counts:   the loss is at most 0.03 nats above that of AdamW at both starts.
"""

from configs.claims import _shared

PART = 'optimizers'
CAUTION = (
    'The result depends on the initial scale of the embeddings: SCALE is worse than AdamW at 1, '
    'and at least nearly as good at 1/8.'
)
STUDIES = {
    'unit': 'configs/studies/as_published.py:optimizers',
    'small_start': 'configs/studies/as_published.py:small_start',
}
HOLDS = (
    {
        'study': 'unit',
        'arm': {'optim.name': 'scale'},
        'difference': (None, 0.03),
        'label': ('loss difference, SCALE minus AdamW (nats per token, embeddings of deviation 1)'),
    },
    {
        'study': 'small_start',
        'arm': {'optim.name': 'scale'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, SCALE minus AdamW (nats per token, embeddings of deviation 1/8)'
        ),
    },
)
CONTROL = (
    {
        'study': 'unit',
        'arm': {'optim.schedule_free_beta': 0.1},
        'difference': (0.0, None),
        'label': (
            'loss difference, Schedule-Free AdamW with beta 0.1, close to a mean of all steps, '
            'minus AdamW (nats per token, embeddings of deviation 1)'
        ),
    },
)
TWIN = (
    {
        'study': 'unit',
        'arm': {'optim.name': 'sgd'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, SGD, i.e. SCALE without equal columns, momentum of the readout and '
            'Adam for vectors, minus AdamW (nats per token, embeddings of deviation 1)'
        ),
    },
)
FIDELITY = {
    'SCALE': {
        'setting': (
            'momentum 0.9 for the readout, columns of root mean square 1 for all matrices and '
            'embeddings, Adam at 20 times the rate for vectors; no decay or clipping, warm-up for '
            'a tenth of 200 steps, cosine to a tenth, 8 x 128 tokens; tuned rate'
        ),
        'published': (
            'the same at rate 0.001, with Adam at 5 to 20 times the rate for vectors, 11,000 '
            'steps of 512 x 256 tokens at 60 million parameters'
        ),
        'source': (
            'github.com/OptimAI-Lab/Minimalist_LLM_Pretraining, scripts/60m_scale.sh, '
            'mem_eff_pt/utils/args.py and mem_eff_pt/pt_scale/scale_optimizer.py'
        ),
    },
    'AdamW': {
        'setting': _shared.ONE_RATE_SETTING,
        'published': 'Adam; its settings are not known here',
        'source': 'arXiv:2506.16659',
    },
}
