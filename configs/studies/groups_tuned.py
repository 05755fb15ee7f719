"""What is left of the claims about optimizers when the rate of the other parameters is tuned too?

Question: does the order of AdamW, Muon, NorMuon, MuonH, AdamH and SOAP change when each also gets a
          tuned learning rate for embedding, readout, norms and vectors? Does cautious weight decay
          lower the loss when the strength of the decay is tuned for it?
Command:  uv run train.py --config=configs/studies/groups_tuned.py:rates --workdir=runs/rates
          uv run train.py --config=configs/studies/groups_tuned.py:groups --workdir=runs/groups
          uv run train.py --config=configs/studies/groups_tuned.py:adamw_decay --workdir=runs/adamw
          uv run train.py --config=configs/studies/groups_tuned.py:muon_decay --workdir=runs/muon
Cost:     15 runs of 0.26 million parameters for each arm, and 22 if groups are tuned.
Result:   Muon leads by 0.11 nats before and after; with tuned groups every loss is 0.02 to
          0.03 lower; no gain of hyperball forms or cautious weight decay is seen:
          configs/studies/results/groups_tuned.md
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies._variants import check_variant

HYPERBALL = {'optim.match_norm': 1.0, 'model.reparam': 'normalize_and_project'}
ARMS = (  # the baseline first
    {'optim.name': 'adamw', 'optim.lr': 5e-3},
    {'optim.name': 'muon', 'optim.lr': 2e-2},
    {'optim.name': 'normuon', 'optim.lr': 2e-2},
    {'optim.name': 'muon', 'optim.lr': 1.2e-2, **HYPERBALL},
    {'optim.name': 'adamw', 'optim.lr': 1.2e-2, **HYPERBALL},
    {'optim.name': 'soap', 'optim.lr': 5e-3},
)
DECAYS = ({'optim.cautious_decay': False}, {'optim.cautious_decay': True})
TUNED = {  # (optim.lr, optim.others_lr) near the best ones that 'groups' found
    'adamw': (6.5e-3, 1e-2),
    'muon': (2.2e-2, 1e-2),
}


def get_config(which: str = 'rates') -> ConfigDict:
    """which: 'rates' tunes optim.lr; 'groups' also the rate of the other parameters; 'adamw_decay'
    and 'muon_decay' tune the weight decay, plain and cautious, at tuned rates.
    """
    config = small.get_config()
    config.scaling.embedding_std = 1.0
    config.data.seq_len = 64
    config.data.batch_size = 4
    config.optim.others_lr = 5e-3
    config.optim.weight_decay = 0.1
    config.optim.warmup_steps = 100
    config.train.steps = config.train.eval_every = 2000
    config.train.eval_batches = 64
    config.train.log_every = 50
    config.sweep = {'list': ARMS}
    config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 15}
    check_variant(which, ('rates', 'groups', 'adamw_decay', 'muon_decay'))
    if which == 'groups':
        config.sweep = {'list': ARMS[:-1]}  # steps of SOAP take 1.6 times as long
        config.tune = {
            'optim.lr': None,
            'optim.others_lr': None,
            'smallest_effect': 0.02,
            'budget': 22,
        }
    if which.endswith('_decay'):
        config.optim.name = which.removesuffix('_decay')
        config.optim.lr, config.optim.others_lr = TUNED[config.optim.name]
        config.sweep = {'list': DECAYS}
        config.tune = {'optim.weight_decay': None, 'smallest_effect': 0.02, 'budget': 15}
    return config
