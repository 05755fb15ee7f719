"""Property: which tokens a token depends on, by gradient and by value, in training and in
evaluation; what no gradient flows through; what is left of a norm that is removed.
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


def drawn(name, **options):
    """A norm whose running statistic of the backward pass is zero, as it starts."""
    case = build(name, **options)
    backward = jax.tree.map(np.zeros_like, case.stats.get(BACKWARD_STATS, {}))
    return case._replace(stats=case.stats | {BACKWARD_STATS: backward} if backward else case.stats)


def dependence(name, training, **options):
    """How much the output of a token depends on another token, by gradient [M, M], and how much
    that of the first token changes as all others do.
    """
    case, (x, dy) = drawn(name, **options), jnp.float32(tokens())

    @jax.jit
    def both(x, dy):
        def f(x):
            return run(case.norm, case.params, case.stats, x, training)[0]

        y, pull = jax.vjp(f, x)
        one_token_MMD = jnp.eye(M)[:, :, None] * dy[None]
        (dx_MMD,) = jax.vmap(pull)(one_token_MMD)
        return dx_MMD, y[0] - f(x.at[1:].add(dy[1:]))[0]

    dx_MMD, moved = both(x, dy)
    assert dx_MMD.shape == (M, *x.shape)
    return np.abs(dx_MMD).max(-1), np.abs(moved).max()


def off_diagonal(matrix_MM):
    return matrix_MM[~np.eye(M, dtype=bool)]


@pytest.mark.parametrize('name', NORMS)
def test_a_token_is_alone_in_evaluation(name):
    """Catches a batch's own statistics in evaluation."""
    found, moved = dependence(name, False)
    assert off_diagonal(found).max() == 0 < np.diag(found).min()
    assert moved == 0


@pytest.mark.parametrize('name', NORMS)
def test_tokens_meet_in_training_where_the_norm_says_so(name):
    """Catches a norm that leaks and does not say so, and the reverse."""
    found, moved = dependence(name, True)
    assert (off_diagonal(found).max() > 0) == (name in LEAKING and name not in WITHOUT_GRADIENT)
    assert (moved > 1e-3) == (name in LEAKING)


def test_ghost_batches_do_not_meet():
    found_MM, _ = dependence('ghost_batchnorm', True, ghost_batches=3)
    same_MM = np.kron(np.eye(3), np.ones((4, 4))) > 0
    assert found_MM[~same_MM].max() == 0 < found_MM[same_MM].min()


def test_estimated_statistics_are_constants():
    """They hold this batch, by value; no gradient flows through them."""
    found, moved = dependence('batch_channel', True, estimated=True)
    assert off_diagonal(found).max() == 0
    assert moved > 1e-3


@pytest.mark.parametrize('name', STATEFUL)
def test_initialization_measures_nothing(name):
    """Catches an update of what a norm starts with by the batch it is initialized on."""
    x = jnp.float32(tokens()[0])
    stats = NORMS[name]().init(jax.random.key(0), x)
    for tree in (stats[STATS], stats.get(BACKWARD_STATS, {})):
        for key, value in tree.items():
            ones = key in ('variance', 'mean_square', 'deviation')
            np.testing.assert_array_equal(value, np.full(value.shape, int(ones)), err_msg=key)


@pytest.mark.parametrize('name', sorted(NORMS.keys() - set(STATEFUL)))
def test_the_others_carry_nothing(name):
    assert build(name).stats == {}


@pytest.mark.default_rows('rmsnorm_removal')
@pytest.mark.parametrize('name', ['layernorm_removal', 'rmsnorm_removal'])
def test_what_is_removed_is_affine(name):
    """f(x + y) - f(0) = f(x) - f(0) + f(y) - f(0), in training too; before, it is not.

    Catches a removal an update late, a constant that goes on moving, an order that is not read.
    """
    x, y = (jnp.float32(v) for v in tokens())

    def curvature(updates, training, **options):
        case = build(name, removal_start=3, removal_gap=2, **options)
        stats = {STATS: case.stats[STATS] | {'updates': np.int32(updates)}}
        f = differentiate(case.norm, training)
        (at_sum, new, *_), (at_x, *_), (at_y, *_), (at_0, *_) = (
            f(case.params, stats, v, x) for v in (x + y, x, y, jnp.zeros_like(x))
        )
        if training:
            assert new['updates'] == updates + 1
            still = new['deviation'] == case.stats[STATS]['deviation']
            assert still == (updates >= 3 + 2 * options.get('order', 0))
        return np.abs(at_sum - at_x - at_y + at_0).max()

    for training in (True, False):
        assert curvature(2, training) > 0.1
        assert curvature(3, training) < 1e-5
        assert curvature(6, training, order=2) > 0.1
        assert curvature(7, training, order=2) < 1e-5


def test_the_constant_is_the_running_mean_of_the_deviations():
    """The first is taken whole; then a tenth of the way each. By hand, of two batches."""
    case = build('layernorm_removal', drawn=False, features=D)
    batches = [np.random.default_rng(i).normal(0, 1 + i, (M, D)) for i in range(2)]
    stats = case.stats
    for x in batches:
        _, new = run(case.norm, case.params, stats, jnp.float32(x), True)
        stats = {STATS: new}
    first, second = (np.mean(np.sqrt(np.var(x, -1) + case.norm.eps)) for x in batches)
    np.testing.assert_allclose(new['deviation'], 0.9 * first + 0.1 * second, rtol=1e-5)
