"""One checkpoint: self-describing, with digests of all it holds, strict when read.

It holds three items: `weights` (parameters, the state of their reparametrisation, and their
average), `training` (step and optimizer), and `meta`, a JSON record with the config, the tree of
parameter shapes, the digests of all arrays, and the counters that are not arrays.
"""

import contextlib
import errno
import functools
import os
import sys
from collections.abc import Iterator, Mapping, Sequence
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
from lm.record.via_process_0 import gather_to_first, scatter_from_first
from lm.storage.files import first_line
from lm.training.state import State, Weights
from modules.params import named_leaves

FOLDER = 'checkpoints'
FORBIDDEN_IN_PATHS = '[]\\'  # TensorStore takes these for patterns and separators
# Errors with these numbers, or words in their text, say nothing of the checkpoint.
ENVIRONMENT_ERRNOS = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
ENVIRONMENT_MESSAGES = (
    'RESOURCE_EXHAUSTED',
    'PERMISSION_DENIED',
    *map(os.strerror, ENVIRONMENT_ERRNOS),
)
MAX_ERROR_CHARS = 200  # characters of another library's error
# Sections whose fields decide which arrays there are.
WEIGHT_SECTIONS = ('model', 'norm', 'attention', 'mlp', 'reparam')
STATE_SECTIONS = (*WEIGHT_SECTIONS, 'optim')


class TreeMismatch(ValueError):
    """The checkpoint is of another model."""


def check_path(path: Path) -> None:
    """Raises ValueError if no checkpoint could be written to `path`, or read back from there."""
    try:
        str(path.absolute()).encode()
    except UnicodeEncodeError as error:
        raise ValueError(
            f'{str(path.absolute())!a} is not UTF-8, and checkpoints cannot be written to such a '
            'path. Give another --workdir.'
        ) from error
    if found := sorted(set(FORBIDDEN_IN_PATHS) & set(str(path.absolute()))):
        raise ValueError(
            f'{path.absolute()} holds {" and ".join(found)}, and checkpoints cannot be read from a '
            'path with one of [ ] \\. Give another --workdir.'
        )


def is_damage(error: Exception) -> bool:
    """Whether an error of reading means damage, and not a lack of memory, descriptors or rights."""
    # Orbax and TensorStore raise errors of any type for files that are cut, changed or gone.
    if (
        isinstance(error, MemoryError | TreeMismatch)
        or getattr(error, 'errno', 0) in ENVIRONMENT_ERRNOS
    ):
        return False
    return not any(words in str(error) for words in ENVIRONMENT_MESSAGES)


@contextlib.contextmanager
def _translate_damage(path: Path) -> Iterator[None]:
    """Turns errors that mean damage, of whatever type, into DamagedCheckpoint."""
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
    """Returns the `tree_record` of all that a model is run with, and of its average."""
    average = state.average if isinstance(state, State) else {}
    return tree_record(state.params) | tree_record({'stats': state.stats, 'average': average})


def check_tree(
    stored: dict[str, str], expected: dict[str, str], checkpoint_path: Path, subject: str = 'model'
) -> None:
    """Raises TreeMismatch with every missing, extra and reshaped array; of: what is configured."""
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
    """Returns lines of an error: the fields of these sections that differ, or ''."""
    changed = differences(stored, current).items()
    of_model = [(name, both) for name, both in changed if name.split('.')[0] in sections]
    lines = [f'  {name}: {a!r} -> {b!r}' for name, (a, b) in of_model]
    return '\n'.join(['the model differs in (there -> here):', *lines, '']) if lines else ''


def list_steps(folder: Path) -> list[int]:
    """Returns the steps of the complete checkpoints in a folder, ascending."""
    return sorted(ocp.utils.checkpoint_steps(folder.absolute())) if folder.is_dir() else []


def build_items(state: State, meta: Mapping[str, Any]) -> ocp.args.Composite | None:
    """Returns state and `meta` with digests; None on a process whose arrays process 0 writes."""
    weights, training = _weights(state), _training(state)
    arrays = {'weights': digests.hash_arrays(weights), 'training': digests.hash_arrays(training)}
    trees = {'tree': state_record(state), 'training_tree': tree_record(training)}
    record = {**meta, **trees, 'digests': arrays}
    if has_private_disks():
        weights, training = gather_to_first((weights, training))
        if not is_first():
            return None
    return ocp.args.Composite(
        weights=ocp.args.StandardSave(weights),
        training=ocp.args.StandardSave(training),
        meta=ocp.args.JsonSave({'record': record, 'sha256': digests.hash_record(record)}),
    )


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """Returns the record of one checkpoint; of an older version it may lack digests."""
    with _translate_damage(folder / str(step)):
        raw = read_items(folder / str(step), meta=ocp.args.JsonRestore())['meta']
        if 'config' in raw and 'sha256' not in raw:
            return raw
        if set(raw) != {'record', 'sha256'} or digests.hash_record(raw['record']) != raw['sha256']:
            raise DamagedCheckpoint('its record does not have the digest that it names')
        return raw['record']


def read_state(folder: Path, step: int, shapes: State) -> tuple[State, dict[str, Any]]:
    """Returns the state of one checkpoint, laid out as `shapes`, and its meta; called by all.

    Raises TreeMismatch if the parameters or the optimizer's state do not fit, DamagedCheckpoint if
    anything is not what was written, on all processes if on one.
    """
    if has_private_disks():
        items, meta = {}, None
        with raise_on_all(TreeMismatch, DamagedCheckpoint):
            if is_first():
                zero = jax.tree.map(
                    lambda s: np.broadcast_to(np.zeros((), s.dtype), s.shape), shapes
                )
                items, meta = _read_state_items(folder, step, zero)
        wanted = {'weights': _stored_weights(shapes), 'training': _training(shapes)}
        items = {name: scatter_from_first(items.get(name), item) for name, item in wanted.items()}
        meta = broadcast_from_first(meta)
    else:
        with raise_on_all(DamagedCheckpoint):
            items, meta = _read_state_items(folder, step, shapes)
    _check_digests(folder / str(step), items, meta)
    return State(**_fill_missing(items['weights'], shapes), **items['training']), meta


def read_weights(folder: Path, step: int, shapes: State) -> tuple[Weights, Any]:
    """Returns weights and their average as `read_state` does.

    Where the arrays lie on devices of several processes, all must call it; otherwise it is for this
    process alone.
    """
    is_own = all(leaf.sharding.is_fully_addressable for leaf in jax.tree.leaves(shapes))
    with contextlib.nullcontext() if is_own else raise_on_all(TreeMismatch, DamagedCheckpoint):
        items, meta = _read_state_items(folder, step, shapes, with_training=False)
    _check_digests(folder / str(step), items, meta)
    found = _fill_missing(items['weights'], shapes)
    average = found.pop('average')
    return Weights(**found), average


def _read_state_items(
    folder: Path, step: int, shapes: State, with_training: bool = True
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Returns the items and the meta of a checkpoint, without waiting for other processes."""
    path, meta = folder / str(step), read_meta(folder, step)
    weights = _stored_weights(shapes)
    with _translate_damage(path):
        # The model first: another model has another state of its optimizer too.
        check_tree(meta['tree'], state_record(shapes), path)
        items = {'weights': ocp.args.StandardRestore(weights)}
        if 'reparam' not in weights:
            how = ocp.checkpoint_utils.construct_restore_args(weights)
            items['weights'] = ocp.args.PyTreeRestore(weights, how, partial_restore=True)
        if with_training:
            training = _training(shapes)
            if 'training_tree' in meta:  # records of older versions lack it
                check_tree(meta['training_tree'], tree_record(training), path, 'optimizer')
            items['training'] = ocp.args.StandardRestore(training)
        return read_items(path, **items), meta


def _check_digests(path: Path, items: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Raises DamagedCheckpoint if a digest differs; called by all that hold parts of the arrays."""
    with _translate_damage(path):
        for name in ('weights', 'training'):
            if 'digests' in meta and items.get(name) is not None:
                digests.check_arrays(meta['digests'][name], items[name], name)


def _weights(state: State) -> dict[str, Any]:
    """Returns the weights as a dict, without `stats` and `average` if they are empty."""
    weights = {'params': state.params, 'reparam': state.reparam}
    more = {'stats': state.stats, 'average': state.average}
    return weights | {name: tree for name, tree in more.items() if tree}


def _stored_weights(shapes: State) -> dict[str, Any]:
    weights = _weights(shapes)
    # A reparametrisation without arrays is stored as empty tuples, nested as the version that wrote
    # them chained it.
    if not jax.tree.leaves(weights['reparam']):
        del weights['reparam']
    return weights


def _fill_missing(weights: dict[str, Any], shapes: State) -> dict[str, Any]:
    """Adds what `_weights` and `_stored_weights` leave out."""
    return {'stats': {}, 'average': {}, 'reparam': shapes.reparam} | weights


def _training(state: State) -> dict[str, Any]:
    return {'step': state.step, 'opt_state': state.opt_state}


def read_items(path: Path, **items: Any):
    """Reads the part of this process's devices, or raises, without waiting for other processes.
    A pipe among the files would be read for ever.
    """
    for file in path.rglob('*'):
        if not (file.is_file() or file.is_dir()):
            raise DamagedCheckpoint(f'{file} is no regular file')
    ignore_late_callbacks()
    own = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=own)
    )
    with ocp.Checkpointer(handler, multiprocessing_options=own) as reader:
        return reader.restore(path.absolute(), args=ocp.args.Composite(**items))


@functools.cache  # once a process
def ignore_late_callbacks() -> None:
    """Silences late reads and writes, which report to an event loop that Orbax has closed after an
    error, such as that of a full disk: a traceback for each array.
    """
    before = sys.unraisablehook

    def hook(unraisable):
        if str(unraisable.exc_value) != 'Event loop is closed':
            before(unraisable)

    sys.unraisablehook = hook
