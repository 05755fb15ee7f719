"""Everything that can be wrong with a config, found before anything is traced or read."""

import dataclasses
import math
import sys
from pathlib import Path

import lm.data
from lm.config import Config
from lm.many import RUN_AXES
from lm.model import DTYPES, REMAT_POLICIES, mlp_kind, norm_kinds, stream_width
from lm.record.load import find
from lm.state import TRAINABLE
from modules.activations import ACTIVATIONS
from modules.attention import ATTENTIONS
from modules.choices import choose
from modules.kernels import ATTENTION_KERNELS, IMPLEMENTATIONS, MATMUL_KERNELS
from modules.losses import LOSSES
from modules.mlp import MLPS
from modules.norms import NORMS
from modules.norms.batchnorm import GhostBatchNorm
from modules.optim import OPTIMIZERS, SCHEDULES
from modules.placements import PLACEMENTS
from modules.positions import POSITIONS
from modules.reparam import REPARAMS
from modules.scaling import DECAY_RULES, PARAMETRIZATIONS

ON_DIVERGENCE = ('rollback', 'skip_step', 'stop')

NAMES = {
    'model.norm': NORMS,
    'model.qk_norm': NORMS,
    'model.embedding_norm': NORMS,
    'model.final_norm': {'auto': None, **NORMS},
    'model.placement': PLACEMENTS,
    'model.mlp': {'auto': None, **MLPS},
    'model.attention': ATTENTIONS,
    'model.activation': ACTIVATIONS,
    'model.position': POSITIONS,
    'model.reparam': REPARAMS,
    'model.dtype': {name: DTYPES[name] for name in ('bfloat16', 'float32')},
    'model.remat': REMAT_POLICIES,
    'loss.name': LOSSES,
    'optim.name': OPTIMIZERS,
    'optim.schedule': SCHEDULES,
    'optim.decay_rule': DECAY_RULES,
    'scaling.name': PARAMETRIZATIONS,
    'train.trainable': TRAINABLE,
    'train.on_divergence': dict.fromkeys(ON_DIVERGENCE),
    'kernels.implementation': {'auto': None, **IMPLEMENTATIONS},
    'kernels.attention': {'auto': None, **ATTENTION_KERNELS},
    'kernels.matmul': {'auto': None, **MATMUL_KERNELS},
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
    'model.mix_fraction': (0, 1),
    'model.n_experts': (1, math.inf),
    'model.experts_per_token': (1, math.inf),
    'model.expert_capacity': (ABOVE_0, FINITE),
    'norm.groups': (1, math.inf),
    'norm.heads': (1, math.inf),
    'norm.rank': (1, math.inf),
    'norm.alpha': (-FINITE, FINITE),
    'norm.alpha_attention': (-FINITE, FINITE),
    'norm.ghost_batches': (1, math.inf),
    'norm.momentum': (0, 1),
    'norm.window': (1, math.inf),
    'norm.warmup': (0, math.inf),
    'norm.removal_start': (1, math.inf),
    'norm.removal_gap': (0, math.inf),
    'loss.z_loss': (0, FINITE),
    'loss.balance_loss': (0, FINITE),
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
    if config.train.init_from:
        _check_init_from(config)
    lm.data.check(config.data)


def check_program(config: Config) -> None:
    """`check` without the text: whether its source can be read is not looked at."""
    for path, table in NAMES.items():
        choose(table, _field(config, path), path)
    for path, (least, most) in BOUNDS.items():
        value = _field(config, path)
        if value is not None and not least <= value <= most:
            raise ValueError(f'{path} must be between {least} and {most}; got {value}')
    _check_heads(config)
    _check_norms(config)
    _check_norm_groups(config)
    _check_blocks(config)
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


def _check_init_from(config: Config) -> None:
    try:
        find(Path(config.train.init_from))
    except ValueError as error:
        raise ValueError(
            f'train.init_from: {error} A run that has begun goes on without it: '
            '--config.train.init_from= --continue_changed'
        ) from error


def _check_norms(config: Config) -> None:
    model, kinds = config.model, norm_kinds(config.model)
    for name, value in dataclasses.asdict(config.norm).items():
        readers = [kind for kind in NORMS if name in NORMS[kind].__dataclass_fields__]
        if value is not None and not kinds & set(readers):
            raise ValueError(
                f'norm.{name}={value} is read by no norm of this model ({", ".join(sorted(kinds))})'
                f'; those that read it: {", ".join(readers)}'
            )
    if NORMS[model.norm].drops and model.d_model % 2:
        raise ValueError(
            f'model.norm={model.norm} keeps d_model - {NORMS[model.norm].drops} coordinates of a '
            f'stream whose width model.d_model must be even; got {model.d_model}. Nearest that '
            f'works: {model.d_model + 1}.'
        )
    rows = config.data.batch_size // config.train.microbatches
    parts = config.norm.ghost_batches or GhostBatchNorm.ghost_batches
    if 'ghost_batchnorm' in kinds and rows % parts:
        raise ValueError(
            f'norm.ghost_batches must divide the sequences of a microbatch; got {parts} for '
            f'{rows}. Nearest that works: {_nearest_divisor(rows, parts)}.'
        )


def _check_norm_groups(config: Config) -> None:
    model = config.model
    widths = {
        'model.norm': (model.norm, stream_width(model)),
        'model.embedding_norm': (model.embedding_norm, stream_width(model)),
        'model.final_norm': (model.final_norm, stream_width(model)),
        'model.qk_norm': (model.qk_norm, model.d_model // model.n_heads),
    }
    for path, (kind, width) in widths.items():
        if kind == 'auto':
            continue
        for option in ('groups', 'heads'):
            n = getattr(config.norm, option)
            if n is None or option not in NORMS[kind].__dataclass_fields__:
                continue
            if width % n:
                raise ValueError(
                    f'norm.{option} must divide the width {width} that {path}={kind} normalizes; '
                    f'got {n}. Nearest that works: {_nearest_divisor(width, n)}.'
                )
            if option == 'groups' and n == width:
                raise ValueError(
                    f'norm.groups={n} leaves {path}={kind} groups of one feature each, which have '
                    'no spread; give fewer'
                )


def _check_blocks(config: Config) -> None:
    model, placement = config.model, PLACEMENTS[config.model.placement]
    if model.mix_fraction is not None and not placement.takes_fraction:
        takers = [name for name in PLACEMENTS if PLACEMENTS[name].takes_fraction]
        raise ValueError(
            f'model.mix_fraction={model.mix_fraction} is not read by model.placement='
            f'{model.placement}, only by {", ".join(takers)}'
        )
    if placement.normed_values and model.qk_norm == 'none':
        raise ValueError(
            f'model.placement={model.placement} normalizes queries, keys and values by '
            'model.qk_norm, which is none; set it, to rmsnorm as published'
        )
    if mlp_kind(model) == 'moe':
        if model.bias:
            raise ValueError('model.bias=True: experts (model.mlp=moe) have no biases')
        if model.experts_per_token > model.n_experts:
            raise ValueError(
                f'model.experts_per_token must be at most model.n_experts; got '
                f'{model.experts_per_token} of {model.n_experts}'
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
