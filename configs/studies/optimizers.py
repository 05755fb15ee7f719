"""Which direction of the hidden matrices learns fastest, if all updates are equally large?

Question: with one AdamW for embeddings, readout and vectors, and updates of hidden matrices with a
          root mean square of 0.2 times the learning rate, how do optimizers compare in the best
          loss, in its spread over learning rates, in memory and in time? optimizers.py:equal_time
          trains each at its best rate for the time of 200 steps of AdamW.
Command:  uv run train.py --config=configs/studies/optimizers.py --workdir=runs/optimizers
          uv run train.py --config=configs/studies/optimizers.py:equal_time --workdir=runs/timed
          uv run python -m eval.report --workdir=runs/optimizers --figures=figures
Cost:     210 runs of 0.26 million parameters in fourteen programs, one hour on two shared CPU
          cores.
Result:   Muon, ARO and SOAP are 0.2 to 0.3 nats better than AdamW, columns of equal size 0.14 at a
          quarter of its state: configs/studies/results/optimizers.md

0.2 is about the root mean square of AdamW's updates, so its results hardly change (the protocol of
arXiv:2502.16982 and arXiv:2602.09006). Every cell sees the same text in the same order. Learning
rates apply only to the hidden matrices: other parameters have 1e-2 in all cells.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies._variants import choose

OPTIMIZERS: tuple[dict, ...] = (
    {'optim.name': 'adamw'},
    {'optim.name': 'adafactor'},
    {'optim.name': 'adamp'},
    {'optim.name': 'lion'},
    {'optim.name': 'sgd'},
    {'optim.name': 'scale'},
    {'optim.name': 'muon'},
    {'optim.name': 'auon'},
    {'optim.name': 'soap'},
    {
        'optim.name': 'shampoo',
        'optim.shampoo_every': 10,
    },  # published with 1, which takes ten times as long
    {'optim.name': 'conda'},
    {'optim.name': 'aro'},
    {'optim.name': 'galore'},
    {'optim.name': 'apollo'},
)
LEARNING_RATES = (1e-3, 3e-3, 1e-2, 3e-2, 1e-1)
# Best rates of the sweep, and milliseconds per step: `tests.bench.optim --shapes=study --rounds=5`,
# the lower of two means, since at this size means can differ by a third.
BEST_LR_AND_MS = {
    'adamw': (3e-3, 38.0),
    'adafactor': (1e-2, 36.9),
    'adamp': (3e-3, 37.7),
    'lion': (1e-3, 36.4),
    'sgd': (1e-3, 36.3),
    'scale': (1e-2, 36.4),
    'muon': (3e-2, 40.1),
    'auon': (1e-3, 36.8),
    'soap': (1e-2, 45.8),
    'shampoo': (1e-2, 49.5),
    'conda': (3e-3, 37.7),
    'aro': (3e-2, 44.9),
    'galore': (3e-3, 38.4),
    'apollo': (1e-2, 38.4),
}


def equal_time() -> tuple[dict, ...]:
    """Each optimizer at its best rate, for the time of 200 steps of AdamW."""
    cells = []
    for optimizer in OPTIMIZERS:
        lr, ms = BEST_LR_AND_MS[optimizer['optim.name']]
        steps = round(200 * BEST_LR_AND_MS['adamw'][1] / ms)
        cells.append(optimizer | {'optim.lr': lr, 'train.steps': steps})
    return tuple(cells)


def get_config(which: str = 'rates') -> ConfigDict:
    """which: 'rates', each optimizer at all LEARNING_RATES, or 'equal_time'."""
    config = small.get_config()
    config.optim.others = 'adamw'
    config.optim.others_lr = 1e-2
    config.optim.match_rms = 0.2
    sweeps = {
        'rates': lambda: {'list': OPTIMIZERS, 'optim.lr': LEARNING_RATES},
        'equal_time': lambda: {'list': equal_time()},
    }
    config.sweep = choose(which, sweeps)() | {'train.seed': (0, 1, 2)}
    return config
