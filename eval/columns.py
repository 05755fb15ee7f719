"""The columns of a table of runs: their names, their types, and what they are read from."""

import functools
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from lm.sections import FIELDS
from modules.objectives import OBJECTIVES

IDENTITY = {
    'cell': str,  # the folder's name
    'workdir': str,
    'sweep': str,  # the sweep's folder
    'group': int,  # cells of one group run in one program
    'status': str,  # waiting, unfinished, unreadable, or what summary.json says
    'reason': str,  # why it diverged or failed, or which file cannot be read
}
RESULTS = {  # column: (name in summary.json, type)
    'step': ('step', int),
    'ce': ('validation_ce', float),  # nats per token, as all losses here
    'best_ce': ('best_validation_ce', float),
    'best_step': ('best_step', int),
    'validated_step': ('validated_step', int),  # of ce; before `step` where the run diverged
    'train_ce': ('ce', float),  # of the last logged batch
    'bits_per_byte': ('bits_per_byte', float),
    'best_bits_per_byte': ('best_bits_per_byte', float),
    'perplexity': ('perplexity', float),
    **{  # of what train.eval_objectives adds
        f'{name}_ce': (f'validation_{name}_ce', float) for name in OBJECTIVES if name != 'causal'
    },
    'diverged_step': ('diverged_step', int),
    'tokens': ('tokens', int),
    'tokens_per_sec': ('tokens_per_sec_mean', float),
    'wall_sec': ('wall_sec', float),  # from opened to ended; runs beside each other share it
    'compile_sec': ('compile_sec', float),
    'parameters': ('parameters', int),
    'optimizer_state_bytes': ('optimizer_state_bytes', int),
    'git_commit': ('git_commit', str),
    'device': ('device', str),
}
ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}


# The names of columns that are not the whole path of their field. Stored queries rely on them: the
# list does not change, whatever fields there will be.
SHORT = {
    'model.d_model': 'd_model',
    'model.n_layers': 'n_layers',
    'model.n_heads': 'n_heads',
    'model.n_kv_heads': 'n_kv_heads',
    'model.d_ff': 'd_ff',
    'model.norm': 'norm',
    'model.placement': 'placement',
    'model.attention': 'attention',
    'model.qk_norm': 'qk_norm',
    'model.activation': 'activation',
    'model.position': 'position',
    'model.reparam': 'reparam',
    'model.tie_embeddings': 'tie_embeddings',
    'model.logit_softcap': 'logit_softcap',
    'model.dtype': 'dtype',
    'model.remat': 'remat',
    'model.scan_layers': 'scan_layers',
    'model.mix_fraction': 'mix_fraction',
    'model.embedding_norm': 'embedding_norm',
    'model.final_norm': 'final_norm',
    'model.embedding_scale': 'embedding_scale',
    'model.mlp': 'mlp',
    'model.readout_bias': 'readout_bias',
    'mlp.n_experts': 'n_experts',
    'mlp.experts_per_token': 'experts_per_token',
    'mlp.expert_capacity': 'expert_capacity',
    'loss.z_loss': 'z_loss',
    'loss.label_smoothing': 'label_smoothing',
    'loss.balance_loss': 'balance_loss',
    'optim.lr': 'lr',
    'optim.schedule': 'schedule',
    'optim.warmup_steps': 'warmup_steps',
    'optim.decay_fraction': 'decay_fraction',
    'optim.final_lr_fraction': 'final_lr_fraction',
    'optim.b1': 'b1',
    'optim.b2': 'b2',
    'optim.eps': 'eps',
    'optim.weight_decay': 'weight_decay',
    'optim.decay_rule': 'decay_rule',
    'optim.clip_norm': 'clip_norm',
    'scaling.init_scale': 'init_scale',
    'data.source': 'source',
    'data.tokenizer': 'tokenizer',
    'data.text_field': 'text_field',
    'data.seq_len': 'seq_len',
    'data.batch_size': 'batch_size',
    'data.packing': 'packing',
    'data.mask_documents': 'mask_documents',
    'data.epochs': 'epochs',
    'data.validation_fraction': 'validation_fraction',
    'data.invalid_utf8': 'invalid_utf8',
    'data.prefetch': 'prefetch',
    'data.cache_dir': 'cache_dir',
    'train.steps': 'steps',
    'train.microbatches': 'microbatches',
    'train.eval_every': 'eval_every',
    'train.eval_batches': 'eval_batches',
    'train.checkpoint_every': 'checkpoint_every',
    'train.keep_last': 'keep_last',
    'train.keep_best': 'keep_best',
    'train.log_every': 'log_every',
    'train.on_divergence': 'on_divergence',
    'train.diagnose_every': 'diagnose_every',
    'train.init_from': 'init_from',
    'train.trainable': 'trainable',
    'mesh.run': 'run',
    'kernels.implementation': 'implementation',
    'kernels.run_axis': 'run_axis',
}


@functools.cache
def columns() -> Mapping[str, str]:
    """{'model.norm': 'norm', 'train.seed': 'train_seed', ...}: the column of each config field.

    It is that of `SHORT`, or else the whole path: `norm` is model.norm, and `norm_groups` is an
    option of norms.
    """
    return {path: SHORT.get(path, path.replace('.', '_')) for path in FIELDS}


@functools.cache
def schema() -> pa.Schema:
    """Of `cells.parquet`: typed also where a column has no value yet."""
    kinds = IDENTITY | {name: _type_of(path) for path, name in columns().items()}
    kinds |= {column: kind for column, (_, kind) in RESULTS.items()}
    return pa.schema([(column, ARROW.get(kind, pa.string())) for column, kind in kinds.items()])


def _type_of(path: str) -> type:
    return next(kind for kind in FIELDS[path].types if kind is not types.NoneType)


@functools.cache
def kinds_of_columns() -> list[tuple[str, pa.DataType]]:
    """(column, type) of `schema`, which is slow to be asked for each row."""
    return [(field.name, field.type) for field in schema()]


def typed(path: Path, name: str, value: Any, kind: pa.DataType) -> Any:
    """The value as the column `name` holds it; None where it is not finite.

    Raises ValueError, naming `path`, for a value that the column cannot hold.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if kind == pa.string() and not isinstance(value, str):
        return json.dumps(value)
    try:
        return pa.scalar(value, kind).as_py()
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f'{path} cannot be read (its {name} is {value!r}: {error})') from error
