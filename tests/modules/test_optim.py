"""Reference: optimizers and schedules against numpy. Property: partition and specs of the state."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from modules.optim import SCHEDULES, partition_by_role, state_specs, unbox_state
from modules.optim.classic import adamw, sgd
from modules.options import declared_options
from modules.params import ParamBox, ParamSpec, named_leaves

STEPS, WARMUP, FINAL, DECAY = 20, 4, 0.1, 0.25


def numpy_adam(grads, b1, b2, eps):
    """m_hat / (sqrt(v_hat) + eps) after each of `grads` (arXiv:1412.6980, algorithm 1)."""
    m = v = 0.0
    for t, grad in enumerate(grads, start=1):
        m, v = b1 * m + (1 - b1) * grad, b2 * v + (1 - b2) * grad**2
        yield (m / (1 - b1**t)) / (np.sqrt(v / (1 - b2**t)) + eps)


def test_adamw_direction():
    """Compares several steps. Catches a missing bias correction, or eps inside the root."""
    grads = np.random.default_rng(0).normal(size=(5, 3)) * 0.1
    tx = adamw(None, b1=0.9, b2=0.95, eps=1e-2)
    state = tx.init(jnp.zeros(3))
    for grad, expected in zip(grads, numpy_adam(grads, 0.9, 0.95, 1e-2), strict=True):
        direction, state = tx.update(jnp.float32(grad), state)
        np.testing.assert_allclose(direction, expected, rtol=1e-4)


def cosine(progress):
    return FINAL + (1 - FINAL) * (1 + np.cos(np.pi * progress)) / 2


def fraction(name, step, **changes):
    """Returns the fraction of the peak, with the numbers that the schedule reads."""
    numbers = {
        'steps': STEPS,
        'warmup_steps': WARMUP,
        'final_lr_fraction': FINAL,
        'decay_fraction': DECAY,
        'decay_power': 2.0,
        'cycles': 4,
        'inverse_sqrt_steps': 8,
    } | changes
    steps = numbers.pop('steps')
    numbers['stages'] = (
        f'rest constant, {numbers["decay_fraction"]:%} linear to {numbers["final_lr_fraction"]}'
    )
    schedule_numbers = {
        number: numbers[number] for number in declared_options(SCHEDULES[name]) if number in numbers
    }
    return SCHEDULES[name](step, steps, **schedule_numbers)


def reach(name):
    """Returns whether the schedule has an end that it reaches."""
    return 'final_lr_fraction' in declared_options(SCHEDULES[name])


FRACTIONS = {  # of the peak: step -> value; first, last of the warm-up, the next, middle, last
    'constant': {0: 1 / 4, 2: 3 / 4, 3: 1, 4: 1, 11: 1, 19: 1},
    'cyclic': {0: 1 / 4, 3: 1, 4: cosine(1 / 4), 7: FINAL, 8: cosine(1 / 4), 13: cosine(1 / 2)}
    | {15: FINAL, 16: cosine(1 / 4), 19: FINAL},
    'exponential': {0: 1 / 4, 3: 1, 4: 0.1 ** (1 / 16), 11: 0.1**0.5, 19: FINAL},
    'inverse_sqrt': {0: 1 / 4, 3: 1, 4: 1, 7: 1, 8: (8 / 9) ** 0.5, 19: (8 / 20) ** 0.5},
    'linear': {0: 1 / 4, 3: 1, 4: 1 - 0.9 / 16, 11: 0.55, 19: FINAL},
    'power': {0: 1 / 4, 3: 1, 4: 0.1 + 0.9 * (15 / 16) ** 2, 11: 0.1 + 0.9 / 4, 19: FINAL},
    'stages': {0: 1 / 4, 3: 1, 4: 1, 14: 1, 15: 1 - 0.9 / 5, 17: 0.46, 19: FINAL},
    'warmup_cosine': {0: 1 / 4, 3: 1, 4: cosine(1 / 16), 11: cosine(1 / 2), 19: FINAL},
    'warmup_stable_decay': {0: 1 / 4, 3: 1, 4: 1, 14: 1, 15: 1 - 0.9 / 5, 17: 0.46, 19: FINAL},
}


def test_every_schedule_has_its_values():
    assert FRACTIONS.keys() == SCHEDULES.keys()


@pytest.mark.parametrize('name', SCHEDULES)
def test_schedule_at_its_boundaries(name):
    """Catches a warm-up that starts at 0, and a decay that ends a step early or late."""
    for step, expected in FRACTIONS[name].items():
        value = fraction(name, jnp.int32(step))
        np.testing.assert_allclose(value, expected, rtol=1e-5, err_msg=f'step {step}')


@pytest.mark.parametrize('name', [n for n in SCHEDULES if reach(n) and n != 'exponential'])
def test_decay_reaches_0_at_the_last_step(name):
    """Exactly: the last step changes no weight, and the step before it does."""
    before, last = fraction(name, jnp.int32([STEPS - 2, STEPS - 1]), final_lr_fraction=0.0)
    assert last == 0.0 < before


@pytest.mark.parametrize('name', SCHEDULES)
def test_schedule_stays_between_0_and_peak(name):
    """With and without warm-up and decay, and beyond the last step, where an end is kept."""
    for changes in ({}, {'warmup_steps': 0}, {'decay_fraction': 0}, {'steps': 1}):
        values = fraction(name, jnp.arange(2 * STEPS), **changes)
        assert np.all((values > 0) & (values <= 1))
    assert fraction(name, jnp.int32(0), warmup_steps=0) > 0.85
    if reach(name):
        late = fraction(name, STEPS - 1 + jnp.arange(STEPS))
        np.testing.assert_allclose(late, FINAL, rtol=1e-5)


@pytest.mark.parametrize(('step', 'expected'), [(14, 1), (15, 1 - 0.9 * 0.2**0.5), (19, FINAL)])
def test_square_root_decay(step, expected):
    """1 - sqrt(p), steep first. Catches sqrt(1 - p), which is steep last."""
    actual = fraction('warmup_stable_decay', jnp.int32(step), decay_shape='sqrt')
    np.testing.assert_allclose(actual, expected, rtol=1e-5)


def test_decay_shorter_than_a_step_takes_the_last_step():
    """Catches a last step that is half way down."""
    short = fraction('warmup_stable_decay', jnp.arange(STEPS), decay_fraction=0.5 / STEPS)
    np.testing.assert_allclose(short[-2:], [1, FINAL], rtol=1e-5)


@pytest.mark.parametrize('cycles', [1, 3, 5, 7])
@pytest.mark.parametrize('steps', [STEPS, 1000])
def test_cycles_for_any_steps(cycles, steps):
    """Each cycle falls, the next begins near the peak, and a single cycle is the cosine. Catches a
    restart a step early or late, to which rounding at the end of a cycle can lead.
    """
    values = fraction('cyclic', jnp.arange(steps), steps=steps, cycles=cycles, warmup_steps=0)
    (rises,) = np.nonzero(np.diff(values) > 0)  # the last step of each cycle but the last
    ends = np.arange(1, cycles) * steps / cycles - 1  # whole or not
    assert len(rises) == cycles - 1 and np.all(np.abs(rises - ends) <= 0.5)
    np.testing.assert_allclose(values[-1], FINAL, rtol=1e-5)
    if cycles == 1:
        single = fraction('warmup_cosine', jnp.arange(steps), steps=steps, warmup_steps=0)
        np.testing.assert_allclose(values, single, rtol=1e-5)


def test_inverse_sqrt_is_t5():
    """max(t, k)^-1/2 of its peak k^-1/2, with t from 1; with a warm-up of k the schedule of the
    first Transformer, min(t^-1/2, t k^-3/2).
    """
    t = np.arange(1, STEPS + 1)
    fractions = fraction('inverse_sqrt', jnp.arange(STEPS), warmup_steps=0)
    np.testing.assert_allclose(fractions, np.maximum(t, 8) ** -0.5 / 8**-0.5, rtol=1e-5)
    for k in (4, 8):  # the decay begins where a longer warm-up ends
        fractions = fraction(
            'inverse_sqrt', jnp.arange(STEPS), warmup_steps=8, inverse_sqrt_steps=k
        )
        first = np.minimum(t**-0.5, t * 8**-1.5)
        np.testing.assert_allclose(fractions, first / 8**-0.5, rtol=1e-5)


SPECS = {
    'table': ParamSpec('embedding', ('vocab', 'embed')),
    'layers': {'up': ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',))},
    'scale': ParamSpec('vector', ('embed',)),
}
PARAMS = {'table': jnp.ones((5, 4)), 'layers': {'up': jnp.ones((2, 4, 6))}, 'scale': jnp.ones(4)}


def scaled_by(factor):
    return lambda specs: optax.scale(factor)


def test_partition_passes_each_optimizer_its_specs():
    """An optimizer runs on its parameters alone. Catches specs of all parameters with trees of
    some.
    """
    roles_by_path = []

    def make_noted(specs):
        roles_by_path.append({path: spec.role for path, spec in named_leaves(specs).items()})
        return sgd(specs, momentum=0.5)

    tx = partition_by_role(SPECS, hidden=make_noted, default=make_noted)
    state = unbox_state(tx.init(PARAMS))
    for _ in range(2):
        directions, state = tx.update(PARAMS, state, PARAMS)
    jax.tree.map(lambda leaf, w: np.testing.assert_array_equal(leaf, 1.5 * w), directions, PARAMS)
    assert sorted(roles_by_path, key=len) == [
        {'layers/up': 'hidden'},
        {'scale': 'vector', 'table': 'embedding'},
    ]


def test_each_role_has_its_own_optimizer():
    """Halved for hidden matrices, negated for the rest. Catches labels of other leaves."""
    tx = partition_by_role(SPECS, hidden=scaled_by(0.5), default=scaled_by(-1.0))
    directions, _ = tx.update(PARAMS, tx.init(PARAMS), PARAMS)
    expected = {'table': -1.0, 'layers': {'up': 0.5}, 'scale': -1.0}
    jax.tree.map(
        lambda leaf, value: np.testing.assert_array_equal(leaf, value), directions, expected
    )


def test_uncovered_parameter_is_named():
    with pytest.raises(ValueError, match=r'no optimizer covers scale, table; pass an optimizer'):
        partition_by_role(SPECS, hidden=scaled_by(0.5))


def test_unused_role_is_named():
    with pytest.raises(ValueError, match=r"\['readout'\], but no parameter has them"):
        partition_by_role(SPECS, readout=scaled_by(0.5), default=scaled_by(1.0))


def test_moments_have_parameter_specs():
    """This holds behind a partition, which leaves some out. Catches moments without sharding."""
    tx = partition_by_role(SPECS, hidden=adamw, default=lambda specs: optax.trace(0.9))
    specs = named_leaves(state_specs(jax.eval_shape(tx.init, PARAMS), PARAMS, SPECS))
    up_specs = [spec for path, spec in specs.items() if path.endswith('layers/up')]
    assert up_specs == [SPECS['layers']['up']] * 2  # both moments
    table_specs = [spec for path, spec in specs.items() if path.endswith('table')]
    assert table_specs == [SPECS['table']]
    count_specs = [spec for path, spec in specs.items() if path.endswith('count')]
    assert count_specs == [ParamSpec('vector', ())]


def test_boxed_state_has_the_spec_in_its_box():
    """A row norm a matrix, say; without a box it is refused, by its path."""
    rows = ParamSpec('vector', ('layer', 'embed'))

    def init(params, box):
        norms = jnp.sum(params['layers']['up'], -1)
        return {'norms': {'layers': {'up': ParamBox(norms, rows) if box else norms}}}

    state = jax.eval_shape(lambda params: init(params, box=True), PARAMS)
    assert state_specs(state, PARAMS, SPECS) == {'norms': {'layers': {'up': rows}}}
    assert unbox_state(init(PARAMS, box=True))['norms']['layers']['up'].shape == (2, 4)
    state = jax.eval_shape(lambda params: init(params, box=False), PARAMS)
    with pytest.raises(
        ValueError, match=r'norms/layers/up of shape \(2, 4\) does not match any parameter'
    ):
        state_specs(state, PARAMS, SPECS)
