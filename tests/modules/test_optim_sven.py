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
    outputs = jnp.tanh(rows['inputs'] @ params['first']) @ params['second']
    return jnp.sum(jnp.square(outputs[:, 0] - rows['wanted'])) / 6


def value_fn(params):
    return share_fn(params, ROWS)


def split_rows(n):
    """Returns n microbatches; microbatch i has the rows i, i + n, ..."""
    return jax.tree.map(lambda x: jnp.stack([x[i::n] for i in range(n)]), ROWS)


def run_updates(tx, steps, lr=LR, n=1, start=START):
    """Returns the weights after each update by -lr times the direction, flat [steps, 10]."""

    def update(carry, _):
        params, state = carry
        zeros = jax.tree.map(jnp.zeros_like, params)
        extra = {'rows': split_rows(n), 'share_fn': share_fn, 'value_fn': value_fn}
        direction, state = tx.update(zeros, state, params, **extra)
        params = jax.tree.map(lambda w, d: w - lr * d, params, direction)
        return (params, state), jnp.concatenate([jnp.ravel(w) for w in jax.tree.leaves(params)])

    start = jax.tree.map(jnp.asarray, start)
    run = jax.jit(
        lambda: jax.lax.scan(update, (start, unbox_state(tx.init(start))), None, length=steps)[1],
    )
    return np.asarray(run())


@pytest.mark.parametrize('case', CASES)
def test_sven_follows_authors_code(case):
    """50 steps in float64, as near as the arithmetic allows. Catches a residual without the power,
    a slope without kappa, groups across the batch, and singular values that are counted from the
    other end.

    The authors invert singular values down to rtol of the largest, and we their squares, which
    rounds a direction by eps / rtol^2. The effect is measured by weights that start as far apart:
    if errors are fitted (kappa 1) the slopes of small errors grow without bound, and 2e-10 is 1e-8
    after three steps, 1e-5 after ten and 0.1 after fifty, with other digits on each machine.
    """
    tx = sven(SPECS, **CASES[case])
    rounding = np.finfo(np.float64).eps / CASES[case].get('sven_rtol', 1e-3) ** 2
    apart = {name: w * (1 + rounding * np.sign(w)) for name, w in START.items()}
    with jax.enable_x64(True):
        actual, perturbed = (
            run_updates(tx, problem.STEPS, start=start) for start in (START, apart)
        )
    for step, expected in problem.read('make_sven', case).items():
        atol = 2 * np.abs(perturbed[step - 1] - actual[step - 1]).max()
        rtol = problem.ROUNDED
        np.testing.assert_allclose(actual[step - 1], expected, rtol, atol, err_msg=str(step))


def test_sven_is_equal_in_microbatches():
    """Groups follow the batch's order too. Catches microbatches that are joined end to end."""
    with jax.enable_x64(True):
        row = sven(SPECS, sven_group=3)
        np.testing.assert_allclose(run_updates(row, 2, n=2), run_updates(row, 2), rtol=1e-9)


def test_pseudo_inverse_solves_least_squares():
    """Checks a tree of matrices in float64 to 1e-9, with more rows than columns and with fewer; a
    repeated row makes the matrix singular.
    """
    rng = np.random.default_rng(0)
    for groups in (5, 9):
        tree = {'a': rng.normal(size=(groups, 2, 2)), 'b': rng.normal(size=(groups, 3))}
        tree = jax.tree.map(lambda x: np.concatenate([x, x[:1]]), tree)
        flat = np.concatenate([x.reshape(groups + 1, -1) for x in tree.values()], 1)
        residuals = rng.normal(size=groups + 1)
        with jax.enable_x64(True):
            solution = pseudo_inverse(
                jax.tree.map(jnp.asarray, tree), jnp.asarray(residuals), 0, 1e-6
            )
        solution = np.concatenate([np.ravel(x) for x in solution.values()])
        np.testing.assert_allclose(solution, np.linalg.pinv(flat) @ residuals, atol=1e-9)


def test_sequence_without_targets_has_no_effect():
    """Its loss is 0, where the slope of a root is infinite. Catches NaN, and a residual of 1."""

    def masked_loss(params, rows):
        return jnp.sum(jnp.square(rows['inputs'] @ params['w'] - 1) * rows['wanted'])

    rows = {'inputs': jnp.eye(3)[None], 'wanted': jnp.float32([[1, 1, 0]])}
    params = {'w': jnp.float32([3, 2, 5])}
    tx = sven({'w': ParamSpec('vector', ('embed',))}, sven_kappa=1.0)
    step, _ = tx.update(params, tx.init(params), params, rows=rows, share_fn=masked_loss)
    np.testing.assert_allclose(step['w'], [2, 1, 0], atol=1e-5)


def flat(tree):
    return np.concatenate([np.ravel(leaf) for leaf in jax.tree.leaves(tree)])


@functools.cache
def gradient():
    with jax.enable_x64(True):
        return flat(jax.grad(value_fn)(jax.tree.map(jnp.asarray, START)))


@pytest.mark.parametrize('at_a_time', [1, 4, 100])
def test_cge_is_the_forward_difference(at_a_time):
    """Checks each coordinate, in float64 to 1e-8, by any number of them at a time. Catches a
    central difference, a base elsewhere, and coordinates that are left out of the last batch.
    """
    start, expected = flat(START), []
    for i in range(10):
        moved = start + 5e-3 * np.eye(10)[i]
        params = {'first': moved[:8].reshape(4, 2), 'second': moved[8:].reshape(2, 1)}
        with jax.enable_x64(True):
            expected.append((float(value_fn(params)) - float(value_fn(START))) / 5e-3)
    with jax.enable_x64(True):
        actual = -run_updates(cge(SPECS, cge_at_a_time=at_a_time), 1, lr=1.0)[0] + start
    np.testing.assert_allclose(actual, expected, atol=1e-8)


def test_cge_tends_to_the_gradient():
    """Its cosine with it, in float32 too. Catches a step that divides twice."""
    with jax.enable_x64(True):
        small = flat(START) - run_updates(cge(SPECS, cge_step=1e-6), 1, lr=1.0)[0]
    np.testing.assert_allclose(small, gradient(), rtol=1e-4)
    single = flat(START) - run_updates(cge(SPECS), 1, lr=1.0)[0]
    norms = np.linalg.norm(single) * np.linalg.norm(gradient())
    assert single @ gradient() / norms > 0.999


def test_cge_draws_new_coordinates_in_each_update():
    """Three of ten, the estimates of these. Catches numbers that are drawn once, and a coordinate
    twice.
    """
    with jax.enable_x64(True):
        path = run_updates(cge(SPECS, cge_coordinates=3, cge_step=1e-6), 20, lr=1e-9)
    steps = np.diff(np.concatenate([flat(START)[None], path]), axis=0) / -1e-9
    moved = np.abs(steps) > 1e-3
    assert np.all(moved.sum(1) == 3) and np.all(moved.any(0))
    np.testing.assert_allclose(steps[moved], np.tile(gradient(), (20, 1))[moved], rtol=1e-2)


@pytest.mark.parametrize('row', [sven, cge])
def test_single_role_uses_total_loss(row):
    """Behind a partition the others stand still, and it is as where they are constants."""

    def hidden_loss(first):
        return share_fn({'first': first, 'second': START['second']}, ROWS)

    with jax.enable_x64(True):
        partitioned = partition_by_role(SPECS, lambda specs: optax.set_to_zero(), hidden=row)
        actual = run_updates(partitioned, 1, lr=1.0)[0]
        single = row({'first': SPECS['first']})
        params = {'first': jnp.asarray(START['first'])}
        direction, _ = single.update(
            params,
            single.init(params),
            params,
            rows=split_rows(1),
            share_fn=lambda hidden_params, rows: share_fn(
                {**hidden_params, 'second': START['second']}, rows
            ),
            value_fn=lambda hidden_params: hidden_loss(hidden_params['first']),
        )
    np.testing.assert_allclose(actual[8:], flat(START)[8:])
    np.testing.assert_allclose(actual[:8], flat(START)[:8] - flat(direction), atol=1e-7)


@pytest.mark.parametrize(('row', 'message'), [(sven, 'share_fn'), (cge, 'value_fn')])
def test_missing_extra_arguments_are_refused(row, message):
    tx = row(SPECS)
    with pytest.raises(ValueError, match=message):
        tx.update(START, tx.init(START), START)
