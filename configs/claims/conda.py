"""Conda reaches a lower loss than AdamW.

Paper:    arXiv:2509.24218, Conda: Column-Normalized Adam for Training Large Language Models Faster
Says:     Adam in a rotated space, with one scale per column, trains LLaMA models 2 to 2.5 times as
          fast as AdamW, in steps and in time.
Here:     A model with 0.26 million parameters is trained for 400 steps on 0.4 million tokens of
          Python source code, with embeddings initialised at a standard deviation of 1. Each
          optimizer updates the hidden matrices at its own tuned learning rate, and AdamW at 0.01
          the rest; the baseline is AdamW with one tuned rate for all. The paper's models are at
          least 100 times as large and see at least 500 times as many tokens. Testing the speed-up
          itself would need several training lengths of the baseline, which this study does not
          have.
Counts:   the loss is lower than that of AdamW, which the speed-up requires.
"""

from configs.claims import _shared

PART = 'optimizers'
STUDIES = {
    'both': 'configs/studies/optimizers_and_schedules.py',
}
HOLDS = (
    {
        'study': 'both',
        'arm': {'optim.name': 'conda', 'optim.conda_every': 20},
        'difference': (None, 0.0),
        'label': 'loss difference, Conda minus AdamW (nats per token)',
    },
)
CONTROL = _shared.CONSTANT_RATE_CONTROL
TWIN = _shared.LOST_UPDATES_TWIN
FIDELITY = {
    'Conda': {
        'setting': (
            'b1 0.9, b2 0.99, eps 1e-8, factor 0.25; singular vectors every 20 of 400 steps; '
            'hidden matrices only, tuned rate; decay, clipping, schedule and batch are those of '
            'AdamW here'
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
        'setting': _shared.ONE_RATE_SETTING,
        'published': (
            'betas 0.9 and 0.999, no decay, rate 0.001 for all parameters at 60 million; '
            'schedule and batch as for Conda'
        ),
        'source': 'github.com/jie040109/Conda, examples/llama/scripts/llama_60m_adamw.sh',
    },
}
