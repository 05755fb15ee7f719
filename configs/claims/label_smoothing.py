"""Label smoothing worsens the likelihood.

Paper:    arXiv:1706.03762
Says:     A smoothing of 0.1 hurts perplexity, as the model learns to be less certain.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   cross-entropy is at least 0.03 nats higher than without smoothing.
"""

from configs.claims import _shared

PART = 'losses'
STUDIES = {
    'equations': 'configs/studies/twins.py:equations',
    **_shared.RECIPES_SETTINGS,
}
HOLDS = (
    {
        'study': 'equations',
        'arm': {'loss.label_smoothing': 0.1},
        'difference': (0.03, None),
        'label': 'cross-entropy with smoothing of 0.1 minus that without (nats per token)',
    },
)
CONTROL = (
    {
        'study': 'equations',
        'arm': {'model.activation': 'elu'},
        'difference': (0.03, None),
        'label': 'loss difference, ELU minus GELU (nats per token)',
    },
)
TWIN = (
    {
        'study': 'equations',
        'arm': {'loss.label_smoothing': 0.001},
        'difference': (0.03, None),
        'label': (
            'cross-entropy with smoothing of 0.001, a tenth of a percent, minus that without '
            '(nats per token)'
        ),
    },
)
NUISANCES = (
    _shared.START | {'studies': {'equations': 'recipes_start'}},
    _shared.TEXT | {'studies': {'equations': 'recipes_text'}},
)
FIDELITY = {
    'label smoothing': {
        'setting': (
            '0.1 of the target spread over 512 tokens, beside a z-loss of 1e-4; AdamW with betas '
            '0.9 and 0.95, decay 0.1, gradients clipped at 1, a warm-up of 20 of 200 steps and a '
            'cosine to 0, batches of 8 x 128 tokens; rate tuned'
        ),
        'published': (
            '0.1 over 37,000 tokens, with dropout 0.1; Adam with betas 0.9 and 0.98, 4,000 steps '
            'of warm-up, then 1 / sqrt(step), batches of about 25,000 tokens, 100,000 steps or '
            'more of translation'
        ),
        'source': 'arXiv:1706.03762, sections 5.1 to 5.4',
    },
    'cross-entropy': {
        'setting': 'no smoothing, the same z-loss and training',
        'published': 'no smoothing; whether anything else was changed is not known here',
        'source': 'arXiv:1706.03762, section 5.4',
    },
}
