"""Post-norm in the first layers and pre-norm in the rest is better than pre-norm.

Paper:    arXiv:2412.13795, Mix-LN: Unleashing the Power of Deeper Layers by Combining Pre-LN and
          Post-LN
Says:     Post-norm in the early layers lets the deep layers learn, which lowers the loss.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains deeper models for far longer.
Counts:   the loss is lower than that of pre-norm.
"""

from configs.claims import _shared

PART = 'placements'
CAUTION = _shared.SMALL_START_CAUTION
STUDIES = {
    'norms': 'configs/studies/norms_tuned.py',
    **_shared.NORMS_SETTINGS,
}
HOLDS = (
    {
        'study': 'norms',
        'arm': {'model.norm': 'rmsnorm', 'model.placement': 'mix'},
        'difference': (None, 0.0),
        'label': 'loss difference, Mix-LN minus pre-norm (nats per token)',
    },
)
CONTROL = _shared.NORMS_CONTROL
TWIN = _shared.NO_NORM_TWIN
NUISANCES = _shared.NORMS_NUISANCES
FIDELITY = {
    'Mix-LN': {
        'setting': (
            'post-norm in the first of 4 blocks, pre-norm in the others, a final norm; embeddings '
            'with a standard deviation of 1; its own tuned rate'
        ),
        'published': (
            'post-norm in the first quarter (3 of 12 or 6 of 24 blocks); RMSNorm, Adam without '
            'decay at 0.001, 512 x 256 tokens per step, warm-up of 1,000 of 10,000 steps and '
            'cosine to a tenth (71 million parameters), initial deviations of 0.63 (embeddings) '
            'and 0.02 (matrices); gradients not clipped'
        ),
        'source': (
            'arXiv:2412.13795; pixeli99/MixLN, README.md, scripts/run_71m.sh and '
            'peft_pretraining/modeling_llama.py'
        ),
    },
    'pre-norm': {
        'setting': (
            'RMSNorm with a final norm, AdamW with betas 0.9 and 0.95 and decay 0.1, its own tuned '
            'rate, warm-up of 20 of 200 steps and cosine to 0, initial deviations of 1 '
            '(embeddings) and 1 / sqrt(fan_in) (matrices); gradients clipped at 1, as with Mix-LN'
        ),
        'published': (
            'RMSNorm, Adam without decay at 0.001, 512 x 256 tokens per step, warm-up of 1,000 of '
            '10,000 steps and cosine to a tenth (71 million parameters), initial deviations of '
            '0.63 (embeddings) and 0.02 (matrices); gradients clipped at 1 in the example, not in '
            'the scripts'
        ),
        'source': 'pixeli99/MixLN, README.md, scripts/run_71m.sh and torchrun_main.py',
    },
}
