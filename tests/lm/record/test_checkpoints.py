"""The checkpoints of a run: retention, fallbacks after damage, and resources used for writing."""

import functools
import os
import sys
import threading
import time
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.record import checkpoint, checkpoints
from lm.record.checkpoint import TreeMismatch, is_damage, read_meta
from lm.record.checkpoints import MAX_WRITERS, Checkpoints, ClockJump
from lm.record.workdir import check_path
from lm.storage.files import sync
from lm.training.state import State

META = {'config': {}, 'counters': {'best': {}}}


def state(step: int) -> State:
    """Returns a small state that differs in each step."""
    params = {'mlp': {'up': jnp.arange(12.0).reshape(3, 4) + step, 'down': jnp.ones((4, 3)) * step}}
    return State(
        jnp.int32(step), params, (), {}, (jax.tree.map(lambda x: x / 3, params), jnp.int32(step))
    )


def shapes() -> State:
    sharding = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding),
        jax.tree.map(jnp.asarray, state(0)),
    )


def write(workdir, losses, keep_last=2, keep_best=1, say=print) -> Checkpoints:
    """Writes a checkpoint for each {step: validation loss or None}."""
    checkpoints = Checkpoints(workdir, keep_last, keep_best, say)
    for step, loss in losses.items():
        checkpoints.save(state(step), META, loss)
    checkpoints.wait()
    return checkpoints


def assert_is(checkpoint, step: int) -> None:
    actual, _ = checkpoint
    assert int(actual.step) == step
    jax.tree.map(np.testing.assert_array_equal, actual.params, state(step).params)
    jax.tree.map(np.testing.assert_array_equal, actual.opt_state, state(step).opt_state)


def test_last_and_best_checkpoints_survive_resume(tmp_path):
    write(tmp_path, {1: 2.0, 2: None, 3: 3.0, 4: 2.5}).close()
    resumed = write(tmp_path, {5: None, 6: 4.0})
    assert resumed.steps() == [1, 5, 6]
    resumed.save(state(7), META, 1.0)
    resumed.save(state(8), META, None)
    resumed.save(state(9), META, float('nan'))
    resumed.wait()
    assert resumed.steps() == [7, 8, 9]


def test_best_checkpoint_is_read_from_old_counters(tmp_path):
    older = META | {'counters': {'best': {'best_step': 1, 'best_validation_ce': 2.0}}}
    checkpoints = Checkpoints(tmp_path, 2, 1)
    checkpoints.save(state(1), META, None)
    checkpoints.save(state(2), older, None)
    checkpoints.close()
    assert write(tmp_path, {3: 3.0}, keep_last=1).steps() == [1, 3]


def test_model_mismatch_is_not_damage(tmp_path):
    checkpoints = write(tmp_path, {1: None})
    other_shapes = shapes().replace(params={'mlp': {'up': shapes().params['mlp']['up']}})
    with pytest.raises(TreeMismatch):
        checkpoints.restore(other_shapes)
    assert checkpoints.steps() == [1]


def test_optimizer_mismatch_is_not_damage(tmp_path):
    """Catches a checkpoint that is moved away because the config has changed."""
    checkpoints = write(tmp_path, {1: None})
    for opt_state in ({'other': shapes().step}, jax.tree.map(wider, shapes().opt_state)):
        with pytest.raises(TreeMismatch, match='does not fit the configured optimizer'):
            checkpoints.restore(shapes().replace(opt_state=opt_state))
    assert checkpoints.steps() == [1] and checkpoints.restore(shapes()) is not None


def wider(leaf):
    return jax.ShapeDtypeStruct((*leaf.shape, 2), leaf.dtype)


def test_damaged_checkpoint_is_replaced_by_previous(tmp_path):
    messages = []
    checkpoints = write(tmp_path, {1: None, 2: None}, say=messages.append)
    for path in (tmp_path / 'checkpoints' / '2' / 'weights').rglob('*'):
        if path.is_file():
            path.unlink()
    assert_is(checkpoints.restore(shapes()), 1)
    (message,) = messages
    assert 'checkpoints/2 cannot be read' in message and 'falling back' in message
    assert checkpoints.damaged_steps() == [2] and checkpoints.steps() == [1]
    assert write(tmp_path, {2: None}).steps() == [1, 2]


def test_newest_intact_checkpoint_is_found_in_place(tmp_path):
    checkpoints = write(tmp_path, {1: None, 2: None})
    assert checkpoints.find_newest_intact(shapes()) == tmp_path / 'checkpoints' / '2'
    os.truncate(tmp_path / 'checkpoints' / '2' / 'meta' / 'metadata', 5)
    assert checkpoints.find_newest_intact(shapes()) == tmp_path / 'checkpoints' / '1'
    assert checkpoints.steps() == [1, 2]


@pytest.mark.parametrize(
    'error',
    [
        OSError(24, 'Too many open files'),
        PermissionError(13, 'Permission denied'),
        MemoryError(),
        ValueError('RESOURCE_EXHAUSTED: Too many open files'),
        TreeMismatch('of another model'),
    ],
    ids=str,
)
def test_missing_resources_are_not_damage(tmp_path, monkeypatch, error):
    checkpoints = write(tmp_path, {1: None})

    def fail(*_):
        raise error

    monkeypatch.setattr('lm.record.checkpoints.read_state', fail)
    with pytest.raises(type(error)):
        checkpoints.restore(shapes())
    assert checkpoints.steps() == [1] and not is_damage(error)


def test_late_callbacks_are_silenced(tmp_path, monkeypatch):
    """TensorStore reports to an event loop that Orbax has closed: a traceback for each array."""
    reported = []
    monkeypatch.setattr(sys, 'unraisablehook', reported.append)
    checkpoint.ignore_late_callbacks.cache_clear()
    write(tmp_path, {1: None}).close()
    late_error, other_error = (
        SimpleNamespace(exc_value=RuntimeError(message))
        for message in ('Event loop is closed', 'else')
    )
    sys.unraisablehook(late_error)
    sys.unraisablehook(other_error)
    checkpoint.ignore_late_callbacks.cache_clear()  # the hook goes with this test
    assert reported == [other_error]


def test_device_without_memory_is_not_disk_error(tmp_path, monkeypatch):
    def save(*_, **__):
        raise jax.errors.JaxRuntimeError('RESOURCE_EXHAUSTED: Out of memory allocating 9 bytes.')

    monkeypatch.setattr(checkpoint.ocp.CheckpointManager, 'save', save)
    with pytest.raises(jax.errors.JaxRuntimeError, match='Out of memory'):
        write(tmp_path, {1: None})


@pytest.mark.full
def test_writer_threads_and_open_files_are_limited(tmp_path):
    threads, files = threading.active_count(), len(os.listdir('/proc/self/fd'))
    runs = [write(tmp_path / str(i), {1: 1.0}) for i in range(3 * MAX_WRITERS)]
    assert threading.active_count() - threads <= 2 * MAX_WRITERS
    assert len(os.listdir('/proc/self/fd')) - files <= MAX_WRITERS
    for i, run in enumerate(runs):
        run.save(state(2), META, None)
        run.wait()
        assert run.steps() == [1, 2], i
        run.close()
    assert threading.active_count() <= threads + 1


def test_late_write_failure_is_raised_by_its_run(tmp_path, monkeypatch):
    first = write(tmp_path / 'first', {1: None})

    def fail(*_):
        raise ValueError('no space left on device')

    monkeypatch.setattr(first._manager, 'close', fail)
    writers = [write(tmp_path / str(i), {1: None}) for i in range(MAX_WRITERS)]
    assert [writer.steps() for writer in writers] == [[1]] * MAX_WRITERS
    with pytest.raises(OSError, match='no space left'):
        first.save(state(2), META, None)
    for writer in writers:
        writer.close()


@pytest.mark.parametrize('jump_sec', [50_000.0, -50_000.0])
def test_clock_jump_costs_one_checkpoint_at_most(jump_sec, tmp_path, monkeypatch):
    """A jump ahead ends the time limits of Orbax, one back does not."""
    lines, jumped_sec = [], [0.0]
    monkeypatch.setattr(time, 'time', lambda time=time.time: time() + jumped_sec[0])
    checkpoints = write(tmp_path, {1: None}, keep_last=3, say=lines.append)
    checkpoints.save(state(2), META, None)
    jumped_sec[0] = jump_sec
    checkpoints.save(state(3), META, None)
    checkpoints.close()
    assert checkpoints.steps() == ([1, 3] if lines else [1, 2, 3])
    assert not lines or lines == [
        'NOTE: there is no checkpoint of step 2: while it was being written, the clock of this '
        'machine jumped by 50,000 s'
    ]


def test_save_continues_after_clock_jump(tmp_path, monkeypatch):
    """The next checkpoint is written, and by a manager that does not know the error."""
    lines = []
    checkpoints = write(tmp_path, {1: None}, keep_last=3, say=lines.append)

    def fail(manager):
        monkeypatch.undo()
        monkeypatch.setattr(time, 'time', lambda time=time.time: time() - 100)
        monkeypatch.setattr(manager, 'close', functools.partial(fail, manager))
        raise TimeoutError('too late')

    monkeypatch.setattr(type(checkpoints._manager), 'wait_until_finished', fail)
    checkpoints.save(state(2), META, None)
    checkpoints.close()
    assert checkpoints.steps() == [1, 2]
    assert lines == [
        'NOTE: there is no checkpoint of step 1: while it was being written, the clock of this '
        'machine jumped by -100 s'
    ]


def test_clock_jump_in_last_checkpoint_is_an_error(tmp_path, monkeypatch):
    checkpoints = Checkpoints(tmp_path, 2, 1)
    checkpoints.save(state(1), META, None)
    checkpoints.wait()

    def fail(manager):
        raise TimeoutError('too late')

    monkeypatch.setattr(type(checkpoints._manager), 'wait_until_finished', fail)
    with pytest.raises(OSError, match=r'could not be written \(too late\)'):
        checkpoints.wait()
    monkeypatch.setattr(time, 'time', lambda time=time.time: time() + 100)
    with pytest.raises(ClockJump, match='jumped by 100 s'):
        checkpoints.wait()


def test_files_are_synced_before_folder_is_renamed(tmp_path, monkeypatch):
    synced = set()

    def record(path):
        assert not (tmp_path / 'checkpoints' / '1').exists()
        synced.add(path.name)
        sync(path)

    monkeypatch.setattr(checkpoints, 'sync', record)
    write(tmp_path, {1: None}).close()
    written = {p.name for p in (tmp_path / 'checkpoints' / '1').rglob('*')}
    assert written <= synced and 'metadata' in written


@pytest.mark.parametrize('name', ['a[b]', 'a]', 'back\\slash', os.fsdecode(b'caf\xe9/run')])
def test_unrestorable_path_is_refused(tmp_path, name):
    with pytest.raises(ValueError, match='another --workdir'):
        check_path(tmp_path / name)


@pytest.mark.parametrize('name', ['a b', 'ü', 'a*b', 'a?b', 'a{b}', 'a#%20b', "a'b", 'a,b=c;d'])
def test_unusual_paths_are_read_back(tmp_path, name):
    checkpoints = write(tmp_path / name, {1: None})
    assert_is(checkpoints.restore(shapes()), 1)
    assert 'digests' in read_meta(checkpoints.folder, 1)
    checkpoints.close()
