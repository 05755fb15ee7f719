"""Which optimizer of the hidden matrices reaches the lowest loss, each at its best rate?

Question: with unscaled updates, and each optimizer at a learning rate tuned with the same budget,
          how does the order of the study at equal update sizes change? Is the order at half of the
          training length that of the full length?
Command:  uv run train.py --config=configs/studies/optimizers_tuned.py --workdir=runs/tuned
          uv run train.py --config=configs/studies/optimizers_tuned.py:half --workdir=runs/half
Cost:     about forty runs of 0.26 million parameters in each of eleven programs.
Result:   Muon leads by 0.32 nats, then ARO, SOAP, Shampoo and Conda; half of the length gives
          nearly the same result; results for AuON, SCALE and Schedule-Free are withdrawn:
          configs/studies/results/optimizers_tuned.md

Model, text and the AdamW of embeddings, readout and vectors are as in
configs/studies/optimizers.py. Learning rates apply only to the hidden matrices. The search is
centred near the best octave of one seed at half of the length; a scan whose best rate is at an edge
is extended.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies._variants import choose

ARMS = (  # the baseline first
    {'optim.name': 'adamw', 'optim.lr': 8e-3},
    {'optim.name': 'muon', 'optim.lr': 6e-2},
    {'optim.name': 'soap', 'optim.lr': 1e-2},
    {'optim.name': 'shampoo', 'optim.lr': 1e-2, 'optim.shampoo_every': 10},
    {'optim.name': 'scale', 'optim.lr': 3e-3},
    {'optim.name': 'conda', 'optim.lr': 4e-2},
    {'optim.name': 'aro', 'optim.lr': 2e-2},
    {'optim.name': 'auon', 'optim.lr': 2e-1},
    {'optim.name': 'lion', 'optim.lr': 2e-3},
    {'optim.name': 'sophia', 'optim.lr': 1e-3},
    {
        'optim.name': 'adamw',
        'optim.lr': 2e-2,
        'optim.average': 'schedule_free',
        'optim.schedule': 'constant',
    },
)


def get_config(which: str = 'whole') -> ConfigDict:
    """which: the 'whole' 200 steps, or 'half' of them."""
    config = small.get_config()
    config.optim.others = 'adamw'
    config.optim.others_lr = 1e-2
    steps = choose(which, {'whole': 200, 'half': 100})
    config.train.steps = config.train.eval_every = steps
    config.optim.warmup_steps = steps // 10
    config.sweep = {'list': ARMS}
    config.tune = {'optim.lr': None, 'smallest_effect': 0.02}
    return config
