"""Everything that can be wrong with a config, found before anything is traced or read."""

import math
import sys

import lm.data
from lm.config import Config
from lm.many import RUN_AXES
from lm.model import DTYPES, REMAT_POLICIES
from modules.activations import ACTIVATIONS
from modules.attention import ATTENTIONS
from modules.choices import choose
from modules.kernels import IMPLEMENTATIONS
from modules.losses import LOSSES
from modules.norms import NORMS
from modules.optim import OPTIMIZERS, SCHEDULES
from modules.placements import PLACEMENTS
from modules.positions import POSITIONS
from modules.reparam import REPARAMS
from modules.scaling import DECAY_RULES, PARAMETRIZATIONS

ON_DIVERGENCE = ('rollback', 'skip_step', 'stop')

NAMES = {
    'model.norm': NORMS,
    'model.qk_norm': NORMS,
    'model.placement': PLACEMENTS,
    'model.attention': ATTENTIONS,
    'model.activation': ACTIVATIONS,
    'model.position': POSITIONS,
    'model.reparam': REPARAMS,
    'model.dtype': DTYPES,
    'model.remat': REMAT_POLICIES,
    'loss.name': LOSSES,
    'optim.name': OPTIMIZERS,
    'optim.schedule': SCHEDULES,
    'optim.decay_rule': DECAY_RULES,
    'scaling.name': PARAMETRIZATIONS,
    'train.on_divergence': dict.fromkeys(ON_DIVERGENCE),
    'kernels.implementation': {'auto': None, **IMPLEMENTATIONS},
    'kernels.run_axis': {'auto': None, **RUN_AXES},
}

# Bounds are included, so these stand in for 0 and 1 that are not; float32 tells them apart.
ABOVE_0, BELOW_1 = 1e-37, 1 - 1e-7
FINITE = sys.float_info.max

# field: (least, most) that works
BOUNDS = {
    'model.d_model': (1, math.inf),
    'model.n_layers': (1, math.inf),
    'model.n_heads': (1, math.inf),
    'model.n_kv_heads': (1, math.inf),
    'model.d_ff': (1, math.inf),
    'model.norm_eps': (0, 1),
    'model.logit_softcap': (0, FINITE),
    'loss.z_loss': (0, FINITE),
    'loss.label_smoothing': (0, 1),
    'optim.lr': (0, FINITE),
    'optim.warmup_steps': (0, math.inf),
    'optim.decay_fraction': (0, 1),
    'optim.final_lr_fraction': (0, 1),
    'optim.b1': (0, BELOW_1),
    'optim.b2': (0, BELOW_1),
    'optim.eps': (ABOVE_0, FINITE),
    'optim.weight_decay': (0, FINITE),
    'optim.clip_norm': (0, math.inf),
    'scaling.init_scale': (0, FINITE),
    'train.steps': (1, math.inf),
    'train.microbatches': (1, math.inf),
    'train.eval_every': (0, math.inf),
    'train.eval_batches': (0, math.inf),
    'train.checkpoint_every': (0, math.inf),
    'train.keep_last': (1, math.inf),
    'train.keep_best': (0, math.inf),
    'train.log_every': (1, math.inf),
    'train.diagnose_every': (0, math.inf),
    'mesh.data': (-1, math.inf),
    'mesh.run': (-1, math.inf),
}


def check(config: Config) -> None:
    """ValueError for the first unknown name (with the nearest), number out of range, or two fields
    that do not fit each other.
    """
    check_program(config)
    lm.data.check(config.data)


def check_program(config: Config) -> None:
    """`check` without the text: whether its source can be read is not looked at."""
    for path, table in NAMES.items():
        choose(table, _field(config, path), path)
    for path, (least, most) in BOUNDS.items():
        value = _field(config, path)
        if not least <= value <= most:
            raise ValueError(f'{path} must be between {least} and {most}; got {value}')
    _check_heads(config)
    _check_batch(config)


def check_devices(config: Config, n_devices: int, n_processes: int) -> None:
    """ValueError where a microbatch cannot be cut evenly over the devices."""
    rows, parts = config.data.batch_size, config.train.microbatches
    if rows % (parts * n_devices):
        fitting = max(1, round(rows / (parts * n_devices))) * parts * n_devices
        raise ValueError(
            f'data.batch_size must be a multiple of train.microbatches * devices = {parts} * '
            f'{n_devices}; got {rows}. Nearest that works: {fitting}.'
        )
    if n_devices % n_processes:
        raise ValueError(f'{n_devices} devices do not spread evenly over {n_processes} processes')


def _field(config: Config, path: str):
    section, name = path.split('.')
    return getattr(getattr(config, section), name)


def _check_heads(config: Config) -> None:
    model = config.model
    if model.d_model % model.n_heads:
        near = _nearest_divisor(model.d_model, model.n_heads)
        raise ValueError(
            f'model.n_heads must divide model.d_model; got {model.n_heads} heads for a width of '
            f'{model.d_model}. Nearest that works: {near}.'
        )
    if model.n_heads % model.n_kv_heads:
        near = _nearest_divisor(model.n_heads, model.n_kv_heads)
        raise ValueError(
            f'model.n_kv_heads must divide model.n_heads; got {model.n_kv_heads} for '
            f'{model.n_heads} heads. Nearest that works: {near}.'
        )
    if model.position == 'rope' and (model.d_model // model.n_heads) % 2:
        raise ValueError(
            f'model.position=rope turns pairs: the head width d_model / n_heads must be even; got '
            f'{model.d_model // model.n_heads}. Change n_heads, or use position=learned.'
        )


def _check_batch(config: Config) -> None:
    rows, parts = config.data.batch_size, config.train.microbatches
    if rows % parts:
        raise ValueError(
            f'train.microbatches must divide data.batch_size; got {parts} for {rows} sequences. '
            f'Nearest that works: {_nearest_divisor(rows, parts)}.'
        )
    for name in ('data', 'run'):
        if getattr(config.mesh, name) == 0:
            raise ValueError(f'mesh.{name} must be a number of devices, or -1 for all; got 0')


def _nearest_divisor(n: int, wanted: int) -> int:
    return min((d for d in range(1, n + 1) if n % d == 0), key=lambda d: abs(d - wanted))
