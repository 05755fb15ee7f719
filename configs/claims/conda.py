"""Conda reaches a lower loss than AdamW.

Paper:    arXiv:2509.24218, Conda: Column-Normalized Adam for Training Large Language Models Faster
Says:     Adam in a rotated space, with one scale per column, trains LLaMA models 2 to 2.5 times as
          fast as AdamW, in steps and in time.
Here:     A model with 0.26 million parameters is trained for 200 steps on 0.2 million tokens of
          Python source code, and separately for 100 steps. Each optimizer updates the hidden
          matrices at its own tuned learning rate; AdamW updates embeddings, readout and vectors in
          every run. The paper's models are at least 100 times as large and see at least 1,000 times
          as many tokens. Testing the speed-up itself would need several training lengths of the
          baseline, which this study does not have.
Counts:   the loss is lower than that of AdamW at both lengths, which the speed-up requires.
"""

from configs.claims import _shared

PART = 'optimizers'
CAUTION = (
    'Singular vectors are renewed every 2,000 steps, so that those of the first gradient stay '
    'for all 200 steps; the authors renew them 5 to 50 times in a run.'
)
STUDIES = {
    'whole': 'configs/studies/optimizers_tuned.py',
    'half': 'configs/studies/optimizers_tuned.py:half',
    'twins': 'configs/studies/twins.py:still',
}
HOLDS = (
    {
        'study': 'whole',
        'arm': {'optim.name': 'conda'},
        'difference': (None, 0.0),
        'label': 'loss difference, Conda minus AdamW (nats per token, 200 steps)',
    },
    {
        'study': 'half',
        'arm': {'optim.name': 'conda'},
        'difference': (None, 0.0),
        'label': 'loss difference, Conda minus AdamW (nats per token, 100 steps)',
    },
)
CONTROL = _shared.OPTIMIZERS_CONTROL
TWIN = _shared.OPTIMIZERS_TWIN
FIDELITY = {
    'Conda': {
        'setting': (
            'b1 0.9, b2 0.99, eps 1e-8, factor 0.25; singular vectors every 2,000 steps, so '
            'that those of the first gradient stay for the whole run; hidden matrices only, '
            'tuned rate; decay, clipping, schedule and batch are those of AdamW here'
        ),
        'published': (
            'the same constants without decay or clipping, renewed 5 to 50 times in 10,000 to '
            '100,000 steps of 512 x 256 tokens; rate 0.01 for all parameters, warm-up for a '
            'tenth, cosine to a tenth'
        ),
        'source': (
            'github.com/jie040109/Conda, examples/llama/torchrun_main.py, '
            'scripts/llama_60m_conda.sh and llama_1b_conda.sh'
        ),
    },
    'AdamW': {
        'setting': _shared.ADAMW_SETTING,
        'published': (
            'betas 0.9 and 0.999, no decay, rate 0.001 for all parameters at 60 million; '
            'schedule and batch as for Conda'
        ),
        'source': 'github.com/jie040109/Conda, examples/llama/scripts/llama_60m_adamw.sh',
    },
}
