"""Does attention collapse at a large learning rate, and do sigmaReparam and qk-norm prevent it?

Question: at a learning rate at which the entropy of plain attention falls towards 0 and the loss
          diverges or stalls, do the same models train with model.reparam=sigma, or with
          model.qk_norm=rmsnorm (arXiv:2303.06296, arXiv:2302.05442)?
Command:  uv run train.py --config=configs/studies/entropy_collapse.py --workdir=runs/collapse
          uv run python -m eval.report --workdir=runs/collapse --figures=figures
Cost:     18 runs of 0.26 million parameters, about eight minutes on two CPU cores.
Result:   in pre-norm plain attention stalls with entropies near 0; sigma trains in pre- and
          post-norm, qk-norm only in pre-norm: configs/studies/results/entropy_collapse.md

entropy_collapse.py:search was used to choose the setting: plain attention alone, over placements,
warm-ups and learning rates, with one seed.
"""

from ml_collections import ConfigDict

from configs.studies import small
from configs.studies._variants import choose

VARIANTS = (
    {'model.qk_norm': 'none', 'model.reparam': 'none'},
    {'model.qk_norm': 'none', 'model.reparam': 'sigma'},
    {'model.qk_norm': 'rmsnorm', 'model.reparam': 'none'},
)
SEARCH = {
    'model.placement': ('pre', 'post'),
    'optim.warmup_steps': (0, 20),
    'optim.lr': (3e-3, 1e-2, 3e-2, 1e-1, 3e-1),
}


def get_config(which: str = 'compare') -> ConfigDict:
    """which: 'compare' the variants at the chosen setting, or 'search' for it."""
    config = small.get_config()
    config.optim.lr = 1e-1
    config.train.steps = 400
    config.train.eval_every = 400
    config.train.diagnose_every = 10
    sweeps = {
        'compare': {
            'list': VARIANTS,
            'model.placement': ('pre', 'post'),
            'train.seed': (0, 1, 2),
        },
        'search': SEARCH,
    }
    config.sweep = choose(which, sweeps)
    return config
