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
Cost:     15 runs for each of thirteen arms: of 64x200 45 core-minutes. For 124 million parameters:
          uv run python -m tpu.plan --config=configs/studies/ladder.py:124m --topology=v6e:4x4
Result:   none yet

A rung is a width and a number of steps. All have four layers with heads of 16 features, and steps
of 1,024 tokens. Arms search around the best rates of 64x200, divided by the growth in width.
Embeddings start at a standard deviation of 1, so that the first update does not drown them. Muon,
SOAP and Lion update the hidden matrices, and AdamW at its own best rate the rest.
"""

from ml_collections import ConfigDict

from configs.studies import muon_124m, small
from configs.studies.mup_transfer import at_width

BASE_WIDTH = 64
LR = 1e-2  # of AdamW at BASE_WIDTH
HIDDEN = {'optim.others': 'adamw'}
ARMS = (  # changes and the rate at BASE_WIDTH; the baseline first
    ({}, LR),
    ({'model.norm': 'layernorm'}, LR),
    ({'model.norm': 'none'}, LR),
    ({'model.placement': 'post'}, 3e-3),
    ({'model.placement': 'peri'}, LR),
    ({'model.qk_norm': 'rmsnorm'}, LR),
    ({'model.reparam': 'sigma'}, LR),
    ({'loss.z_loss': 0.0}, LR),
    ({'optim.weight_decay': 0.0}, LR),
    ({'optim.schedule': 'linear'}, LR),
    ({'optim.name': 'muon', **HIDDEN}, 4e-2),
    ({'optim.name': 'soap', **HIDDEN}, LR),
    ({'optim.name': 'lion', **HIDDEN}, 2e-3),
)


def list_arms(growth: float) -> tuple[dict, ...]:
    """Returns the arms, with rates divided by the growth in width."""
    return tuple(
        changes
        | {'optim.lr': lr / growth}
        | ({'optim.others_lr': LR / growth} if 'optim.others' in changes else {})
        for changes, lr in ARMS
    )


def get_config(rung: str = '64x200') -> ConfigDict:
    """rung: WIDTHxSTEPS, or '124m' on eight chips or more."""
    if rung == '124m':
        config = muon_124m.get_config()
        config.sweep = {'list': list_arms(config.model.d_model / BASE_WIDTH)}
        config.tune = {'optim.lr': None, 'smallest_effect': 0.01, 'budget': 15}
        return config
    width, steps = map(int, rung.split('x'))
    config = small.get_config()
    for path, value in at_width(width).items():
        config.update_from_flattened_dict({path: value})
    config.scaling.embedding_std = 1.0
    config.optim.warmup_steps = steps // 10
    config.train.steps = config.train.eval_every = steps
    config.train.eval_batches = 64
    config.sweep = {'list': list_arms(width / BASE_WIDTH)}
    config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 15}
    return config
