"""Equivalence: the program of a run alone is its step: no run axis, and no copy of its state."""

import re

import jax
import jax.numpy as jnp
import pytest

from lm.devices.shardings import batch_shapes, jit_train_step
from lm.launch.terminal import CellTerminal
from lm.run.program import Program
from lm.run.runs import RunSpec
from lm.run.wave import Wave
from lm.training.state import hyper_from
from tests.sweep_helpers import base, changed, silent_experiment, write_corpus


@pytest.fixture(scope='module')
def config(tmp_path_factory):
    """Whose batches are cut over two devices."""
    corpus = write_corpus(tmp_path_factory.mktemp('corpus'))
    return changed(base(corpus, mesh_data=2, train_checkpoint_every=0), {})


@pytest.fixture(scope='module')
def program(config):
    return Program(silent_experiment(config))


@pytest.fixture
def wave(program, config, tmp_path):
    """Of one run that has not trained yet."""
    run = RunSpec(config, tmp_path, CellTerminal('alone', lambda text: None))
    opened = Wave(program, [run], size=1)
    opened.compile()
    opened.slots[0].journal.open()
    yield opened
    opened.close()


def instructions(compiled) -> str:
    """HLO without the metadata that says which line of Python each came from."""
    text = re.sub(r', metadata=\{[^}]*\}', '', compiled.as_text())
    return re.sub(
        r'\n(FileNames|FunctionNames|FileLocations|StackFrames)\n.*?\n(?=\n)', '', text, flags=re.S
    )


def test_is_the_step_itself(program, config):
    """The same instructions and the same arguments donated."""
    experiment = program.experiment
    shapes = (
        experiment.state_shapes,
        batch_shapes(config),
        jax.eval_shape(lambda: hyper_from(config)),
    )
    plain = jit_train_step(experiment.learner, experiment.mesh).lower(*shapes).compile()
    alone = program.compiled(1)
    assert instructions(alone) == instructions(plain)
    assert 'input_output_alias' in instructions(alone)
    assert alone.memory_analysis().argument_size_in_bytes == (
        plain.memory_analysis().argument_size_in_bytes
    )


def test_arrays_have_no_axis_more(program, wave):
    """Nor are they laid out otherwise than those of one run."""
    wanted = program.experiment.state_shapes
    for _ in range(2):
        for leaf, shape in zip(*map(jax.tree.leaves, (wave.states, wanted)), strict=True):
            assert (leaf.shape, leaf.sharding) == (shape.shape, shape.sharding)
        wave.dispatch()
    assert all(jnp.shape(leaf) == () for leaf in jax.tree.leaves((wave.hypers, wave._pending[1])))


@pytest.mark.full
def test_a_state_goes_in_and_out_without_a_copy(wave):
    """Catches a take that doubles the memory of a large model in each checkpoint."""
    saved = []
    wave.slots[0].journal.checkpoints.save = lambda state, *_: saved.append(state)
    wave.dispatch()
    wave.settle()
    wave.save_run(0)
    assert saved[0] is wave.states
    state = jax.tree.map(jnp.copy, wave.states)
    assert wave.program.put(wave.states, state, 0) is state


def test_the_state_before_a_step_is_donated(wave):
    before = wave.states
    wave.dispatch()
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves(before))
