"""Which rule predicts the best learning rate of AdamW at another batch size?

Question: after the learning rate is tuned at batches of 512 tokens, which rule comes nearest to the
          rate that is best at batches of 2,048 and 8,192 tokens, over as many tokens: the square
          root of the batch, with or without Adam's b2 and eps (sde), or the same rate with another
          b2, eps and weight decay (sdew)?
Command:  uv run train.py --config=configs/studies/batch_rules.py --workdir=runs/batch_rules
          uv run python -m eval.rules --workdir=runs/batch_rules
Cost:     15 runs of 0.26 million parameters for each of seven arms.
Result:   at four times the batch each rule is within the rates that are as good as the tuned one;
          at 16 times the square root is 1.75 octaves too high, and the unchanged rate is right:
          configs/studies/results/batch_rules.md

Each run sees 0.2 million tokens: 400, 100 or 25 steps. The rules are those of
`modules.scaling.transfer`.
"""

from ml_collections import ConfigDict

from configs.studies import small

ROWS, STEPS, WARMUP = 4, 400, 20
LR, WEIGHT_DECAY, B2, EPS = 1e-2, 0.1, 0.99, 1e-8  # at the smallest batch
RATIOS = (4, 16)


def rule_settings(rule: str, ratio: int) -> dict[str, float]:
    """Returns the other settings of a rule: 'sqrt', 'sde' or 'sdew'."""
    root = ratio**0.5
    return {
        'sqrt': {},
        'sde': {'optim.b2': round(1 - (1 - B2) * ratio, 6), 'optim.eps': EPS / root},
        'sdew': {
            'optim.b2': round(1 - (1 - B2) * root, 6),
            'optim.eps': EPS / root,
            'optim.weight_decay': WEIGHT_DECAY * root,
        },
    }[rule]


def resize(ratio: int, rule: str = 'sqrt') -> dict[str, float]:
    """Returns an arm with `ratio` times the batch, over as many tokens."""
    return {
        'data.batch_size': ROWS * ratio,
        'train.steps': STEPS // ratio,
        'train.eval_every': STEPS // ratio,
        'optim.warmup_steps': WARMUP // ratio,
        'optim.lr': LR * ratio**0.5,
        **rule_settings(rule, ratio),
    }


def get_config() -> ConfigDict:
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.optim.weight_decay, config.optim.b2, config.optim.eps = WEIGHT_DECAY, B2, EPS
    rules = ('sqrt', 'sde', 'sdew')
    arms = (resize(1), *(resize(ratio, rule) for ratio in RATIOS for rule in rules))
    config.sweep = {'list': arms}
    config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 16}
    return config
