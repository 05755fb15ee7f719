"""Reference: Sven against its authors' code and against least squares. CGE against the gradient."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from modules.optim import partition_by_role, unbox_state
from modules.optim.beyond_gradients import cge, pseudo_inverse, sven
from modules.params import ParamSpec
from tests.fixtures.optim import problem

SPECS = {
    'first': ParamSpec('hidden', ('embed', 'mlp'), ('embed',)),
    'second': ParamSpec('readout', ('mlp', 'vocab'), ('mlp',)),
}
START = {'first': problem.normals('first', 4, 2), 'second': problem.normals('second', 2, 1)}
ROWS = {'inputs': problem.normals('inputs', 6, 4), 'wanted': problem.normals('wanted', 6)}
CASES = {
    'losses': {},
    'errors': {'sven_kappa': 1.0},
    'truncated': {'sven_k': 4},
    'bounded': {'sven_kappa': 1.5, 'sven_rtol': 0.1},
    'grouped': {'sven_group': 2, 'sven_k': 3},
}
LR = 0.05


def share_fn(params, rows):
    found = jnp.tanh(rows['inputs'] @ params['first']) @ params['second']
    return jnp.sum(jnp.square(found[:, 0] - rows['wanted'])) / 6


def value_fn(params):
    return share_fn(params, ROWS)


def parts(n):
    """Part i has the rows i, i + n, ..."""
    return jax.tree.map(lambda x: jnp.stack([x[i::n] for i in range(n)]), ROWS)


def followed(tx, steps, lr=LR, n=1, start=START):
    """The weights after each update by -lr times the direction, flat [steps, 10]."""

    def one(carry, _):
        params, state = carry
        zeros = jax.tree.map(jnp.zeros_like, params)
        more = {'rows': parts(n), 'share_fn': share_fn, 'value_fn': value_fn}
        direction, state = tx.update(zeros, state, params, **more)
        params = jax.tree.map(lambda w, d: w - lr * d, params, direction)
        return (params, state), jnp.concatenate([jnp.ravel(w) for w in jax.tree.leaves(params)])

    start = jax.tree.map(jnp.asarray, start)
    run = jax.jit(
        lambda: jax.lax.scan(one, (start, unbox_state(tx.init(start))), None, length=steps)[1],
    )
    return np.asarray(run())


@pytest.mark.parametrize('case', CASES)
def test_sven_follows_its_authors_code(case):
    """50 steps in float64, as near as the arithmetic allows. Catches a residual that is not to the
    power, a slope without kappa, groups across the batch, and singular values that are counted from
    the other end.

    The authors invert singular values down to rtol of the largest, and we their squares, which
    rounds a direction by eps / rtol^2. What that becomes is seen in weights that start as much
    apart: where errors are fitted (kappa 1) the slopes of small ones grow without bound, and 2e-10
    is 1e-8 after three steps, 1e-5 after ten and 0.1 after fifty, another on each machine.
    """
    tx = sven(SPECS, **CASES[case])
    rounding = np.finfo(np.float64).eps / CASES[case].get('sven_rtol', 1e-3) ** 2
    apart = {name: w * (1 + rounding * np.sign(w)) for name, w in START.items()}
    with jax.enable_x64(True):
        found, moved = (followed(tx, problem.STEPS, start=start) for start in (START, apart))
    for step, wanted in problem.read('make_sven', case).items():
        atol = 2 * np.abs(moved[step - 1] - found[step - 1]).max()
        rtol = problem.ROUNDED
        np.testing.assert_allclose(found[step - 1], wanted, rtol, atol, err_msg=str(step))


def test_sven_in_microbatches_is_sven():
    """Groups too are those of the batch's order. Catches parts that are put one after the other."""
    with jax.enable_x64(True):
        row = sven(SPECS, sven_group=3)
        np.testing.assert_allclose(followed(row, 2, n=2), followed(row, 2), rtol=1e-9)


def test_the_pseudo_inverse_solves_least_squares():
    """Of a tree of matrices, in float64 to 1e-9, where rows outnumber columns and where they do
    not; with a row twice, of which the inverse is none.
    """
    rng = np.random.default_rng(0)
    for groups in (5, 9):
        tree = {'a': rng.normal(size=(groups, 2, 2)), 'b': rng.normal(size=(groups, 3))}
        tree = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), tree)
        flat = np.concatenate([x.reshape(groups + 1, -1) for x in tree.values()], 1)
        residuals = rng.normal(size=groups + 1)
        with jax.enable_x64(True):
            found = pseudo_inverse(jax.tree.map(jnp.asarray, tree), jnp.asarray(residuals), 0, 1e-6)
        found = np.concatenate([np.ravel(x) for x in found.values()])
        np.testing.assert_allclose(found, np.linalg.pinv(flat) @ residuals, atol=1e-9)


def test_a_sequence_without_targets_has_no_say():
    """Its loss is 0, where the slope of a root is infinite. Catches NaN, and a residual of 1."""

    def masked(params, rows):
        return jnp.sum(jnp.square(rows['inputs'] @ params['w'] - 1) * rows['wanted'])

    rows = {'inputs': jnp.eye(3)[None], 'wanted': jnp.float32([[1, 1, 0]])}
    params = {'w': jnp.float32([3, 2, 5])}
    tx = sven({'w': ParamSpec('vector', ('embed',))}, sven_kappa=1.0)
    found, _ = tx.update(params, tx.init(params), params, rows=rows, share_fn=masked)
    np.testing.assert_allclose(found['w'], [2, 1, 0], atol=1e-5)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@functools.cache
def gradient():
    with jax.enable_x64(True):
        return flat(jax.grad(value_fn)(jax.tree.map(jnp.asarray, START)))


@pytest.mark.parametrize('at_a_time', [1, 4, 100])
def test_cge_is_the_forward_difference(at_a_time):
    """Of each coordinate, in float64 to 1e-8, by any number of them at a time. Catches a central
    difference, a base elsewhere, and coordinates that are left out of the last batch.
    """
    start, wanted = flat(START), []
    for i in range(10):
        moved = start + 5e-3 * np.eye(10)[i]
        params = {'first': moved[:8].reshape(4, 2), 'second': moved[8:].reshape(2, 1)}
        with jax.enable_x64(True):
            wanted.append((float(value_fn(params)) - float(value_fn(START))) / 5e-3)
    with jax.enable_x64(True):
        found = -followed(cge(SPECS, cge_at_a_time=at_a_time), 1, lr=1.0)[0] + start
    np.testing.assert_allclose(found, wanted, atol=1e-8)


def test_cge_tends_to_the_gradient():
    """Its cosine with it, in float32 too. Catches a step that divides twice."""
    with jax.enable_x64(True):
        small = flat(START) - followed(cge(SPECS, cge_step=1e-6), 1, lr=1.0)[0]
    np.testing.assert_allclose(small, gradient(), rtol=1e-4)
    single = flat(START) - followed(cge(SPECS), 1, lr=1.0)[0]
    norms = np.linalg.norm(single) * np.linalg.norm(gradient())
    assert single @ gradient() / norms > 0.999


def test_cge_of_some_coordinates_draws_others_in_each_update():
    """Three of ten, the estimates of these. Catches numbers that are drawn once, and a coordinate
    twice.
    """
    with jax.enable_x64(True):
        path = followed(cge(SPECS, cge_coordinates=3, cge_step=1e-6), 20, lr=1e-9)
    steps = np.diff(np.concatenate([flat(START)[None], path]), axis=0) / -1e-9
    moved = np.abs(steps) > 1e-3
    assert np.all(moved.sum(1) == 3) and np.all(moved.any(0))
    np.testing.assert_allclose(steps[moved], np.tile(gradient(), (20, 1))[moved], rtol=1e-2)


@pytest.mark.parametrize('row', [sven, cge])
def test_of_one_role_it_looks_at_the_loss_of_all(row):
    """Behind a partition the others stand still, and it is as where they are constants."""

    def of_hidden(first):
        return share_fn({'first': first, 'second': START['second']}, ROWS)

    with jax.enable_x64(True):
        still = partition_by_role(SPECS, lambda specs: optax.set_to_zero(), hidden=row)
        found = followed(still, 1, lr=1.0)[0]
        alone = row({'first': SPECS['first']})
        params = {'first': jnp.asarray(START['first'])}
        direction, _ = alone.update(
            params,
            alone.init(params),
            params,
            rows=parts(1),
            share_fn=lambda own, rows: share_fn({**own, 'second': START['second']}, rows),
            value_fn=lambda own: of_hidden(own['first']),
        )
    np.testing.assert_allclose(found[8:], flat(START)[8:])
    np.testing.assert_allclose(found[:8], flat(START)[:8] - flat(direction), atol=1e-7)


@pytest.mark.parametrize(('row', 'said'), [(sven, 'share_fn'), (cge, 'value_fn')])
def test_what_it_asks_for_must_be_given(row, said):
    tx = row(SPECS)
    with pytest.raises(ValueError, match=said):
        tx.update(START, tx.init(START), START)
