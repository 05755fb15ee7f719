"""Which verdicts on small models hold for larger ones, and for longer training?

Question: norms, placements, sigmaReparam, query-key norms, z-loss, weight decay, schedules and
          optimizers are compared with one baseline, each at its own learning rate. Does the sign of
          a difference at 0.26 million parameters and 200 steps hold at 1.4 and 5.2 million
          parameters, and at 800 steps?
Command:  uv run train.py --config=configs/studies/ladder.py:search --workdir=runs/search
          uv run train.py --config=configs/studies/ladder.py:64x200 --workdir=runs/64x200
          uv run train.py --config=configs/studies/ladder.py:64x800 --workdir=runs/64x800
          uv run train.py --config=configs/studies/ladder.py:160x200 --workdir=runs/160x200
          uv run train.py --config=configs/studies/ladder.py:160x800 --workdir=runs/160x800
          uv run train.py --config=configs/studies/ladder.py:320x200 --workdir=runs/320x200
          uv run train.py --config=configs/studies/ladder.py:320x800 --workdir=runs/320x800
          uv run python -m eval.compare runs/64x200 runs/64x800 runs/160x200
Cost:     195 runs of `search` take 45 core-minutes, 70 runs of 64x200, 64x800 and 160x200 take 16,
          65 and 90, and 40 of 320x200 take 145. For 124 million parameters:
          uv run python -m tpu.plan --config=configs/studies/ladder.py:124m --topology=v6e:4x4
Result:   of seven verdicts at 64x200 six hold at 64x800, 160x200 and 320x200, none is reversed, and
          sizes change: configs/studies/results/ladder.md

A rung is a width and a number of steps. All have four layers with heads of 16 features, and steps
of 1,024 tokens. `search` finds the best learning rate of each arm at 64x200. The rungs use that
rate with five other seeds, divided by the growth in width except for Muon; 124m searches around it.
Embeddings start at a standard deviation of 1, so that the first update does not drown them. Muon,
SOAP and Lion update the hidden matrices, and AdamW at 0.01, divided likewise, the rest.
"""

from ml_collections import ConfigDict

from configs.studies import muon_124m, small
from configs.studies._variants import choose
from configs.studies.mup_transfer import at_width

BASE_WIDTH = 64
CENTRE = 1e-2  # of the searches at 64x200, for AdamW
HIDDEN = {'optim.others': 'adamw'}
ARMS = (  # changes, the centre of the search, and the best learning rate that it found
    ({}, CENTRE, 2.0e-2),
    ({'model.norm': 'layernorm'}, CENTRE, 2.0e-2),
    ({'model.norm': 'none'}, CENTRE, 1.4e-2),
    ({'model.placement': 'post'}, 3e-3, 2.8e-3),
    ({'model.placement': 'peri'}, CENTRE, 2.2e-2),
    ({'model.qk_norm': 'rmsnorm'}, CENTRE, 2.6e-2),
    ({'model.reparam': 'sigma'}, CENTRE, 4.4e-2),
    ({'loss.z_loss': 0.0}, CENTRE, 2.0e-2),
    ({'optim.weight_decay': 0.0}, CENTRE, 2.0e-2),
    ({'optim.schedule': 'linear'}, CENTRE, 2.0e-2),
    ({'optim.name': 'muon', **HIDDEN}, 4e-2, 4.4e-2),
    ({'optim.name': 'soap', **HIDDEN}, CENTRE, 1.7e-2),
    ({'optim.name': 'lion', **HIDDEN}, 2e-3, 3.1e-3),
)
# Width 320 has the arms that a smaller rung decided, without SOAP, the slowest. They train in this
# order, as a run takes five core-minutes.
DECIDED = (
    {},
    {'optim.name': 'muon', **HIDDEN},
    {'model.placement': 'post'},
    {'model.reparam': 'sigma'},
    {'model.placement': 'peri'},
    {'optim.schedule': 'linear'},
    {'optim.name': 'lion', **HIDDEN},
)
# Hidden matrices that get no update, and only decay.
TWIN = ({'optim.name': 'conda', 'optim.conda_scale': 0.0, **HIDDEN}, CENTRE, CENTRE)
SEEDS = tuple(range(1000, 1005))
RUNGS = {  # width, steps
    f'{width}x{steps}': (width, steps) for width in (64, 160, 320) for steps in (200, 800)
}


def list_arms(growth: float, is_tuned: bool, arms: tuple = ARMS) -> tuple[dict, ...]:
    """Returns arms with rates divided by the growth in width.

    Muon keeps its rate, as configs/studies/results/mup_transfer.md found.

    Args:
      growth: width over BASE_WIDTH.
      is_tuned: whether rates are the best ones, with TWIN as a further arm.
      arms: changes, centre and best rate of each.
    """
    return tuple(
        changes
        | {
            'optim.lr': (best if is_tuned else centre)
            / (1 if changes.get('optim.name') == 'muon' else growth)
        }
        | ({'optim.others_lr': CENTRE / growth} if 'optim.others' in changes else {})
        for changes, centre, best in ((*arms, TWIN) if is_tuned else arms)
    )


def get_config(rung: str = '64x200') -> ConfigDict:
    """rung: 'search', WIDTHxSTEPS, or '124m' on eight chips or more."""
    size = choose(rung, {'search': RUNGS['64x200']} | RUNGS | {'124m': None})
    if size is None:
        config = muon_124m.get_config()
        config.sweep = {'list': list_arms(config.model.d_model / BASE_WIDTH, is_tuned=True)}
        config.tune = {'optim.lr': None, 'smallest_effect': 0.01, 'budget': 15}
        return config
    width, steps = size
    config = small.get_config()
    for path, value in at_width(width).items():
        config.update_from_flattened_dict({path: value})
    config.scaling.embedding_std = 1.0
    config.optim.warmup_steps = steps // 10
    config.train.steps = config.train.eval_every = steps
    config.train.eval_batches = 64
    if rung == 'search':
        config.sweep = {'list': list_arms(1.0, is_tuned=False)}
        config.tune = {'optim.lr': None, 'smallest_effect': 0.02, 'budget': 15}
        return config
    arms = ARMS
    if width >= 320:
        decided = [arm for arm in ARMS if arm[0] in DECIDED]
        arms = tuple(sorted(decided, key=lambda arm: DECIDED.index(arm[0])))
    config.sweep = {
        'list': list_arms(width / BASE_WIDTH, is_tuned=True, arms=arms),
        'zip': {'train.seed': SEEDS, 'data.seed': SEEDS},
    }
    return config
