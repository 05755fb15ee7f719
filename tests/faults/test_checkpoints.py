"""Damage of any file of a checkpoint: reads return the written state, or an earlier one."""

import os
import random
import shutil

import pytest

from tests.lm.record.test_checkpoints import assert_is, shapes, write


@pytest.fixture(scope='module')
def intact(tmp_path_factory):
    """A workdir with checkpoints of steps 1 and 2."""
    workdir = tmp_path_factory.mktemp('intact')
    write(workdir, {1: None, 2: None}).close()
    return workdir


def flip(path, rng):
    content = bytearray(path.read_bytes())
    content[rng.randrange(len(content))] ^= 1 << rng.randrange(8)
    path.write_bytes(content)


def cut(path, rng):
    os.truncate(path, rng.randrange(path.stat().st_size))


def delete(path, rng):
    del rng
    path.unlink()


def swap(path, rng):
    """Copies another file's content, as a file system may do after a crash."""
    other_files = [p for p in path.parents[1].rglob('*') if p.is_file() and p != path]
    path.write_bytes(rng.choice(sorted(other_files)).read_bytes())


@pytest.mark.parametrize('damage', [flip, cut, delete, swap], ids=lambda damage: damage.__name__)
@pytest.mark.trials(short=5, long=100)
def test_damage_falls_back_to_earlier_step(damage, trial, intact, tmp_path):
    rng, messages = random.Random(trial), []
    workdir = shutil.copytree(intact, tmp_path / 'run')
    files = [p for p in (workdir / 'checkpoints' / '2').rglob('*') if p.is_file()]
    victim = rng.choice(sorted(p for p in files if p.stat().st_size))
    damage(victim, rng)
    checkpoints = write(workdir, {}, say=messages.append)
    restored = checkpoints.restore(shapes())
    assert_is(restored, 1 if messages else 2)
    assert checkpoints.damaged_steps() == ([2] if messages else [])
    assert all('cannot be read' in line and len(line) < 700 for line in messages), messages


@pytest.mark.trials(short=3, long=100)
def test_flipped_bit_is_detected(trial, intact, tmp_path):
    rng, messages = random.Random(trial), []
    workdir = shutil.copytree(intact, tmp_path / 'run')
    array_files = [p for p in (workdir / 'checkpoints' / '2').glob('*/**/d/*') if p.is_file()]
    flip(rng.choice(sorted(array_files)), rng)
    checkpoints = write(workdir, {}, say=messages.append)
    restored = checkpoints.restore(shapes())
    assert_is(restored, 1 if messages else 2)  # what is not noticed has changed no number


def test_restore_returns_none_if_all_are_damaged(intact, tmp_path):
    workdir = shutil.copytree(intact, tmp_path / 'run')
    for step in (1, 2):
        shutil.rmtree(workdir / 'checkpoints' / str(step) / 'weights')
    checkpoints = write(workdir, {})
    assert checkpoints.restore(shapes()) is None
    assert checkpoints.damaged_steps() == [1, 2]
