"""Dividing each norm by the square root of its depth is better than pre-norm.

Paper:    arXiv:2502.05795, The Curse of Depth in Large Language Models
Says:     Dividing the output of each norm by the square root of its depth keeps the variance of
          deep layers small, which lowers the loss.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of pre-norm.
"""

from configs.claims import _shared

PART = 'placements'
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'layernorm_scaling'},
        'difference': (None, 0.0),
        'label': 'loss difference, LayerNorm Scaling minus pre-norm (nats per token)',
    },
)
CONTROL = _shared.NORMS_CONTROL
FIDELITY = {
    'LayerNorm Scaling': {
        'setting': (
            'each norm in block l times 1 / sqrt(l), l = 1 to 4, not the final norm; embeddings '
            'with a standard deviation of 1; its own tuned rate'
        ),
        'published': (
            'the same factor in both norms of each block, 12 to 32 blocks; RMSNorm, Adam without '
            'decay at 0.001, 512 x 256 tokens per step, warm-up of 2,000 of 20,000 steps and '
            'cosine to a tenth (130 million parameters), initial deviations of 0.02; the same rate '
            'as pre-norm'
        ),
        'source': (
            'arXiv:2502.05795; lmsdss/LayerNorm-Scaling, peft_pretraining/modeling_llama.py and '
            'run_130m.sh'
        ),
    },
    'pre-norm': {
        'setting': (
            'RMSNorm with a final norm, AdamW with betas 0.9 and 0.95 and decay 0.1, its own tuned '
            'rate, warm-up of 20 of 200 steps and cosine to 0, initial deviations of 1 '
            '(embeddings) and 1 / sqrt(fan_in) (matrices)'
        ),
        'published': (
            'RMSNorm, Adam without decay at 0.001, 512 x 256 tokens per step, warm-up of 2,000 of '
            '20,000 steps and cosine to a tenth (130 million parameters), initial deviations of '
            '0.02'
        ),
        'source': 'lmsdss/LayerNorm-Scaling, run_130m.sh and torchrun_main.py',
    },
}
