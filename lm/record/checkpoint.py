"""Checkpoints: written in the background, self-describing, strict when read.

Each holds three items: `weights` (parameters and what their reparametrisation carries), `training`
(step and optimizer), and `meta`, a JSON record with the config, the tree of parameter shapes, and
the counters that are not arrays.
"""

import contextlib
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp
from orbax.checkpoint.checkpoint_managers import AnyPreservationPolicy, BestN, LatestN

from lm.state import State, Weights
from modules.params import named_leaves

FOLDER = 'checkpoints'
DAMAGED = 'checkpoints_damaged'
BEST_BY = 'validation_ce'


# What reading an incomplete or corrupted checkpoint raises; running out of memory is not among it.
DAMAGE = (KeyError, OSError, TypeError, ValueError)


class TreeMismatch(ValueError):
    """A checkpoint of another model."""


def tree_record(tree: Any) -> dict[str, str]:
    """{'layers/mlp/up': 'float32[4,256,1024]', ...}."""
    return {
        path: f'{leaf.dtype}[{",".join(map(str, leaf.shape))}]'
        for path, leaf in named_leaves(tree).items()
    }


def state_record(state: State | Weights) -> dict[str, str]:
    """Of all that a model is run with."""
    return tree_record(state.params) | tree_record({'stats': state.stats})


def check_tree(stored: dict[str, str], wanted: dict[str, str], where: Path) -> None:
    """TreeMismatch that lists every missing, extra and reshaped parameter."""
    lines = [f'missing  {path} {wanted[path]}' for path in wanted.keys() - stored.keys()]
    lines += [f'extra    {path} {stored[path]}' for path in stored.keys() - wanted.keys()]
    lines += [
        f'differs  {path}: checkpoint {stored[path]}, model {wanted[path]}'
        for path in stored.keys() & wanted.keys()
        if stored[path] != wanted[path]
    ]
    if lines:
        listing = '\n  '.join(sorted(lines))
        raise TreeMismatch(f'checkpoint {where} does not fit the configured model:\n  {listing}')


class Checkpoints:
    """The checkpoints of one workdir: the `keep_last` newest and the `keep_best` of lowest loss."""

    def __init__(self, workdir: Path, keep_last: int, keep_best: int, say: Callable = print):
        self.workdir, self.say = Path(workdir), say
        policies = [LatestN(keep_last)]
        if keep_best:
            best = BestN(
                get_metric_fn=lambda metrics: metrics[BEST_BY],
                reverse=True,
                n=keep_best,
                keep_checkpoints_without_metrics=False,
            )
            policies.append(best)
        self._options = ocp.CheckpointManagerOptions(
            preservation_policy=AnyPreservationPolicy(policies)
        )
        self._open()

    def _open(self):
        self._manager = ocp.CheckpointManager(self.folder.absolute(), options=self._options)

    @property
    def folder(self) -> Path:
        return self.workdir / FOLDER

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, state: State, meta: dict[str, Any], metrics: dict[str, float] | None) -> None:
        """Starts writing; what is on the device may change as soon as this returns.

        Raises OSError where this one, or the one still being written, cannot be.
        """
        step = int(state.step)
        items = ocp.args.Composite(
            weights=ocp.args.StandardSave(_weights(state)),
            training=ocp.args.StandardSave(_training(state)),
            meta=ocp.args.JsonSave(meta | {'tree': state_record(state)}),
        )
        with self._explained():
            self._manager.save(step, args=items, metrics=metrics)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        try:
            yield
        except (OSError, ValueError, RuntimeError) as error:
            raise OSError(
                f'a checkpoint could not be written to {self.folder} ({_first_line(error)}). '
                f'Complete ones: {steps_in(self.folder)}. With room on the disk, the same command '
                'goes on from the newest.'
            ) from error

    def restore(self, shapes: State) -> tuple[State, dict[str, Any]] | None:
        """The newest checkpoint that can be read, laid out as `shapes`; None where there is none.

        One that cannot be read is moved to `checkpoints_damaged`, with a word, and the one before
        is taken. Raises TreeMismatch where the parameters do not fit, FileNotFoundError where all
        of several are damaged.
        """
        steps = self.steps()
        for step in reversed(steps):
            try:
                return self._restore_step(step, shapes)
            except TreeMismatch:
                raise
            except DAMAGE as error:
                self._set_aside(step, error)
        if steps:
            raise FileNotFoundError(
                f'none of the checkpoints {steps} in {self.folder} could be read; they are now in '
                f'{self.workdir / DAMAGED}. Move one back to try again, or give another --workdir.'
            )
        return None

    def _restore_step(self, step: int, shapes: State) -> tuple[State, dict[str, Any]]:
        path = self.folder / str(step)
        meta = read_meta(self.folder, step)
        check_tree(meta['tree'], state_record(shapes), path)
        items = _read(
            path,
            weights=_restore_weights(shapes),
            training=ocp.args.StandardRestore(_training(shapes)),
        )
        return State(**_complete(items['weights'], shapes), **items['training']), meta

    def _set_aside(self, step: int, error: Exception) -> None:
        self.say(
            f'checkpoint {self.folder / str(step)} cannot be read '
            f'({type(error).__name__}: {_first_line(error)}); '
            f'moved to {self.workdir / DAMAGED}, falling back to the one before'
        )
        if jax.process_index() == 0:
            target = self.workdir / DAMAGED / str(step)
            shutil.rmtree(target, ignore_errors=True)
            target.parent.mkdir(exist_ok=True)
            shutil.move(self.folder / str(step), target)
        self._manager.close()
        self._open()

    def wait(self) -> None:
        """Until all that was saved is on disk. Raises OSError where it cannot be written."""
        with self._explained():
            self._manager.wait_until_finished()

    def close(self) -> None:
        self._manager.close()


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [''])[0][:200]


def _weights(state: State | Weights) -> dict[str, Any]:
    """As a dict; without `stats` where layers carry nothing, as before there were any."""
    weights = {'params': state.params, 'reparam': state.reparam}
    return weights | ({'stats': state.stats} if state.stats else {})


def _restore_weights(shapes: State) -> ocp.args.CheckpointArgs:
    """How to read them. Where the reparametrisation carries no arrays, what is stored of it is left
    out: empty tuples, nested as it was chained by the version that wrote them.
    """
    weights = _weights(shapes)
    if jax.tree.leaves(weights['reparam']):
        return ocp.args.StandardRestore(weights)
    del weights['reparam']
    how = ocp.checkpoint_utils.construct_restore_args(weights)
    return ocp.args.PyTreeRestore(weights, how, partial_restore=True)


def _complete(weights: dict[str, Any], shapes: State) -> dict[str, Any]:
    """With what `_weights` and `_restore_weights` leave out."""
    return {'stats': {}, 'reparam': shapes.reparam} | weights


def _training(state: State) -> dict[str, Any]:
    return {'step': state.step, 'opt_state': state.opt_state}


def steps_in(folder: Path) -> list[int]:
    """The steps of the complete checkpoints in a folder, ascending."""
    return sorted(ocp.utils.checkpoint_steps(folder.absolute()))


def read_meta(folder: Path, step: int) -> dict[str, Any]:
    """The JSON record of one checkpoint."""
    return _read(folder / str(step), meta=ocp.args.JsonRestore())['meta']


def read_weights(folder: Path, step: int, shapes: State) -> Weights:
    """Those of one checkpoint, without its optimizer, laid out as `shapes`.

    TreeMismatch where they do not fit.
    """
    path = folder / str(step)
    check_tree(read_meta(folder, step)['tree'], state_record(shapes), path)
    weights = _read(path, weights=_restore_weights(shapes))['weights']
    return Weights(**_complete(weights, shapes))


def _read(path: Path, **items: Any):
    with ocp.Checkpointer(ocp.CompositeCheckpointHandler()) as reader:
        return reader.restore(path.absolute(), args=ocp.args.Composite(**items))
