"""Property: dependence between tokens, by gradient and by value, in training and in evaluation;
statistics without gradient; removed norms.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.norms import NORMS
from modules.statistics import BACKWARD_STATS, STATS
from tests.modules.norm_driver import D, M, build, differentiate, run, tokens

STATEFUL = sorted(name for name in NORMS if 'valid' in NORMS[name].__dataclass_fields__)
LEAKING = sorted(name for name in NORMS if NORMS[name].leaks)
WITHOUT_GRADIENT = {'powernorm'}  # of the statistics over tokens


def build_with_zero_backward(name, **options):
    """Builds a norm with a zero running statistic of the backward pass, its initial value."""
    case = build(name, **options)
    backward = jax.tree.map(np.zeros_like, case.stats.get(BACKWARD_STATS, {}))
    return case._replace(stats=case.stats | {BACKWARD_STATS: backward} if backward else case.stats)


def dependence(name, training, **options):
    """Measures how much a token's output depends on other tokens.

    Returns the largest gradient of each output by each token [M, M], and the change of the first
    output as all other tokens change.
    """
    case, (x, dy) = build_with_zero_backward(name, **options), jnp.float32(tokens())

    @jax.jit
    def measure(x, dy):
        def f(x):
            return run(case.norm, case.params, case.stats, x, training)[0]

        y, pull = jax.vjp(f, x)
        one_token_MMD = jnp.eye(M)[:, :, None] * dy[None]
        (dx_MMD,) = jax.vmap(pull)(one_token_MMD)
        return dx_MMD, y[0] - f(x.at[1:].add(dy[1:]))[0]

    dx_MMD, change = measure(x, dy)
    assert dx_MMD.shape == (M, *x.shape)
    return np.abs(dx_MMD).max(-1), np.abs(change).max()


def off_diagonal(matrix_MM):
    return matrix_MM[~np.eye(M, dtype=bool)]


@pytest.mark.parametrize('name', NORMS)
def test_tokens_are_independent_in_evaluation(name):
    """Catches batch statistics in evaluation."""
    dependence_MM, change = dependence(name, False)
    assert off_diagonal(dependence_MM).max() == 0 < np.diag(dependence_MM).min()
    assert change == 0


@pytest.mark.parametrize('name', NORMS)
def test_leaks_declare_dependence_in_training(name):
    """Catches a norm that leaks without declaring it, and the reverse."""
    dependence_MM, change = dependence(name, True)
    assert (off_diagonal(dependence_MM).max() > 0) == (
        name in LEAKING and name not in WITHOUT_GRADIENT
    )
    assert (change > 1e-3) == (name in LEAKING)


def test_ghost_batches_are_independent():
    dependence_MM, _ = dependence('ghost_batchnorm', True, ghost_batches=3)
    same_MM = np.kron(np.eye(3), np.ones((4, 4))) > 0
    assert dependence_MM[~same_MM].max() == 0 < dependence_MM[same_MM].min()


def test_estimated_statistics_have_no_gradient():
    """The statistics include this batch by value, but no gradient flows through them."""
    dependence_MM, change = dependence('batch_channel', True, estimated=True)
    assert off_diagonal(dependence_MM).max() == 0
    assert change > 1e-3


@pytest.mark.parametrize('name', STATEFUL)
def test_initialization_leaves_statistics(name):
    """Catches an update by the batch on which a norm is initialized."""
    x = jnp.float32(tokens()[0])
    stats = NORMS[name]().init(jax.random.key(0), x)
    for tree in (stats[STATS], stats.get(BACKWARD_STATS, {})):
        for key, statistic in tree.items():
            ones = key in ('variance', 'mean_square', 'deviation')
            np.testing.assert_array_equal(
                statistic, np.full(statistic.shape, int(ones)), err_msg=key
            )


@pytest.mark.parametrize('name', sorted(NORMS.keys() - set(STATEFUL)))
def test_other_norms_have_no_state(name):
    assert build(name).stats == {}


@pytest.mark.default_rows('rmsnorm_removal')
@pytest.mark.parametrize('name', ['layernorm_removal', 'rmsnorm_removal'])
def test_removed_norm_is_affine(name):
    """f(x + y) - f(0) = f(x) - f(0) + f(y) - f(0), in training too; before the removal it is not.

    Catches a removal an update late, a constant that still changes, an ignored order.
    """
    x, y = (jnp.float32(v) for v in tokens())

    def curvature(updates, training, **options):
        case = build(name, removal_start=3, removal_gap=2, **options)
        stats = {STATS: case.stats[STATS] | {'updates': np.int32(updates)}}
        f = differentiate(case.norm, training)
        (at_sum, next_stats, *_), (at_x, *_), (at_y, *_), (at_0, *_) = (
            f(case.params, stats, v, x) for v in (x + y, x, y, jnp.zeros_like(x))
        )
        if training:
            assert next_stats['updates'] == updates + 1
            is_constant = next_stats['deviation'] == case.stats[STATS]['deviation']
            assert is_constant == (updates >= 3 + 2 * options.get('order', 0))
        return np.abs(at_sum - at_x - at_y + at_0).max()

    for training in (True, False):
        assert curvature(2, training) > 0.1
        assert curvature(3, training) < 1e-5
        assert curvature(6, training, order=2) > 0.1
        assert curvature(7, training, order=2) < 1e-5


def test_removal_constant_is_running_mean():
    """The first deviation is taken in full, then a tenth of the way each. By hand, for two
    batches.
    """
    case = build('layernorm_removal', randomize=False, features=D)
    batches = [np.random.default_rng(i).normal(0, 1 + i, (M, D)) for i in range(2)]
    stats = case.stats
    for x in batches:
        _, next_stats = run(case.norm, case.params, stats, jnp.float32(x), True)
        stats = {STATS: next_stats}
    first, second = (np.mean(np.sqrt(np.var(x, -1) + case.norm.eps)) for x in batches)
    np.testing.assert_allclose(next_stats['deviation'], 0.9 * first + 0.1 * second, rtol=1e-5)
