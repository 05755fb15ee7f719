"""A z-loss of 1e-4 costs nothing.

Paper:    arXiv:2204.02311, PaLM
Says:     An auxiliary loss of 1e-4 (log Z)^2 keeps the logarithm of the normaliser near 0, which
          makes training more stable. Whether it costs anything is our question.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the losses with and without z-loss are within 0.03 nats of each other.
"""

from configs.claims import _shared

PART = 'losses'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
    'twins': 'configs/studies/twins.py:recipes',
    **_shared.RECIPES_SETTINGS,
}
HOLDS = (
    {
        'study': 'recipes',
        'arm': {'loss.z_loss': 0.0},
        'difference': (-0.03, 0.03),
        'label': 'loss difference, no z-loss minus z-loss of 1e-4 (nats per token)',
    },
)
CONTROL = _shared.RECIPES_CONTROL
TWIN = (
    {
        'study': 'twins',
        'arm': {'loss.z_loss': 0.0},
        'against': {'loss.z_loss': 1.0},
        'difference': (-0.03, 0.03),
        'label': (
            'loss difference, no z-loss minus z-loss without the factor of 1e-4 (nats per token)'
        ),
    },
)
NUISANCES = _shared.RECIPES_NUISANCES
FIDELITY = {
    'z-loss': {
        'setting': (
            '1e-4 times (log Z)^2 in the mean loss of a token; AdamW with betas 0.9 and 0.95, '
            'decay 0.1, gradients clipped at 1, a warm-up of 20 of 200 steps and a cosine to 0, '
            'batches of 8 x 128 tokens; rate tuned'
        ),
        'published': (
            '1e-4 times (log Z)^2; Adafactor at 1e-2, batches of 1 to 4 million tokens, 255,000 '
            'steps, up to 540 billion parameters, tied embeddings'
        ),
        'source': 'arXiv:2204.02311, section 5',
    },
    'no z-loss': {
        'setting': (
            'the same training, at a tuned rate of its own; 200 steps are too few for log Z to '
            'drift'
        ),
        'published': 'no run without z-loss is known here',
        'source': 'arXiv:2204.02311, section 5',
    },
}
