"""A checkpoint: self-describing, with digests of its content, and checked strictly when it is read.

A checkpoint has three items: `weights` (parameters, the state of their reparametrisation, and their
average), `training` (step, optimizer and watched metrics), and `meta`, a JSON record with the
config, the tree of parameter shapes, the digests of all arrays, and the counters that are not
arrays.
"""

import contextlib
import errno
import functools
import json
import os
import re
import sys
from collections.abc import Generator, Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from lm.config.recipe import Recipe
from lm.config.resolve import differences
from lm.launch.distributed import broadcast_from_first, has_private_disks, is_first, raise_on_all
from lm.record import digests
from lm.record.digests import DamagedCheckpoint
from lm.record.names import CHECKPOINTS
from lm.record.packing import store_packed, stored_shapes, unpack_params
from lm.record.run import Run
from lm.record.via_process_0 import gather_to_first, scatter_from_first
from lm.storage.files import first_line
from lm.training.state import State, Weights
from modules.params import named_leaves

FOLDER = CHECKPOINTS
PACKED = 'packed'  # in the record: {path: how to unpack a parameter}
# Errors with these numbers, or messages in their text, have causes outside the checkpoint.
ENVIRONMENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
ENVIRONMENT_MESSAGES = (
    'RESOURCE_EXHAUSTED',
    'PERMISSION_DENIED',
    *map(os.strerror, ENVIRONMENT_ERRNOS),
)
MAX_ERROR_CHARS = 200  # characters of another library's error
# The fields of these sections determine which arrays a checkpoint has.
WEIGHT_SECTIONS = ('model', 'norm', 'attention', 'mlp', 'reparam')
STATE_SECTIONS = (*WEIGHT_SECTIONS, 'optim')


class TreeMismatch(ValueError):
    """The checkpoint belongs to another model."""


def is_damage(error: Exception) -> bool:
    """Returns whether a read error means damage, not a lack of memory, descriptors or rights."""
    # Orbax and TensorStore raise errors of any type for truncated, changed or missing files.
    if (
        isinstance(error, MemoryError | TreeMismatch)
        or getattr(error, 'errno', 0) in ENVIRONMENT_ERRNOS
    ):
        return False
    return not any(message in str(error) for message in ENVIRONMENT_MESSAGES)


@contextlib.contextmanager
def _translate_damage(path: Path) -> Generator[None]:
    """Raises errors of any type that mean damage as DamagedCheckpoint."""
    try:
        yield
    except Exception as error:
        if not is_damage(error):
            raise
        kind = '' if isinstance(error, DamagedCheckpoint) else f'{type(error).__name__}: '
        raise DamagedCheckpoint(
            f'checkpoint {path} cannot be read ({kind}{first_line(error, MAX_ERROR_CHARS)})'
        ) from error


def tree_record(tree: Any) -> dict[str, str]:
    """Returns {'layers/mlp/up': 'float32[4,256,1024]', ...}."""
    leaves = named_leaves(tree).items()
    return {path: f'{x.dtype}[{",".join(map(str, x.shape))}]' for path, x in leaves}


def state_record(state: State | Weights) -> dict[str, str]:
    """Returns the `tree_record` of the arrays that a model computes with, and of their average."""
    average = state.average if isinstance(state, State) else {}
    return tree_record(state.params) | tree_record({'stats': state.stats, 'average': average})


def training_record(state: State) -> dict[str, str]:
    """Returns the `tree_record` of the arrays that only training needs."""
    return tree_record(_training(state))


def check_tree(
    stored: dict[str, str], expected: dict[str, str], checkpoint_path: Path, subject: str = 'model'
) -> None:
    """Raises TreeMismatch if a checkpoint's tree differs from the configured one.

    Args:
      stored: the `tree_record` in the checkpoint.
      expected: the `tree_record` that follows from the config.
      checkpoint_path: path of the checkpoint, for the error.
      subject: the part that is configured, 'model' or 'optimizer', for the error.

    Raises:
      TreeMismatch: lists every missing, extra and reshaped array.
    """
    lines = [f'missing  {path} {expected[path]}' for path in expected.keys() - stored.keys()]
    lines += [f'extra    {path} {stored[path]}' for path in stored.keys() - expected.keys()]
    lines += [
        f'differs  {path}: checkpoint {stored[path]}, {subject} {expected[path]}'
        for path in stored.keys() & expected.keys()
        if stored[path] != expected[path]
    ]
    if lines:
        listing = '\n  '.join(sorted(lines))
        raise TreeMismatch(
            f'checkpoint {checkpoint_path} does not fit the configured {subject}:\n  {listing}'
        )


def format_differences(
    stored: Recipe, current: Recipe, sections: Sequence[str] = STATE_SECTIONS
) -> str:
    """Formats the fields that differ between two recipes, as lines of an error.

    Args:
      stored: the recipe of the checkpoint.
      current: the recipe of this run.
      sections: the sections to compare.

    Returns:
      A headline and one line for each field, or '' if no field differs.
    """
    changed = differences(stored, current).items()
    relevant = [(name, values) for name, values in changed if name.split('.')[0] in sections]
    lines = [f'  {name}: {a!r} -> {b!r}' for name, (a, b) in relevant]
    return '\n'.join(['the model differs in (there -> here):', *lines, '']) if lines else ''


def name_checkpoint(path: str | Path) -> str:
    """Returns RUN@STEP, a folder or a URL, as RUN/checkpoints/STEP; other paths as they are."""
    text = str(path)
    match = re.fullmatch(r'(.+)@(\d+)', text.rstrip('/'))
    if match is None or Path(text).exists():
        return text
    return f'{match[1].rstrip("/")}/{FOLDER}/{int(match[2])}'


def list_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, ascending."""
    return sorted(ocp.utils.checkpoint_steps(folder.absolute())) if folder.is_dir() else []


def build_items(state: State, meta: Mapping[str, Any]) -> ocp.args.Composite | None:
    """Returns the Orbax items of a checkpoint; None if process 0 writes the arrays of this process.

    Args:
      state: the state to save.
      meta: the record to save beside it; digests and trees are added.
    """
    stored_params, packed = store_packed(state.params)
    weights, training = _weights(state.replace(params=stored_params)), _training(state)
    # Before process 0 gathers the arrays: each process hashes the parts that it holds.
    array_digests = {
        'weights': digests.hash_arrays(weights),
        'training': digests.hash_arrays(training),
    }
    trees = {'tree': state_record(state), 'training_tree': training_record(state)}
    record = {**meta, **trees, 'digests': array_digests}
    record.pop(PACKED, None)  # of the checkpoint that the record was copied from
    if packed:
        record[PACKED] = packed
    if has_private_disks():
        weights, training = gather_to_first((weights, training))
        if not is_first():
            return None
    return ocp.args.Composite(
        weights=ocp.args.StandardSave(weights),
        training=ocp.args.StandardSave(training),
        meta=ocp.args.JsonSave({'record': record, 'sha256': digests.hash_record(record)}),
    )


def read_config(folder: Path, step: int) -> dict[str, Any]:
    """Returns the config that a run had at a checkpoint, without starting JAX.

    It is that of config.json if the checkpoint's cannot be read.
    """
    try:
        return json.loads((folder / str(step) / 'meta' / 'metadata').read_text())['record'][
            'config'
        ]
    except (OSError, ValueError, KeyError, TypeError):
        return Run(folder.parent).read_config()


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """Returns the record of a checkpoint. Older versions wrote records without digests."""
    with _translate_damage(folder / str(step)):
        raw = read_items(folder / str(step), meta=ocp.args.JsonRestore())['meta']
        if 'config' in raw and 'sha256' not in raw:
            return raw
        if set(raw) != {'record', 'sha256'} or digests.hash_record(raw['record']) != raw['sha256']:
            raise DamagedCheckpoint('its record does not match its digest')
        return raw['record']


def read_state(folder: Path, step: int, shapes: State) -> tuple[State, dict[str, Any]]:
    """Reads a state; all processes must call it.

    Args:
      folder: the folder of checkpoints.
      step: the step of the checkpoint.
      shapes: shapes, types and shardings of the state.

    Returns:
      (state, meta), with the arrays sharded like `shapes`.

    Raises:
      TreeMismatch: if the parameters or the optimizer state do not fit.
      DamagedCheckpoint: if the content has changed since it was written. An error of one process is
        raised by all.
    """
    weight_shapes = _stored_weights(shapes)
    if has_private_disks():
        items, meta = {}, None
        with raise_on_all(TreeMismatch, DamagedCheckpoint):
            if is_first():
                # NumPy arrays make Orbax restore to the host; broadcast views of one zero take no
                # memory.
                zeros = jax.tree.map(
                    lambda s: np.broadcast_to(np.zeros((), s.dtype), s.shape), shapes
                )
                items, meta = _read_state_items(folder, step, zeros)
        meta = broadcast_from_first(meta)
        targets = {'weights': _packed_shapes(weight_shapes, meta), 'training': _training(shapes)}
        items = {
            name: scatter_from_first(items.get(name), target) for name, target in targets.items()
        }
    else:
        with raise_on_all(DamagedCheckpoint):
            items, meta = _read_state_items(folder, step, shapes)
    # Outside of `raise_on_all`: digests are sums over the devices of all processes, which get the
    # same result and raise together.
    _check_digests(folder / str(step), items, meta)
    weights = _unpack(items['weights'], weight_shapes, meta)
    return State(**_fill_missing(weights, shapes), **items['training']), meta


def read_weights(folder: Path, step: int, shapes: State) -> tuple[Weights, Any]:
    """Reads the weights of a checkpoint and their average, as `read_state` reads a state.

    If the arrays are sharded over the devices of several processes, all of these must call it;
    otherwise only this process does.

    Args:
      folder: the folder of checkpoints.
      step: the step of the checkpoint.
      shapes: shapes, types and shardings of the state.

    Returns:
      (weights, average).
    """
    is_local = all(leaf.sharding.is_fully_addressable for leaf in jax.tree.leaves(shapes))
    with contextlib.nullcontext() if is_local else raise_on_all(TreeMismatch, DamagedCheckpoint):
        items, meta = _read_state_items(folder, step, shapes, with_training=False)
    _check_digests(folder / str(step), items, meta)
    weights = _unpack(items['weights'], _stored_weights(shapes), meta)
    fields = _fill_missing(weights, shapes)
    average = fields.pop('average')
    return Weights(**fields), average


def _read_state_items(
    folder: Path, step: int, shapes: State, with_training: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns (items, meta) of a checkpoint, without waiting for other processes."""
    path, meta = folder / str(step), read_meta(folder, step)
    weights = _stored_weights(shapes)
    with _translate_damage(path):
        # The model is checked first: another model's optimizer state would differ as well.
        check_tree(meta['tree'], state_record(shapes), path)
        weights = _packed_shapes(weights, meta)
        items = {'weights': ocp.args.StandardRestore(weights)}
        if 'reparam' not in weights:
            # StandardRestore demands the whole tree. Without `reparam` only a part of it is read.
            restore_args = ocp.checkpoint_utils.construct_restore_args(weights)
            items['weights'] = ocp.args.PyTreeRestore(weights, restore_args, partial_restore=True)
        if with_training:
            training = _training(shapes)
            if 'training_tree' in meta:  # records of older versions lack it
                check_tree(meta['training_tree'], tree_record(training), path, 'optimizer')
            items['training'] = ocp.args.StandardRestore(training)
        return read_items(path, **items), meta


def _check_digests(path: Path, items: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Raises DamagedCheckpoint if a digest differs.

    All processes that hold parts of the arrays must call it.
    """
    with _translate_damage(path):
        for name in ('weights', 'training'):
            if 'digests' in meta and items.get(name) is not None:
                digests.check_arrays(meta['digests'][name], items[name], name)


def _weights(state: State) -> dict[str, Any]:
    """Returns the weights as a dict, without `stats` and `average` if they are empty."""
    weights = {'params': state.params, 'reparam': state.reparam}
    optional = {'stats': state.stats, 'average': state.average}
    return weights | {name: tree for name, tree in optional.items() if tree}


def _stored_weights(shapes: State) -> dict[str, Any]:
    weights = _weights(shapes)
    # A reparametrisation without arrays is stored as nested empty tuples, with a nesting that
    # depends on the version that wrote it.
    if not jax.tree.leaves(weights['reparam']):
        del weights['reparam']
    return weights


def _packed_shapes(weights: dict[str, Any], meta: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the shapes of weights as they are stored, some of them packed."""
    return weights | {'params': stored_shapes(weights['params'], meta.get(PACKED, {}))}


def _unpack(
    weights: dict[str, Any], shapes: dict[str, Any], meta: Mapping[str, Any]
) -> dict[str, Any]:
    """Returns stored weights with unpacked parameters."""
    params = unpack_params(weights['params'], shapes['params'], meta.get(PACKED, {}))
    return weights | {'params': params}


def _fill_missing(weights: dict[str, Any], shapes: State) -> dict[str, Any]:
    """Adds the entries that `_weights` and `_stored_weights` leave out."""
    return {'stats': {}, 'average': {}, 'reparam': shapes.reparam} | weights


def _training(state: State) -> dict[str, Any]:
    # Only runs that skip spikes have a window of watched metrics.
    watched = {'watched': state.watched} if jax.tree.leaves(state.watched) else {}
    return {'step': state.step, 'opt_state': state.opt_state, **watched}


def read_items(path: Path, **items: Any) -> Any:
    """Reads items of a checkpoint, without waiting for other processes.

    Only the parts on this process's devices are read. A file that is not regular raises
    DamagedCheckpoint: reading a pipe would never end.
    """
    for file in path.rglob('*'):
        if not (file.is_file() or file.is_dir()):
            raise DamagedCheckpoint(f'{file} is not a regular file')
    ignore_late_callbacks()
    # As the only active process: Orbax would otherwise wait for all processes at its barriers.
    multiprocessing = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=multiprocessing)
    )
    with ocp.Checkpointer(handler, multiprocessing_options=multiprocessing) as reader:
        return reader.restore(path.absolute(), args=ocp.args.Composite(**items))


@functools.cache  # once per process
def ignore_late_callbacks() -> None:
    """Silences callbacks of reads and writes that finish after an error.

    They report to an event loop that Orbax has closed after an error, such as a full disk, which
    prints a traceback for each array.
    """
    previous_hook = sys.unraisablehook

    def hook(unraisable):
        if str(unraisable.exc_value) != 'Event loop is closed':
            previous_hook(unraisable)

    sys.unraisablehook = hook
