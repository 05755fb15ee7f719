"""Pre-norm needs no warm-up.

Paper:    arXiv:2002.04745, On Layer Normalization in the Transformer Architecture
Says:     With pre-norm the warm-up can be left out.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the loss without a warm-up is at most 0.03 nats above that with a warm-up of 20 of 200
          steps.
"""

from configs.claims import _shared

PART = 'recipes'
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
    **_shared.RECIPES_SETTINGS,
}
HOLDS = (
    {
        'study': 'recipes',
        'arm': {'optim.warmup_steps': 0},
        'difference': (None, 0.03),
        'label': 'loss difference, no warm-up minus warm-up of 20 steps (nats per token)',
    },
)
CONTROL = _shared.RECIPES_CONTROL
NUISANCES = _shared.RECIPES_NUISANCES
FIDELITY = {
    'no warm-up': {
        'setting': (
            'cosine to 0 from the first of 200 steps, rate tuned for each arm; RMSNorm, '
            'embeddings of deviation 1, AdamW with betas 0.9 and 0.95, gradients clipped at 1'
        ),
        'published': (
            'LayerNorm, translation and BERT models, far longer training; rates, betas and '
            'schedules are not known here'
        ),
        'source': 'arXiv:2002.04745, abstract',
    },
    'warm-up': {
        'setting': '20 of the 200 steps, a tenth of the run, otherwise the same',
        'published': 'a linear warm-up; its length is not known here',
        'source': 'arXiv:2002.04745, abstract',
    },
}
