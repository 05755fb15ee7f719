"""SCALE is as good as Adam with less than half of its memory.

Paper:    arXiv:2506.16659, Minimalist Optimizer Design for LLM Pretraining
Says:     Gradients whose columns have equal norms, with momentum only in the last layer, reach the
          loss of Adam with 35 to 45% of the memory.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, and separately for 100 steps. Each optimizer updates the hidden
          matrices at its own tuned learning rate; AdamW updates embeddings, readout and vectors in
          every run. The paper's models are at least 100 times as large and see at least 1,000 times
          as many tokens.
Counts:   the loss is at most 0.03 nats above that of AdamW at both lengths.
"""

from configs.claims import _shared

PART = 'optimizers'
WITHDRAWN = (
    'The arm was not SCALE, which keeps its momentum on the readout: here AdamW trained the '
    'readout and the embeddings.'
)
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
}
HOLDS = (
    {
        'study': 'whole',
        'arm': {'optim.name': 'scale'},
        'difference': (None, 0.03),
        'label': 'loss difference, SCALE minus AdamW (nats per token, 200 steps)',
    },
    {
        'study': 'half',
        'arm': {'optim.name': 'scale'},
        'difference': (None, 0.03),
        'label': 'loss difference, SCALE minus AdamW (nats per token, 100 steps)',
    },
)
CONTROL = _shared.OPTIMIZERS_CONTROL
FIDELITY = {
    'SCALE': {
        'setting': (
            'not SCALE: hidden matrices without momentum, columns of root mean square 1, tuned '
            'rate; AdamW at 0.01 for readout, embeddings and vectors; decay, clipping, '
            'schedule and batch are those of AdamW here'
        ),
        'published': (
            'momentum 0.9 for the readout, columns of root mean square 1 for all matrices and '
            'embeddings, Adam for vectors; rate 0.001, no decay or clipping, cosine to a '
            'tenth, 11,000 steps of 512 x 256 tokens at 60 million parameters'
        ),
        'source': (
            'github.com/OptimAI-Lab/Minimalist_LLM_Pretraining, scripts/60m_scale.sh, '
            'mem_eff_pt/utils/args.py and mem_eff_pt/pt_scale/scale_optimizer.py'
        ),
    },
    'AdamW': {
        'setting': _shared.ADAMW_SETTING,
        'published': 'Adam; its settings are not known here',
        'source': 'arXiv:2506.16659',
    },
}
