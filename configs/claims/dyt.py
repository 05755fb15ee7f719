"""Dynamic Tanh replaces a norm.

Paper:    arXiv:2503.10622, Transformers without Normalization
Says:     An elementwise tanh with a learned scale matches RMSNorm in transformers, including
          language models.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is at most 0.03 nats above that of RMSNorm.
"""

from configs.claims import _shared

PART = 'norms'
CAUTION = (
    'Embeddings start at a deviation of 1 and are multiplied by 8, so that the first tanh '
    "starts saturated. The authors' start at 1.3."
)
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'dyt', 'model.placement': 'pre'},
        'difference': (None, 0.03),
        'label': 'loss difference, Dynamic Tanh minus RMSNorm (nats per token)',
    },
)
CONTROL = _shared.NORMS_CONTROL
TWIN = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'none', 'model.placement': 'pre'},
        'difference': (None, 0.03),
        'label': (
            'loss difference, no norm, and thus no tanh, slope, gain or factor of the embeddings, '
            'minus RMSNorm (nats per token)'
        ),
    },
)
FIDELITY = {
    'Dynamic Tanh': {
        'setting': (
            'all slopes start at 0.5, no bias, gains and slopes without decay; a learned factor of '
            '8 multiplies embeddings that already have a standard deviation of 1, so the first '
            'tanh starts near saturation'
        ),
        'published': (
            'LLaMA: slopes start at 0.8 before attention and 0.2 elsewhere (7B), tuned by width; a '
            'learned factor of sqrt(width) multiplies embeddings with a deviation of 0.02, which '
            'gives 1.3; decay 0.1 of all parameters, the same rate as RMSNorm (0.0003), 200 '
            'billion tokens'
        ),
        'source': (
            'arXiv:2503.10622, appendix A and table 10; jiachenzhu/DyT, '
            'other_tasks/LLaMA/README.md, main_training_llama.py and fms_fsdp/models/llama.py'
        ),
    },
    'RMSNorm': {
        'setting': (
            'eps 1e-6, AdamW with betas 0.9 and 0.95 and decay 0.1 of matrices and embeddings, its '
            'own tuned rate, warm-up of 20 of 200 steps and cosine to 0, 8 x 128 tokens per step; '
            'no factor of the embeddings'
        ),
        'published': (
            'AdamW with betas 0.9 and 0.95, decay 0.1, rate 0.0003, gradients clipped at 1, '
            'sequences of 4,096 tokens'
        ),
        'source': (
            'jiachenzhu/DyT, other_tasks/LLaMA/main_training_llama.py and '
            'fms_fsdp/config/training.py'
        ),
    },
}
