"""How do variants of attention change the loss, and the attention on the first token?

Question: with equal tokens and each at its best learning rate, how do sinks, gates, softcap,
          affine-scaled, L2 and linear attention compare with plain softmax attention? Which of them
          reduces the share of attention on the first token (arXiv:2601.22966)?
Command:  uv run train.py --config=configs/studies/attention_options.py --workdir=runs/attention
          uv run python -m eval.report --workdir=runs/attention --figures=figures
Cost:     90 runs of 0.26 million parameters, about twenty minutes on two CPU cores.
Result:   gates, affine scaling and elu + 1 learn faster, sinks and softcap change nothing, and no
          token is a sink at this scale: configs/studies/results/attention_options.md

Queries and keys are not normalized, as that would hide some effects. Every cell sees the
same text in the same order.
"""

from ml_collections import ConfigDict

from configs.studies import small

VARIANTS = (
    {'model.attention': 'softmax'},
    {'model.attention': 'softmax', 'attention.sinks': 'off_by_one'},
    {'model.attention': 'softmax', 'attention.sinks': 'learned'},
    {'model.attention': 'softmax', 'attention.gate': 'headwise'},
    {'model.attention': 'softmax', 'attention.gate': 'elementwise'},
    {'model.attention': 'softmax', 'attention.softcap': 50.0},
    {'model.attention': 'softmax', 'attention.affine_scaled': True},
    {'model.attention': 'l2'},
    {'model.attention': 'linear'},
    {'model.attention': 'nala'},
)
LEARNING_RATES = (3e-3, 1e-2, 3e-2)


def get_config() -> ConfigDict:
    config = small.get_config()
    config.train.diagnose_every = 100
    config.sweep = {
        'list': VARIANTS,
        'optim.lr': LEARNING_RATES,
        'train.seed': (0, 1, 2),
    }
    return config
