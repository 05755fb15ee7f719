"""One checkpoint: self-describing, with digests of all it holds, strict when read.

It holds three items: `weights` (parameters, what their reparametrisation carries, and what is kept
of their average), `training` (step and optimizer), and `meta`, a JSON record with the config, the
tree of parameter shapes, the digests of all arrays, and the counters that are not arrays. The run's
series of them is `lm.record.checkpoints`.
"""

import contextlib
import errno
import functools
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
import orbax.checkpoint as ocp

from lm.config.recipe import Recipe
from lm.config.resolve import differences
from lm.launch.agreement import from_first, has_own_disks, is_first, raised_by_all
from lm.record import digests
from lm.record.digests import Damaged
from lm.record.via_process_0 import from_first_arrays, to_first
from lm.training.state import State, Weights
from modules.params import named_leaves

FOLDER = 'checkpoints'
# TensorStore, which reads and writes the arrays, takes these for patterns and separators.
NOT_IN_PATHS = '[]\\'
# What an error that says nothing of the checkpoint has as errno, or in its text.
NOT_DAMAGE = (errno.EMFILE, errno.ENFILE, errno.ENOMEM, errno.EACCES, errno.EPERM)
NOT_DAMAGE_WORDS = (
    'RESOURCE_EXHAUSTED',
    'PERMISSION_DENIED',
    'Too many open files',
    'Cannot allocate memory',
    'Permission denied',
)


MOST_SAID = 200  # characters of another library's error
# Sections whose fields decide which arrays there are.
OF_MODEL = ('model', 'norm', 'attention', 'mlp', 'reparam', 'optim')


class TreeMismatch(ValueError):
    """A checkpoint of another model."""


def check_path(path: Path) -> None:
    """ValueError where no checkpoint could be read back from `path` or below it."""
    found = sorted(set(NOT_IN_PATHS) & set(str(path.absolute())))
    if found:
        raise ValueError(
            f'{path.absolute()} holds {" and ".join(found)}, and checkpoints cannot be read from a '
            'path with one of [ ] \\. Give another --workdir.'
        )


def is_damage(error: Exception) -> bool:
    """Whether an error of reading says that the checkpoint is damaged, rather than that this
    process is short of something, or may not read it.

    Orbax and TensorStore raise errors of any type for files that are cut, changed or gone.
    """
    if isinstance(error, MemoryError | TreeMismatch) or getattr(error, 'errno', 0) in NOT_DAMAGE:
        return False
    return not any(words in str(error) for words in NOT_DAMAGE_WORDS)


@contextlib.contextmanager
def _damage_named(path: Path) -> Iterator[None]:
    """Turns errors that say a checkpoint is damaged, of whatever type, into Damaged."""
    try:
        yield
    except Exception as error:
        if not is_damage(error):
            raise
        first, *_ = str(error).strip().splitlines() or ['']
        kind = '' if isinstance(error, Damaged) else f'{type(error).__name__}: '
        raise Damaged(f'checkpoint {path} cannot be read ({kind}{first[:MOST_SAID]})') from error


def tree_record(tree: Any) -> dict[str, str]:
    """{'layers/mlp/up': 'float32[4,256,1024]', ...}."""
    return {
        path: f'{leaf.dtype}[{",".join(map(str, leaf.shape))}]'
        for path, leaf in named_leaves(tree).items()
    }


def state_record(state: State | Weights) -> dict[str, str]:
    """Of all that a model is run with, and of what is kept of its average."""
    average = state.average if isinstance(state, State) else {}
    return tree_record(state.params) | tree_record({'stats': state.stats, 'average': average})


def check_tree(
    stored: dict[str, str], wanted: dict[str, str], where: Path, of: str = 'model'
) -> None:
    """TreeMismatch that lists every missing, extra and reshaped array; of: what is configured."""
    lines = [f'missing  {path} {wanted[path]}' for path in wanted.keys() - stored.keys()]
    lines += [f'extra    {path} {stored[path]}' for path in stored.keys() - wanted.keys()]
    lines += [
        f'differs  {path}: checkpoint {stored[path]}, {of} {wanted[path]}'
        for path in stored.keys() & wanted.keys()
        if stored[path] != wanted[path]
    ]
    if lines:
        listing = '\n  '.join(sorted(lines))
        raise TreeMismatch(f'checkpoint {where} does not fit the configured {of}:\n  {listing}')


def fields_that_differ(there: Recipe, here: Recipe) -> str:
    """For the beginning of an error: the fields of the model in which two configs differ, a line
    each; '' where there are none.
    """
    changed = differences(there, here)
    lines = [
        f'  {name}: {a!r} -> {b!r}'
        for name, (a, b) in changed.items()
        if name.split('.')[0] in OF_MODEL
    ]
    return '\n'.join(['the model differs in (there -> here):', *lines, '']) if lines else ''


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, ascending."""
    return sorted(ocp.utils.checkpoint_steps(folder.absolute())) if folder.is_dir() else []


def items_of(state: State, meta: Mapping[str, Any]) -> ocp.args.Composite | None:
    """What is written of a run: its state, and `meta` with the digests of everything. Where process
    0 alone writes it, that has all arrays in its memory, and the others nothing.
    """
    weights, training = _weights(state), _training(state)
    arrays = {'weights': digests.of_arrays(weights), 'training': digests.of_arrays(training)}
    trees = {'tree': state_record(state), 'training_tree': tree_record(training)}
    record = {**meta, **trees, 'digests': arrays}
    if has_own_disks():
        weights, training = to_first((weights, training))
        if not is_first():
            return None
    return ocp.args.Composite(
        weights=ocp.args.StandardSave(weights),
        training=ocp.args.StandardSave(training),
        meta=ocp.args.JsonSave({'record': record, 'sha256': digests.of_record(record)}),
    )


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """The JSON record of one checkpoint; one of an older version has no 'digests'.

    Raises Damaged where it is not what was written.
    """
    with _damage_named(folder / str(step)):
        raw = _read(folder / str(step), meta=ocp.args.JsonRestore())['meta']
        if 'config' in raw and 'sha256' not in raw:
            return raw
        if set(raw) != {'record', 'sha256'} or digests.of_record(raw['record']) != raw['sha256']:
            raise Damaged('its record does not have the digest that it names')
        return raw['record']


def read_state(folder: Path, step: int, shapes: State) -> tuple[State, dict[str, Any]]:
    """The state of one checkpoint, laid out as `shapes`, and its meta; read by all processes.

    Raises TreeMismatch where the parameters or the optimizer's state do not fit, Damaged where
    anything is not what was written, on all processes if on one.
    """
    if has_own_disks():
        items, meta = _read_by_first(folder, step, shapes)
    else:
        with raised_by_all(Damaged):
            items, meta = _read_items(folder, step, shapes, {'training': _training(shapes)})
    _check_digests(folder / str(step), items, meta)
    return State(**_complete(items['weights'], shapes), **items['training']), meta


def _read_by_first(folder: Path, step: int, shapes: State) -> tuple[dict[str, Any], dict[str, Any]]:
    items, meta = {}, None
    with raised_by_all(TreeMismatch, Damaged):
        if is_first():
            whole = jax.tree.map(lambda s: np.broadcast_to(np.zeros((), s.dtype), s.shape), shapes)
            items, meta = _read_items(folder, step, whole, {'training': _training(whole)})
    wanted = {'weights': _stored_weights(shapes), 'training': _training(shapes)}
    return {
        name: from_first_arrays(items.get(name), item) for name, item in wanted.items()
    }, from_first(meta)


def read_weights(folder: Path, step: int, shapes: State) -> tuple[Weights, Any]:
    """Those of one checkpoint, without its optimizer, laid out as `shapes`, on devices of this
    process; and what is kept of their average.

    Raises as `read_state` does, of this process alone.
    """
    items, meta = _read_items(folder, step, shapes, {})
    _check_digests(folder / str(step), items, meta)
    found = _complete(items['weights'], shapes)
    average = found.pop('average')
    return Weights(**found), average


def _read_items(
    folder: Path, step: int, shapes: State, more: Mapping[str, Any]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The weights, and the items of `more` (shapes by name), with the meta; no other process is
    waited for. What does not fit is said of the model first: another model has another state of its
    optimizer too.
    """
    path, meta = folder / str(step), read_meta(folder, step)
    with _damage_named(path):
        check_tree(meta['tree'], state_record(shapes), path)
        if 'training' in more and 'training_tree' in meta:  # records of older versions lack it
            check_tree(meta['training_tree'], tree_record(more['training']), path, 'optimizer')
        restored = {name: ocp.args.StandardRestore(item) for name, item in more.items()}
        return _read(path, weights=_restore_weights(shapes), **restored), meta


def _check_digests(path: Path, items: Mapping[str, Any], meta: Mapping[str, Any]) -> None:
    """Of arrays over several processes all of these are needed, and all find the same."""
    with _damage_named(path):
        for name in ('weights', 'training'):
            if 'digests' in meta and items.get(name) is not None:
                digests.check_arrays(meta['digests'][name], items[name], name)


def _weights(state: State) -> dict[str, Any]:
    """As a dict; without `stats` where layers carry nothing, as before there were any, and without
    `average` where there is none.
    """
    weights = {'params': state.params, 'reparam': state.reparam}
    more = {'stats': state.stats, 'average': state.average}
    return weights | {name: tree for name, tree in more.items() if tree}


def _stored_weights(shapes: State) -> dict[str, Any]:
    """What is read of them. Where the reparametrisation carries no arrays, what is stored of it is
    left out: empty tuples, nested as it was chained by the version that wrote them.
    """
    weights = _weights(shapes)
    if not jax.tree.leaves(weights['reparam']):
        del weights['reparam']
    return weights


def _restore_weights(shapes: State) -> ocp.args.CheckpointArgs:
    weights = _stored_weights(shapes)
    if 'reparam' in weights:
        return ocp.args.StandardRestore(weights)
    how = ocp.checkpoint_utils.construct_restore_args(weights)
    return ocp.args.PyTreeRestore(weights, how, partial_restore=True)


def _complete(weights: dict[str, Any], shapes: State) -> dict[str, Any]:
    """With what `_weights` and `_restore_weights` leave out."""
    return {'stats': {}, 'average': {}, 'reparam': shapes.reparam} | weights


def _training(state: State) -> dict[str, Any]:
    return {'step': state.step, 'opt_state': state.opt_state}


def _read(path: Path, **items: Any):
    """Each process reads what its own devices hold, and says by itself whether that can be read:
    Orbax would have it wait for one that cannot.
    """
    _ignore_late_reads()
    own = ocp.options.MultiprocessingOptions(
        primary_host=jax.process_index(), active_processes={jax.process_index()}
    )
    handler = ocp.CompositeCheckpointHandler(
        composite_options=ocp.CompositeOptions(multiprocessing_options=own)
    )
    with ocp.Checkpointer(handler, multiprocessing_options=own) as reader:
        return reader.restore(path.absolute(), args=ocp.args.Composite(**items))


@functools.cache  # once a process
def _ignore_late_reads() -> None:
    """When one array cannot be read, the reads of others, still under way, report to an event loop
    that Orbax has closed: a traceback each, long after the error that tells of it.
    """
    before = sys.unraisablehook

    def hook(unraisable):
        if str(unraisable.exc_value) != 'Event loop is closed':
            before(unraisable)

    sys.unraisablehook = hook
