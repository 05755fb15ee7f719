"""Property: gradients of weights from some of the tokens are unbiased and less noisy than plain
sampling. Reference: how many are kept for sure, by trying each number. Contract: what is kept for
the backward pass.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from lm.config.fields import MeshConfig
from lm.devices.mesh import make_mesh, trace_on_mesh
from modules.activations import ACTIVATIONS
from modules.kernels import kernels_for
from modules.kernels.matmul.wta_crs import (
    WTACRS,
    count_winners,
    sample_indices,
    sample_shard_rows,
    sampled_product,
)
from modules.mlp import MLP
from modules.params import split_boxes
from modules.products import prepare_input, product
from modules.statistics import STATS, key_to_int

TOKENS, KEPT, WIDE, NARROW = 64, 20, 8, 5
RNG = np.random.default_rng(0)
# Sizes of rows as different as in a trained model: some tokens are kept for sure, and some drawn.
SIZES = np.exp(1.3 * RNG.normal(size=(TOKENS, 1)))
X = jnp.float32(SIZES * RNG.normal(size=(TOKENS, WIDE)) / np.sqrt(WIDE))
W = jnp.float32(RNG.normal(size=(WIDE, NARROW)))
GRAD = jnp.float32(RNG.normal(size=(TOKENS, NARROW)))
EXACT = np.float64(X).T @ np.float64(GRAD)


def three(kernel):
    """(forward, gradient of x, gradient of w) by the key, of X W with the cotangent GRAD."""

    def run(key):
        rows = kernel.sample_rows(key, X)
        y, pull = jax.vjp(lambda x, w: sampled_product(x, w, rows), X, W)
        return y, *pull(GRAD)

    return run


@functools.cache
def estimates(draws=20_000, **options):
    """[draws, WIDE, NARROW]: the gradient of W by as many keys."""
    kernel = WTACRS(**{'wta_crs_ratio': KEPT / TOKENS, 'wta_crs_least': 1} | options)
    many = jax.jit(jax.vmap(lambda key: three(kernel)(key)[2]))
    return np.float64(many(jax.random.split(jax.random.key(0), draws)))


def assert_unbiased(draws, wanted):
    errors = draws.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(0) - wanted) < 3 * errors)


def test_it_is_unbiased():
    """Within 3 standard errors, of all 40 numbers. Catches a weight without 1 / (K - c) or without
    1 - P_c, and tokens kept for sure that are drawn too.
    """
    assert_unbiased(estimates(), EXACT)


def test_its_variance_is_that_of_the_draws_alone():
    """Of all 40 numbers together, and below 0.65 of what drawing all K by p has. Catches a c that
    is always 0, tokens that are drawn by other chances than they are divided by.
    """
    order = np.argsort(-np.linalg.norm(np.float64(X), axis=1))
    x, grad = np.float64(X)[order], np.float64(GRAD)[order]
    p = np.linalg.norm(x, axis=1) / np.linalg.norm(x, axis=1).sum()

    def variance(c):
        """Of c tokens kept for sure and K - c drawn from the rest."""
        q, outer = p[c:] / p[c:].sum(), np.einsum('mi,mo->mio', x[c:], grad[c:])
        squares = np.sum(outer**2, (1, 2))
        return (np.sum(squares / q) - np.sum(outer.sum(0) ** 2)) / (KEPT - c)

    c = np.argmin([(1 - p[:c].sum()) / (KEPT - c) for c in range(KEPT)])
    np.testing.assert_allclose(np.sum(estimates().var(0)), variance(c), rtol=0.03)
    assert c > 3 and variance(c) < 0.65 * variance(0)


@pytest.mark.parametrize('spread', [0.0, 0.5, 1.5, 4.0])
def test_how_many_are_kept_for_sure(spread):
    """c against every number there is. Catches a sum that counts the token itself, or K too."""
    for seed in range(20):
        sizes = np.sort(np.exp(spread * np.random.default_rng(seed).normal(size=TOKENS)))[::-1]
        p = sizes / sizes.sum()
        costs = [(1 - p[:c].sum()) / (KEPT - c) for c in range(KEPT)]
        assert count_winners(jnp.float32(p[:KEPT])) == np.argmin(np.round(costs, 7))
        assert spread or np.argmin(np.round(costs, 7)) == 0


@pytest.mark.default_rows('wta_crs')
@pytest.mark.parametrize('name', ['direct', 'wta_crs'])
def test_the_result_and_the_gradient_of_the_input_are_exact(name):
    """Bitwise those of the plain product. Catches rows that reach the forward pass."""
    wanted, pull = jax.vjp(kernels_for('cpu', matmul=name).matmul, X, W)
    y, dx, _ = three(WTACRS())(jax.random.key(1))
    np.testing.assert_array_equal(y, wanted)
    np.testing.assert_array_equal(dx, pull(GRAD)[0])


def test_all_tokens_are_the_exact_gradient():
    """By a ratio of 1, and where the fewest are more than there are."""
    for options in ({'wta_crs_ratio': 1.0}, {'wta_crs_least': TOKENS}):
        assert WTACRS(**options).sample_rows(jax.random.key(0), X) is None


@pytest.mark.default_rows('20-True')
@pytest.mark.parametrize(('above_0', 'exact'), [(0, True), (1, True), (KEPT, True), (30, False)])
def test_tokens_of_size_0_are_never_drawn(above_0, exact):
    """As experts have that nobody goes to. Catches 0 / 0, and draws of nothing."""
    sizes = jnp.zeros(TOKENS).at[np.arange(above_0) * 2].set(jnp.arange(1.0, above_0 + 1))
    for seed in range(5):
        places, weights = sample_indices(jax.random.key(seed), sizes, KEPT)
        total = jnp.zeros(TOKENS).at[places].add(weights)
        assert np.isfinite(weights).all() and not total[sizes == 0].any()
        if exact:
            np.testing.assert_allclose(total[sizes > 0], 1, rtol=1e-5)


@pytest.mark.full
def test_rows_of_a_cut_batch_are_drawn_by_each_shard():
    """Unbiased, and no shard has the rows of another. Catches places that count from the first
    token of the batch, a key that all shards draw by.
    """
    kernel, mesh = WTACRS(wta_crs_ratio=0.4, wta_crs_least=1), make_mesh(MeshConfig(data=4))
    rows = trace_on_mesh(
        mesh, lambda: kernel.sample_rows(jax.random.key(0), jnp.tile(X[:16], (4, 1)))
    )()
    assert rows.scaled_SKI.shape == (4, 6, WIDE)
    assert rows.places_SK.max() < 16 and len(np.unique(rows.places_SK, axis=0)) > 1
    many = jax.vmap(trace_on_mesh(mesh, lambda key: three(kernel)(key)[2]))
    keys = jax.random.split(jax.random.key(1), 20_000)
    assert_unbiased(np.float64(jax.jit(many)(keys)), EXACT)


class Two(nn.Module):
    """An input of two products, and a product of its own."""

    options: tuple = (('wta_crs_ratio', 0.25), ('wta_crs_least', 1))

    @nn.compact
    def __call__(self, x_BTD):
        how = {
            'matmul': kernels_for(
                'cpu', matmul='wta_crs', matmul_options=dict(self.options)
            ).matmul,
            'dtype': jnp.float32,
        }
        shared = prepare_input(self, 'input', x_BTD, **how)
        a, b = (
            product(self, name, shared, ('embed', 'mlp'), ('embed',), 6, **how) for name in 'ab'
        )
        return product(self, 'c', a + b, ('mlp', 'embed'), ('mlp',), 3, **how)


def trained_loss(layer, stats, x):
    """params -> (sum of squares, what is carried then), in training."""

    def run(params):
        y, carried = layer.apply({'params': params, **stats}, x, mutable=[STATS])
        return jnp.sum(y**2), carried

    return run


def made(layer, x):
    found = layer.init(jax.random.key(0), x)
    return split_boxes(found['params'])[0], {STATS: found[STATS]}


@pytest.mark.full
def test_keys_move_on_and_are_of_training_alone():
    """Other tokens in each update, the same from the same state; evaluation needs no key."""
    x = X.reshape(4, 16, WIDE)
    params, stats = made(Two(), x)
    assert stats[STATS].keys() == {'input_rows', 'c_rows'}
    step = jax.jit(jax.grad(trained_loss(Two(), stats, x), has_aux=True))
    (first, carried), (again, _) = step(params), step(params)
    later, _ = jax.grad(trained_loss(Two(), carried, x), has_aux=True)(params)
    np.testing.assert_array_equal(first['a'], again['a'])
    assert np.abs(first['a'] - later['a']).max() > 1e-2
    exact = jax.grad(lambda p: jnp.sum(Two().apply({'params': p}, x) ** 2))(params)
    plain = jax.grad(trained_loss(Two(options=(('wta_crs_ratio', 1.0),)), stats, x), has_aux=True)
    np.testing.assert_allclose(exact['a'], plain(params)[0]['a'], rtol=1e-5, atol=1e-5)


class Experts(nn.Module):
    """A product of each expert's own rows."""

    @nn.compact
    def __call__(self, x_ECD):
        options = {'wta_crs_ratio': 0.4, 'wta_crs_least': 1}
        matmul = kernels_for('cpu', matmul='wta_crs', matmul_options=options).matmul
        axes = ('expert', 'embed', 'mlp')
        how = {'matmul': matmul, 'dtype': jnp.float32}
        return product(self, 'up', x_ECD, axes, ('embed',), 3, **how)


@pytest.mark.full
def test_experts_draw_their_own_rows():
    """Unbiased for each, and 0 for one that no token goes to. Catches one draw for all experts."""
    x = X.reshape(4, 16, WIDE).at[2].set(0)
    params, stats = made(Experts(), x)

    def gradient(key):
        carried = jax.tree.map(lambda _: key_to_int(key), stats)
        return jax.grad(lambda p: trained_loss(Experts(), carried, x)(p)[0])(params)['up']

    keys = jax.random.split(jax.random.key(0), 10_000)
    draws = np.float64(jax.jit(jax.vmap(gradient))(keys))
    exact = jax.grad(lambda p: jnp.sum(Experts().apply({'params': p}, x) ** 2))(params)['up']
    assert not draws[:, 2].any()
    used = [0, 1, 3]
    assert_unbiased(draws[:, used], np.float64(exact)[np.array(used)])
    assert abs(np.corrcoef(draws[:, 0, 0, 0], draws[:, 1, 0, 0])[0, 1]) < 0.05


def kept_shapes(run, params):
    """Shapes of what the backward pass of run(params) is given, each array once."""
    _, pull = jax.vjp(lambda p: run(p)[0], params)
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(pull)}
    return sorted(leaf.shape for leaf in leaves.values() if leaf.ndim > 1)


@pytest.mark.full
def test_what_is_kept_for_the_backward_pass():
    """16 rows of 64 once for both products, where they came from, no [tokens, width]. Catches the
    input kept beside its rows, and a set of rows for each product of one input.
    """
    x = X.reshape(4, 16, WIDE)
    params, stats = made(Two(), x)
    shapes = kept_shapes(trained_loss(Two(), stats, x), params)
    of_inputs = [shape for shape in shapes if WIDE in shape and shape != (WIDE, 6)]
    assert of_inputs == [(1, 16, WIDE)]
    assert shapes.count((1, 16, 6)) == 1 and (64, 6) not in shapes


def test_an_mlp_keeps_less():
    """Hidden activations are kept for the activation alone, and its input by rows. Catches rows
    that are kept beside all of the input.
    """
    x = jax.ShapeDtypeStruct((8, 128, 64), jnp.float32)

    def bytes_kept(matmul):
        kernels = kernels_for('cpu', matmul=matmul)
        layer = MLP(256, ACTIVATIONS['relu'], kernels, jnp.float32)
        found = jax.eval_shape(layer.init, jax.random.key(0), x)
        params, stats = split_boxes(found['params'])[0], found.get(STATS, {})

        def kept(params, stats, x):
            run = trained_loss(layer, {STATS: stats}, x)
            return jax.vjp(lambda p: run(p)[0], params)[1]

        leaves = jax.tree.leaves(jax.eval_shape(kept, params, stats, x))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    assert bytes_kept('wta_crs') < 0.75 * bytes_kept('direct')


def test_rows_are_of_the_type_of_the_input():
    """Not of the float32 that their sizes are measured in, twice the memory."""
    rows = sample_shard_rows(jax.random.key(0), X.astype(jnp.bfloat16), KEPT)
    assert rows.scaled_SKI.dtype == jnp.bfloat16
