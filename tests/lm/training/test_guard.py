"""Steps that change nothing. Reference: a spike as in numpy, and as in OLMo's code. Property: a
skipped step keeps every bit. Equivalence: runs mapped together, and eight devices, decide alike.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.resolve import update_recipe
from lm.devices.mesh import make_mesh, put_batch
from lm.devices.shardings import state_shardings
from lm.model.check import check
from lm.run.spikes import SpikeCounter
from lm.training.state import WATCHED, make_hyper
from lm.training.step import make_train_step
from modules.recent import Recent, find_limit, init_recent, push
from tests.helpers import (
    checked_config,
    initial_state,
    jit_train_step,
    packed_batch,
    stack,
    tiny_config,
    tiny_learner,
    train_step,
)

SKIPPING = tiny_config({'train.on_spike': 'skip', 'optim.average': 'ema'})
BATCH = packed_batch()


def with_history(metrics, sigmas, config=SKIPPING, n=70, name='loss'):
    """Returns the initial state after `n` steps of recorded values: those of the metrics lie
    `sigmas` standard deviations above the mean for one of them, and at the mean for the other.
    """
    state, window = initial_state(config), config.train.spike_window
    values = np.zeros((len(WATCHED), window), np.float32)
    wave = np.where(np.arange(n) % 2, 1.0, -1.0)  # of deviation 1 and mean 0
    for i, watched in enumerate(WATCHED):
        deviation = 0.01 * float(metrics[watched])
        mean = float(metrics[watched]) - (sigmas if watched == name else 0.0) * deviation
        values[i, np.arange(n) % window] = mean + deviation * wave
    return state.replace(watched=Recent(values, np.int32(n)))


@pytest.fixture(scope='module')
def metrics():
    return jax.device_get(train_step(SKIPPING)(initial_state(SKIPPING), BATCH, HYPER)[1])


HYPER = make_hyper(SKIPPING)


def assert_skipped(after, before, value):
    """Asserts that only the step and the window have changed, and that this has the value."""
    same = after.replace(step=before.step, watched=before.watched)
    jax.tree.map(np.testing.assert_array_equal, same, before)
    assert int(after.step) == int(before.step) + 1
    assert int(after.watched.count) == int(before.watched.count) + 1
    place = int(before.watched.count) % before.watched.values.shape[-1]
    np.testing.assert_array_equal(after.watched.values[:, place], value)


@pytest.mark.full
@pytest.mark.parametrize('name', WATCHED)
def test_planted_spike_is_skipped(name, metrics):
    """10 standard deviations are a spike and 5 are none; weights, moments and the average keep
    every bit, and the spike is part of the history. Catches moments that move.
    """
    before = with_history(metrics, 10.0, name=name)
    after, record = train_step(SKIPPING)(before, BATCH, HYPER)
    assert record['spiked'] == record['skipped'] == 1
    assert_skipped(after, before, [record[n] for n in WATCHED])
    near = with_history(metrics, 5.0, name=name)
    after, record = train_step(SKIPPING)(near, BATCH, HYPER)
    assert record['spiked'] == record['skipped'] == 0
    assert any(
        (a != b).any()
        for a, b in zip(*map(jax.tree.leaves, (after.params, near.params)), strict=True)
    )
    assert all(
        (a != b).any()
        for a, b in zip(*map(jax.tree.leaves, (after.average, near.average)), strict=True)
    )


def test_few_values_make_no_spike(metrics):
    """63 steps are too few, and 64 are enough."""
    for n, spiked in ((63, 0), (64, 1)):
        state = with_history(metrics, 10.0, n=n)
        assert train_step(SKIPPING)(state, BATCH, HYPER)[1]['spiked'] == spiked


@pytest.mark.full
def test_step_without_spike_equals_the_plain_step(metrics):
    """The guard multiplies nothing: a step that is kept has the numbers of a run without it."""
    plain = update_recipe(SKIPPING, {'train.on_spike': 'record'})
    after, _ = train_step(SKIPPING)(with_history(metrics, 0.0), BATCH, HYPER)
    expected, plain_record = train_step(plain)(initial_state(plain), BATCH, HYPER)
    assert expected.watched == {} and not {'spiked', 'skipped'} & plain_record.keys()
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7),
        after.replace(watched={}),
        expected,
    )


@pytest.mark.full
def test_divergence_is_no_spike(metrics):
    """A loss that is not finite is left to train.on_divergence, and out of the window."""
    state = with_history(metrics, 10.0)
    params = jax.tree.map(lambda w: w * np.nan, state.params)
    for changes, skipped in (({}, 0), ({'train.on_divergence': 'skip_step'}, 1)):
        config = update_recipe(SKIPPING, changes)
        before = state.replace(params=params)
        after, record = train_step(config)(before, BATCH, HYPER)
        assert record['spiked'] == 0 and record['skipped'] == skipped
        jax.tree.map(np.testing.assert_array_equal, after.watched, before.watched)


@pytest.mark.full
def test_each_run_decides_alone(metrics):
    """Of two runs of one program one has a spike."""
    states = [with_history(metrics, sigmas) for sigmas in (10.0, 0.0)]
    step = make_train_step(tiny_learner(SKIPPING))
    mapped = jax.jit(jax.vmap(step, in_axes=(0, None, None)))
    after, record = mapped(stack(states), BATCH, HYPER)
    assert record['spiked'].tolist() == record['skipped'].tolist() == [1.0, 0.0]
    first, second = (jax.tree.map(lambda leaf, i=i: leaf[i], after) for i in range(2))
    assert_skipped(first, states[0], [record[name][0] for name in WATCHED])
    pairs = zip(*map(jax.tree.leaves, (second.params, states[1].params)), strict=True)
    assert any((a != b).any() for a, b in pairs)


@pytest.mark.full
def test_eight_devices_decide_together(metrics):
    """All of them skip, or none does."""
    learner, mesh = tiny_learner(SKIPPING), make_mesh(SKIPPING.mesh)
    assert mesh.size == 8
    step, shardings = jit_train_step(learner, mesh), state_shardings(learner, mesh)
    for sigmas, spiked in ((10.0, 1), (0.0, 0)):
        before = with_history(metrics, sigmas)
        arguments = jax.device_put(before, shardings), put_batch(mesh, BATCH), HYPER
        after, record = jax.device_get(step(*arguments))
        assert record['spiked'] == record['skipped'] == spiked
        if spiked:
            assert_skipped(after, before, [record[name] for name in WATCHED])


def test_limit_equals_numpy():
    """The window keeps the last values, also after it has been full; each quantity has its own."""
    rng, recent = np.random.default_rng(0), init_recent(8, 2)
    values = rng.normal(size=(20, 2)).astype(np.float32)
    for i, value in enumerate(values):
        limit = find_limit(recent, 3.0, 4)
        if i < 4:
            assert np.isinf(limit).all()
        else:
            past = values[max(0, i - 8) : i].astype(np.float64)
            np.testing.assert_allclose(limit, past.mean(0) + 3 * past.std(0), rtol=1e-5)
        recent = push(recent, jnp.asarray(value))
    same = push(recent, jnp.float32([np.nan, 1.0]))
    jax.tree.map(np.testing.assert_array_equal, same, recent)


def olmo_spikes(values, window=128, sigmas=6.0):
    """`SkipStepOptimizer.get_step_factor` of OLMo-core, in numpy, for one quantity.

    Two details differ: its deviation divides by n - 1, and it begins one value earlier.
    """
    spikes = []
    for i in range(len(values)):
        past = values[max(0, i - window) : i]
        is_judged = len(past) >= window // 2
        spikes.append(is_judged and values[i] - past.mean() > sigmas * past.std(ddof=1))
    return np.array(spikes)


def test_spikes_match_olmo():
    """On the host, and on devices, over 300 steps with spikes of several sizes."""
    rng = np.random.default_rng(1)
    losses = (3 + 0.1 * rng.normal(size=300)).astype(np.float32)
    losses[[100, 101, 250]] += np.float32([1.0, 1.2, 0.9])
    expected = olmo_spikes(losses.astype(np.float64))
    assert np.flatnonzero(expected).tolist() == [100, 101, 250]
    counter, recent = SpikeCounter(SKIPPING.train), init_recent(128, 2)
    step = jax.jit(lambda r, v: (push(r, v), find_limit(r, 6.0, 64)))
    for i, loss in enumerate(losses):
        text = counter.observe({'loss': float(loss), 'grad_norm': 1.0})
        assert bool(text) == expected[i]
        recent, limit = step(recent, jnp.float32([loss, 1.0]))
        assert bool(loss > limit[0]) == expected[i]
    assert counter.score == {'spike_score': 3 / (300 - 64)}


def test_window_without_enough_steps_is_refused():
    with pytest.raises(ValueError, match=r'spike_from must be at most train\.spike_window'):
        checked_config({'train.spike_window': 32})
    check(checked_config({'train.spike_window': 32, 'train.spike_from': 32}))
