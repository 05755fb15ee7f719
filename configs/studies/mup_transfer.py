"""Does the best learning rate of a narrow model hold for a model eight times as wide?

Question: where is the best learning rate at each of four widths, under `standard`, muP's rates for
          linear layers alone (`mup_simple`), muP, and Muon with the spectral condition? Does it
          move by more than one grid step?
Command:  uv run train.py --config=configs/studies/mup_transfer.py --workdir=runs/mup_transfer
          uv run python -m eval.report --workdir=runs/mup_transfer --figures=figures
Cost:     336 runs of two blocks in sixteen programs, half an hour on two CPU cores.
Result:   the best rate of standard falls as 1 / width, by three steps; the others stay within one
          step: configs/studies/results/mup_transfer.md

Heads have width 16 at every model width, so wider models have more heads. The base model is the
narrowest. A grid step is a factor of two, so an optimum that falls as 1 / width moves by three
steps.
"""

from ml_collections import ConfigDict

from configs.studies import small

WIDTHS = (32, 64, 128, 256)
PARAMETRIZATIONS = (
    {'scaling.name': 'standard'},
    {'scaling.name': 'mup_simple', 'scaling.base_width': WIDTHS[0]},
    {'scaling.name': 'mup', 'scaling.base_width': WIDTHS[0]},
    {
        'scaling.name': 'spectral',
        'scaling.base_width': WIDTHS[0],
        'optim.name': 'muon',
        'optim.others_lr': 2.0**-6,
    },
)
LEARNING_RATES = tuple(2.0**power for power in range(-9, -2))


def at_width(width: int) -> dict[str, int]:
    heads = width // 16
    return {
        'model.d_model': width,
        'model.d_ff': 4 * width,
        'model.n_heads': heads,
        'model.n_kv_heads': heads,
    }


def get_config() -> ConfigDict:
    config = small.get_config()
    config.model.n_layers = 2
    config.data.seq_len = 64
    config.train.steps = 150
    config.train.eval_every = 150
    config.sweep = {
        'list': tuple(
            at_width(width) | parametrization
            for parametrization in PARAMETRIZATIONS
            for width in WIDTHS
        ),
        'optim.lr': LEARNING_RATES,
        'train.seed': (0, 1, 2),
    }
    return config
