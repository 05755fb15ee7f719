"""Contract: the interface of every optimizer, average, schedule and decay rule.

A single jitted function runs all optimizers over a described tree, stacked layers included, so that
a new row needs no other program.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from lm.devices.mesh import RULES
from modules.optim import (
    AVERAGES,
    OPTIMIZERS,
    SCHEDULES,
    as_direction,
    partition_by_role,
    state_specs,
    unbox_state,
)
from modules.optim.base import FAMILIES
from modules.options import declared_options
from modules.params import ROLES, ParamSpec, named_leaves
from modules.scaling import (
    DECAY_RULES,
    INITS,
    PARAMETRIZATIONS,
    DecayInputs,
    compute_growth,
    compute_scaling,
)
from tests.helpers import another, assert_trees_close, stack

LAYERS, STEPS = 2, 30
SPECS = {
    'embedding': ParamSpec('embedding', ('vocab', 'embed')),
    'layers': {
        'query': ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',)),
        'up': ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',)),
        'scale': ParamSpec('vector', ('layer', 'embed')),
    },
    'readout': ParamSpec('readout', ('embed', 'vocab'), ('embed',)),
    'temperature': ParamSpec('vector', ()),
}
SIZES = {'vocab': 12, 'embed': 8, 'heads': 2, 'head_dim': 4, 'mlp': 16, 'layer': LAYERS}
SHAPES = jax.tree.map(
    lambda spec: jax.ShapeDtypeStruct(tuple(SIZES[axis] for axis in spec.axes), jnp.float32), SPECS
)


def tree(seed: int):
    rng = np.random.default_rng(seed)
    return jax.tree.map(lambda s: rng.normal(size=s.shape).astype(np.float32), SHAPES)


START, TARGET = tree(0), tree(1)
# Values that have an effect in this problem, unlike values near the published ones.
TELLING = {'adafactor_clip': 0.5, 'adamp_delta': 0.1, 'sven_rtol': 0.99}
USUAL = {'adamp_delta': 2.0}  # with the published value nothing is projected


def loss(params):
    """A quadratic; its gradient is the distance to the target."""
    return 0.5 * optax.tree.norm(optax.tree.sub(params, TARGET), squared=True)


# Relative tolerances above rounding: differences of a loss of hundreds over 0.005, in float32.
# APOLLO divides by the norms of narrow projections.
TOLERANCES = {'cge': 2e-3, 'apollo': 2e-4}


def logits(params, row):
    """Every fourth coordinate of the distance to the target, from `row` on."""
    flat = jnp.concatenate(
        [jnp.ravel(leaf) for leaf in jax.tree.leaves(optax.tree.sub(params, TARGET))]
    )
    return jnp.where(jnp.arange(flat.size) % 4 == row['tokens'][0], flat, 0.0)


def half_square(logits, row):
    del row
    return 0.5 * jnp.sum(jnp.square(logits))


def make_batch(params, grads):
    """Returns the extra arguments for the quadratic as a batch of four rows, one per microbatch."""
    value = loss(params)
    return {
        'value': value,
        'grad': grads,
        'means': {'objective': value, 'error_probability': jnp.float32(0.5)},
        'rows': {'tokens': jnp.arange(4).reshape(4, 1)},
        'value_fn': loss,
        'share_fn': lambda params, row: half_square(logits(params, row), row),
        'logits_fn': logits,
        'share_from_logits': half_square,
    }


def numbers(name: str) -> dict[str, jax.Array]:
    """Returns the published values of an optimizer's traced options."""
    declared = declared_options(OPTIMIZERS[name])
    return {n: jnp.float32(USUAL.get(n, d.default)) for n, d in declared.items() if d.option.traced}


def optimizer(name: str, options=None, specs=SPECS):
    row = functools.partial(OPTIMIZERS[name], **(numbers(name) | (options or {})))
    covered = OPTIMIZERS[name].roles
    if set(ROLES) <= set(covered):
        return optax.with_extra_args_support(row(specs))
    return partition_by_role(specs, default=OPTIMIZERS['adamw'], **dict.fromkeys(covered, row))


def descent(name: str, options, start, specs=SPECS, steps=STEPS, lr=0.1, decay=0.01):
    """Returns (params, state, losses) after updates by -lr times the direction, and decay."""
    tx = optimizer(name, options, specs)

    def train_step(carry, _):
        params, state = carry
        value, grads = jax.value_and_grad(loss)(params)
        direction, state = tx.update(grads, state, params, **make_batch(params, grads))
        params = jax.tree.map(update, params, direction)
        return (params, state), value

    def update(weight, direction):
        direction, share = as_direction(direction)
        return weight - lr * direction - lr * decay * share * weight

    (params, state), losses = jax.lax.scan(
        train_step, (start, unbox_state(tx.init(start))), None, length=steps
    )
    return params, state, losses


@pytest.fixture(scope='module')
def optimizer_runs():
    """Returns {optimizer: its runs}, computed in a single program."""

    def run_all():
        return {name: run_optimizer(name) for name in OPTIMIZERS}

    def run_optimizer(name):
        declared = declared_options(OPTIMIZERS[name])
        other_values = {n: another(declared[n].option, declared[n].default) for n in numbers(name)}
        other_values |= {n: value for n, value in TELLING.items() if n in other_values}
        changed = [numbers(name) | {n: jnp.float32(value)} for n, value in other_values.items()]
        all_changed = {n: jnp.float32(value) for n, value in other_values.items()}
        # The last run starts where gradients are 0: as a mapped run it needs no other program.
        settings = stack_jnp([numbers(name), all_changed, *changed, numbers(name)])
        starts = stack_jnp([*[START] * (2 + len(changed)), TARGET])

        def run_single(i):
            return descent(name, jax.tree.map(lambda leaf: leaf[i], settings), START)

        runs = jax.vmap(lambda settings, start: descent(name, settings, start))(settings, starts)
        return {
            'alone': jax.lax.map(run_single, jnp.arange(2)),  # as published, all numbers changed
            'mapped': jax.tree.map(lambda leaf: leaf[:-1], runs),
            'quiet': jax.tree.map(lambda leaf: leaf[-1], runs),
        }

    return jax.device_get(jax.jit(run_all)())


def stack_jnp(trees):
    return jax.tree.map(lambda *leaves: jnp.stack(leaves), *trees)


@pytest.mark.parametrize('name', OPTIMIZERS)
class TestEveryOptimizer:
    def test_mapped_runs_equal_single_and_numbers_matter(self, optimizer_runs, name):
        mapped, rtol = optimizer_runs[name]['mapped'], TOLERANCES.get(name, 1e-5)
        two = jax.tree.map(lambda leaf: leaf[:2], mapped)
        assert_trees_close(two, optimizer_runs[name]['alone'], rtol=rtol, atol=0.1 * rtol)
        for i, number in enumerate(numbers(name), start=2):  # each number alone
            moved = jax.tree.map(lambda leaf, i=i: np.abs(leaf[i] - leaf[0]).max(), mapped[0])
            assert max(jax.tree.leaves(moved)) > 1e-4, number

    def test_optimizer_descends_and_keeps_dtypes(self, optimizer_runs, name):
        params, state, losses = jax.tree.map(lambda leaf: leaf[0], optimizer_runs[name]['alone'])
        assert losses[-1] < 0.5 * losses[0]
        for leaf in jax.tree.leaves((params, state)):
            assert leaf.dtype in (np.float32, np.int32)

    def test_zero_gradients_give_finite_updates(self, optimizer_runs, name):
        assert all(
            np.isfinite(leaf).all() for leaf in jax.tree.leaves(optimizer_runs[name]['quiet'])
        )

    def test_every_state_leaf_is_described(self, name):
        state = jax.eval_shape(optimizer(name).init, SHAPES)
        specs = named_leaves(state_specs(state, SHAPES, SPECS))
        for path, leaf in named_leaves(unbox_state(state)).items():
            assert len(specs[path].axes) == len(leaf.shape), path

    def test_every_state_axis_has_a_sharding_rule(self, name):
        """Checks all choices. Catches a row with an axis that lm.devices.mesh does not know: it
        trains here and is refused in every run, as its state has no sharding.
        """
        declared = declared_options(OPTIMIZERS[name])
        choices = [(n, value) for n, d in declared.items() for value in d.option.choices]
        for options in ({}, *(dict([choice]) for choice in choices)):
            state = jax.eval_shape(optimizer(name, options).init, SHAPES)
            for path, spec in named_leaves(state_specs(state, SHAPES, SPECS)).items():
                assert RULES.keys() >= set(spec.axes), (options, path)

    def test_family_is_known(self, name):
        assert OPTIMIZERS[name].family in FAMILIES


@pytest.mark.parametrize('name', AVERAGES)
def test_every_average_descends_and_reads_its_options(name):
    """Averages gradient descent after a warm-up: the averaged weights descend, and each number
    changes them; mapped runs equal single runs; types and structure stay; all state is described.
    """
    declared = declared_options(AVERAGES[name])
    plain = {n: jnp.float32(d.default) for n, d in declared.items()}
    other_values = {n: jnp.float32(another(d.option, d.default)) for n, d in declared.items()}
    settings = [plain, *(plain | {n: other_values[n]} for n in plain)]

    def run(numbers):
        average = AVERAGES[name](SPECS, 60, **numbers)

        def step(carry, fraction):
            params, state = carry
            updates = jax.tree.map(lambda g: -0.1 * fraction * g, jax.grad(loss)(params))
            updates, state = average.adjust_updates(updates, params, state, fraction)
            params = optax.apply_updates(params, updates)
            return (params, average.update_average(params, state)), None

        fractions = jnp.minimum(jnp.arange(1, 61) / 20, 1.0)
        carry, _ = jax.lax.scan(step, (START, average.init(START)), fractions)
        return average.evaluation_weights(*carry), carry[1]

    def run_all():
        mapped = jax.vmap(lambda _, numbers: run(numbers))
        return [run(numbers) for numbers in settings], mapped(
            jnp.arange(len(settings)), stack_jnp(settings)
        )

    single, mapped = jax.device_get(jax.jit(run_all)())
    assert_trees_close(mapped, stack(single), rtol=1e-5, atol=1e-6)
    averaged, state = single[0]
    assert loss(averaged) < 0.5 * loss(START)
    for (params, _), number in zip(single[1:], plain, strict=True):
        moved = jax.tree.map(lambda a, b: np.abs(a - b).max(), params, averaged)
        assert max(jax.tree.leaves(moved)) > 1e-4, number
    assert jax.tree.structure(averaged) == jax.tree.structure(START)
    assert all(leaf.dtype in (np.float32, np.int32) for leaf in jax.tree.leaves((averaged, state)))
    specs = named_leaves(state_specs(state, SHAPES, SPECS))
    assert all(len(specs[path].axes) == leaf.ndim for path, leaf in named_leaves(state).items())


@pytest.mark.parametrize('name', SCHEDULES)
def test_every_schedule_is_positive_and_reads_its_options(name):
    """A schedule starts above 0, stays at most 1 and is never 0 for two steps; mapped runs equal
    single runs; each number matters, and so does each choice.
    """
    declared, steps = declared_options(SCHEDULES[name]), jnp.arange(20)
    traced = {n: d for n, d in declared.items() if d.option.traced}
    # Numbers of steps are within those of the run.
    published = {
        n: min(d.default, 5) if d.option.time_unit else d.default for n, d in traced.items()
    }
    plain = {n: jnp.float32(value) for n, value in published.items()}
    other_values = {n: jnp.float32(another(d.option, published[n])) for n, d in traced.items()}
    settings = [plain, *(plain | {n: other_values[n]} for n in plain)]

    def fractions(numbers, **choices):
        return jax.vmap(lambda step: SCHEDULES[name](step, 20.0, **numbers, **choices))(steps)

    single = [fractions(numbers) for numbers in settings]
    np.testing.assert_allclose(
        jax.vmap(fractions)(stack_jnp(settings)), single, rtol=1e-6, atol=1e-7
    )
    choices = {
        f'{n}={choice}': fractions(plain, **{n: choice})
        for n, d in declared.items()
        for choice in d.option.choices
        if choice != d.default
    }
    curves = np.array([*single, *choices.values()])
    assert np.all((curves >= 0) & (curves <= 1)) and np.all(curves[:, 0] > 0)
    assert np.all(curves[:, 1:] + curves[:, :-1] > 0)
    for changed, values in zip([*plain, *choices], curves[1:], strict=True):
        assert not np.allclose(values, curves[0], atol=1e-3), changed


@pytest.mark.parametrize('name', DECAY_RULES)
def test_decay_rules_follow_schedule_and_weight_decay(name):
    rule, numbers = DECAY_RULES[name], (0.1, 0.01, 0.5, 100.0)
    share = rule(DecayInputs(*map(jnp.float32, numbers)))
    assert 0 < share < 1
    twice, later = rule(DecayInputs(0.2, *numbers[1:])), rule(DecayInputs(*numbers[:2], 1.0, 100.0))
    np.testing.assert_allclose(twice, share if name == 'timescale' else 2 * share, rtol=1e-6)
    if not rule.in_gradient:
        np.testing.assert_allclose(later, {'adamc': 4}.get(name, 2) * share, rtol=1e-6)
    assert rule(DecayInputs(0.0, *numbers[1:])) == 0


@pytest.mark.parametrize('family', FAMILIES)
@pytest.mark.parametrize('name', PARAMETRIZATIONS)
def test_every_parametrisation_covers_every_role(name, family):
    row = PARAMETRIZATIONS[name]
    if family not in row.families:
        return  # refused: tests/lm/training/test_parametrization.py
    for path, spec in named_leaves(SPECS).items():
        shape = named_leaves(SHAPES)[path].shape
        grows = ('embed', 'heads', 'mlp')
        wider = tuple(2 * SIZES[axis] if axis in grows else SIZES[axis] for axis in spec.axes)
        growth = compute_growth(spec, wider, shape, depth=3.0, width=2.0)
        scaling = compute_scaling(
            row, INITS['fan_in'], spec, (wider, shape), (6, 2), growth, family
        )
        assert (scaling.init_std is None) == (spec.role == 'vector')
        assert scaling.lr_factor > 0 and scaling.forward_factor > 0 and scaling.eps_factor > 0
