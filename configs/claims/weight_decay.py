"""Weight decay of 0.1 changes the loss by less than 0.03 nats in 200 steps.

Paper:    arXiv:2310.04415, Why Do We Need Weight Decay in Modern Deep Learning?
Says:     In training that sees its text once, weight decay does not regularise; it changes the
          effective learning rate, and so lowers the training loss.
Here:     A 4-layer model with 0.26 million parameters is trained for 200 steps on 0.2 million
          tokens of Python source code, with embeddings initialised at a standard deviation of 1.
          The paper trains larger models for far longer.
Counts:   the losses with and without weight decay are within 0.03 nats of each other, each at its
          own learning rate.
"""

from configs.claims import _shared

PART = 'recipes'
CAUTION = (
    'This is not the statement of the paper, that decay lowers the loss, for which the run is too '
    'short: at a rate of 0.02 its time constant is 500 steps, and there are 200. The difference is '
    'small, but it has the sign of the paper, and its interval excludes 0.'
)
STUDIES = {
    'recipes': 'configs/studies/recipes_tuned.py',
    'twins': 'configs/studies/twins.py:recipes',
    **_shared.RECIPES_SETTINGS,
}
HOLDS = (
    {
        'study': 'recipes',
        'arm': {'optim.weight_decay': 0.0},
        'difference': (-0.03, 0.03),
        'label': 'loss difference, no weight decay minus weight decay of 0.1 (nats per token)',
    },
)
CONTROL = _shared.RECIPES_CONTROL
TWIN = (
    {
        'study': 'twins',
        'arm': {'optim.weight_decay': 0.0},
        'against': {'optim.decay_rule': 'independent'},
        'difference': (-0.03, 0.03),
        'label': (
            'loss difference, no weight decay minus weight decay without the factor of the '
            'learning rate (nats per token)'
        ),
    },
)
NUISANCES = _shared.RECIPES_NUISANCES
FIDELITY = {
    'weight decay of 0.1': {
        'setting': (
            'decoupled, rate times 0.1, on matrices and embeddings; at the best rate of 0.02 the '
            'decay time is 500 steps or more, longer than the 200 steps of the run, so that it '
            'can do little'
        ),
        'published': (
            'rate times 0.1 or 0.3 on matrices and embeddings; GPT-2 small, rows of 256, batches '
            'of 256, rate 6e-4 with cosine to 6e-5, 50,000 steps: three times the decay time of a '
            'decay of 0.1'
        ),
        'source': (
            'arXiv:2310.04415; github.com/tml-epfl/why-weight-decay, README.md and '
            'large_language_models/train.py'
        ),
    },
    'no weight decay': {
        'setting': 'the same, at its own tuned rate',
        'published': (
            'the same rate of 6e-4 for all decays; the training loss without decay is higher'
        ),
        'source': 'arXiv:2310.04415, abstract; github.com/tml-epfl/why-weight-decay, README.md',
    },
}
