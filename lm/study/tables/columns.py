"""The columns of a table of runs: their names, types and sources."""

import functools
import json
import math
import types
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pyarrow as pa

from lm.config.fields import FIELDS
from modules.objectives import OBJECTIVES
from modules.params import USES

Record = dict[str, Any]  # a run's row: column -> value

IDENTITY = {
    'cell': str,  # the folder's name
    'workdir': str,
    'sweep': str,  # the sweep's folder
    'group': int,  # cells of one group run in one program
    'status': str,  # waiting, unfinished, unreadable, or what summary.json says
    'reason': str,  # why it diverged or failed, or which file cannot be read
    'arm': str,  # with config.tune: the arm that the run is of
    'stage': str,  # and what asked for it: scan, extend, ...; 'look 1' and 2 are of fresh seeds
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
    'parent': ('parent', str),  # of a branch (train.branch_from): WORKDIR@STEP
    'branch_step': ('branch_step', int),
    'checkpoints': ('checkpoints', str),  # their steps, as a JSON list
    'texts_ce': ('texts_ce', float),  # means over eval.texts
    'texts_bits_per_byte': ('texts_bits_per_byte', float),
    'texts': ('texts', str),  # JSON: bits per byte of each text
    'suites': ('suites', str),  # JSON: numbers of eval.suites
    'diverged_step': ('diverged_step', int),
    'spike_score': ('spike_score', float),  # share of steps
    'skipped_steps': ('skipped_steps', int),
    'tokens': ('tokens', int),
    'tokens_per_sec': ('tokens_per_sec_mean', float),
    'wall_sec': ('wall_sec', float),  # from opened to ended; runs beside each other share it
    'side_by_side': ('side_by_side', int),  # how many did
    'compile_sec': ('compile_sec', float),
    'goodput': ('goodput', float),  # seconds of kept steps / elapsed_sec
    'elapsed_sec': ('elapsed_sec', float),  # since the first start, over all processes
    'starts': ('starts', int),
    'seconds': ('seconds', str),  # JSON: of elapsed_sec, by part
    'parameters': ('parameters', int),
    **{f'{use}_parameters': (f'{use}_parameters', int) for use in USES},
    'flops_per_token': ('flops_per_token', float),
    'optimizer_state_bytes': ('optimizer_state_bytes', int),
    'git_commit': ('git_commit', str),
    'device': ('device', str),
}
ARROW = {int: pa.int64(), float: pa.float64(), str: pa.string(), bool: pa.bool_()}
PYTHON = {kind.id: python for python, kind in ARROW.items()}

# Columns named by the last part of their field. Stored queries rely on these names: the list does
# not change, whatever fields are added.
_SHORT = {
    'model': """
        d_model n_layers n_heads n_kv_heads d_ff norm placement attention qk_norm activation
        position reparam tie_embeddings logit_softcap dtype remat scan_layers mix_fraction
        embedding_norm final_norm embedding_scale mlp readout_bias""",
    'mlp': 'n_experts experts_per_token expert_capacity',
    'loss': 'z_loss label_smoothing balance_loss',
    'optim': """
        lr schedule warmup_steps decay_fraction final_lr_fraction b1 b2 eps weight_decay
        decay_rule clip_norm""",
    'scaling': 'init_scale',
    'data': """
        source tokenizer text_field seq_len batch_size packing mask_documents epochs
        validation_fraction invalid_utf8 prefetch cache_dir""",
    'train': """
        steps microbatches eval_every eval_batches checkpoint_every keep_last keep_best log_every
        on_divergence diagnose_every init_from trainable""",
    'mesh': 'run',
    'kernels': 'implementation run_axis',
}
SHORT = {f'{section}.{name}': name for section, names in _SHORT.items() for name in names.split()}


@functools.cache
def columns() -> Mapping[str, str]:
    """Returns the column of each config field: {'model.norm': 'norm', 'train.seed': 'train_seed',
    ...}.

    A field outside `SHORT` has its whole path: `norm` is model.norm, and `norm_groups` an option.
    """
    return {path: SHORT.get(path, path.replace('.', '_')) for path in FIELDS}


@functools.cache
def schema() -> pa.Schema:
    """Returns the schema of `cells.parquet`, which has a type for every column, also for empty
    ones.
    """
    kinds: dict[str, type] = dict(IDENTITY)
    for path, name in columns().items():
        kinds[name] = next(kind for kind in FIELDS[path].types if kind is not types.NoneType)
    kinds |= {column: kind for column, (_, kind) in RESULTS.items()}
    return pa.schema([(column, ARROW.get(kind, pa.string())) for column, kind in kinds.items()])


@functools.cache
def column_types() -> Mapping[str, pa.DataType]:
    """Returns {column: type} of `schema`, cached because each row needs it."""
    return {field.name: field.type for field in schema()}


def cast_to_column(path: Path, name: str, value: Any, kind: pa.DataType) -> Any:
    """Returns the value as the type of its column; None if it is not finite.

    Args:
      path: folder of the run, for the error.
      name: name of the column.
      value: value to be cast.
      kind: type of the column. A string column holds other values as JSON.

    Returns:
      The Python value.

    Raises:
      ValueError: if the column cannot hold the value.
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return None
    if _is_unchanged(value, kind):
        return value
    python = PYTHON[kind.id]
    if {type(value), python} == {int, float} and abs(value) <= 2**53 and python(value) == value:
        return python(value)  # Arrow would import pandas to do so, which takes half a second
    if kind == pa.string() and not isinstance(value, str):
        return json.dumps(value)
    try:
        cast = pa.scalar(value, kind).as_py()
        if cast != value or isinstance(value, bool):  # Arrow makes 0 of 0.5, and 1.0 of True
            raise ValueError(f'must be of type {python.__name__}')
        return cast
    except (pa.ArrowException, ValueError, TypeError, OverflowError) as error:
        raise ValueError(f'{path} cannot be read (its {name} is {value!r}: {error})') from error


def _is_unchanged(value: Any, kind: pa.DataType) -> bool:
    """Whether Arrow returns the value as it is; asking Arrow is most of the time of a row."""
    if type(value) is not PYTHON[kind.id]:
        return False
    if type(value) is int:
        return -(2**63) <= value < 2**63
    return type(value) is not str or value.isascii()  # others may have no UTF-8 form
