"""Which verdicts on small models hold for larger ones, and for longer training?

Question: norms, placements, sigmaReparam, query-key norms, z-loss, weight decay, schedules and
          optimizers are compared with one baseline, each at its own learning rate. Does the sign of
          a difference at 0.26 million parameters and 200 steps hold at 1.4 and 5.5 million
          parameters, and at 800 steps?
Command:  uv run train.py --config=configs/studies/ladder.py:64x200 --workdir=runs/64x200
          uv run train.py --config=configs/studies/ladder.py:160x200 --workdir=runs/160x200
          uv run train.py --config=configs/studies/ladder.py:64x800 --workdir=runs/64x800
          uv run train.py --config=configs/studies/ladder.py:160x800 --workdir=runs/160x800
          uv run train.py --config=configs/studies/ladder.py:320x800 --workdir=runs/320x800
Cost:     15 runs for each of thirteen arms: of 64x200 20 core-minutes. For 124 million parameters:
          uv run python -m tpu.plan --config=configs/studies/ladder.py:124m --topology=v6e:4x4
Result:   none yet

A rung is a width and a number of steps. All have four layers with heads of 16 features, and steps
of 1,024 tokens. Arms search around the best rates of 64x200, divided by the growth in width.
Embeddings start at a standard deviation of 1, so that the first update does not drown them. Muon,
SOAP and Lion update the hidden matrices, and AdamW at its own best rate the rest.
"""

from typing import Any

from ml_collections import ConfigDict

from configs.studies import muon_124m, small
from configs.studies.mup_transfer import at_width

BASE_WIDTH = 64
LR = 1e-2  # of AdamW at BASE_WIDTH
RATES = ('optim.lr', 'optim.others_lr')
HIDDEN = {'optim.others': 'adamw', 'optim.others_lr': LR}
ARMS: tuple[dict[str, Any], ...] = (  # the baseline first; rates at BASE_WIDTH
    {'optim.lr': LR},
    {'model.norm': 'layernorm', 'optim.lr': LR},
    {'model.norm': 'none', 'optim.lr': LR},
    {'model.placement': 'post', 'optim.lr': 3e-3},
    {'model.placement': 'peri', 'optim.lr': LR},
    {'model.qk_norm': 'rmsnorm', 'optim.lr': LR},
    {'model.reparam': 'sigma', 'optim.lr': LR},
    {'loss.z_loss': 0.0, 'optim.lr': LR},
    {'optim.weight_decay': 0.0, 'optim.lr': LR},
    {'optim.schedule': 'linear', 'optim.lr': LR},
    {'optim.name': 'muon', 'optim.lr': 4e-2, **HIDDEN},
    {'optim.name': 'soap', 'optim.lr': LR, **HIDDEN},
    {'optim.name': 'lion', 'optim.lr': 2e-3, **HIDDEN},
)


def get_config(rung: str = '64x200') -> ConfigDict:
    """rung: WIDTHxSTEPS, or '124m' on eight chips or more."""
    if rung == '124m':
        config = muon_124m.get_config()
        config.sweep = {'list': ARMS}
        config.tune = {'optim.lr': 3e-3, 'smallest_effect': 0.01, 'budget': 9}
        return config
    width, steps = map(int, rung.split('x'))
    growth = width / BASE_WIDTH
    config = small.get_config()
    for path, value in at_width(width).items():
        config.update_from_flattened_dict({path: value})
    config.scaling.embedding_std = 1.0
    config.optim.warmup_steps = steps // 10
    config.train.steps = config.train.eval_every = steps
    config.train.eval_batches = 64
    config.sweep = {
        'list': tuple(
            {path: value / growth if path in RATES else value for path, value in arm.items()}
            for arm in ARMS
        )
    }
    config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 15}
    return config
