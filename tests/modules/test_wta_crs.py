"""Property: weight gradients from a sample of the tokens are unbiased and less noisy than plain
sampling. Reference: the number of certain tokens, by trying each. Contract: residuals of the
backward pass.
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
# Row norms vary as in a trained model: some tokens are certain, and some drawn.
SIZES = np.exp(1.3 * RNG.normal(size=(TOKENS, 1)))
X = jnp.float32(SIZES * RNG.normal(size=(TOKENS, WIDE)) / np.sqrt(WIDE))
W = jnp.float32(RNG.normal(size=(WIDE, NARROW)))
GRAD = jnp.float32(RNG.normal(size=(TOKENS, NARROW)))
EXACT = np.float64(X).T @ np.float64(GRAD)


def forward_and_gradients(kernel):
    """Returns key -> (forward, gradient of x, gradient of w) of X W with the cotangent GRAD."""

    def run(key):
        rows = kernel.sample_rows(key, X)
        y, pull = jax.vjp(lambda x, w: sampled_product(x, w, rows), X, W)
        return y, *pull(GRAD)

    return run


@functools.cache
def estimates(draws=20_000, **options):
    """Returns the gradient of W with each of many keys, [draws, WIDE, NARROW]."""
    kernel = WTACRS(**{'wta_crs_ratio': KEPT / TOKENS, 'wta_crs_least': 1} | options)
    draw = jax.jit(jax.vmap(lambda key: forward_and_gradients(kernel)(key)[2]))
    return np.float64(draw(jax.random.split(jax.random.key(0), draws)))


def assert_unbiased(draws, expected):
    errors = draws.std(0) / np.sqrt(len(draws))
    assert np.all(np.abs(draws.mean(0) - expected) < 3 * errors)


def test_gradient_is_unbiased():
    """Within 3 standard errors, for all 40 numbers. Catches a weight without 1 / (K - c) or without
    1 - P_c, and certain tokens that are drawn too.
    """
    assert_unbiased(estimates(), EXACT)


def test_variance_comes_from_draws_only():
    """Over all 40 numbers, and below 0.65 of the variance of drawing all K by p. Catches a c that
    is always 0, and tokens drawn with other probabilities than those that divide them.
    """
    order = np.argsort(-np.linalg.norm(np.float64(X), axis=1))
    x, grad = np.float64(X)[order], np.float64(GRAD)[order]
    p = np.linalg.norm(x, axis=1) / np.linalg.norm(x, axis=1).sum()

    def variance(c):
        """Returns the variance with c certain tokens and K - c draws from the rest."""
        q, outer = p[c:] / p[c:].sum(), np.einsum('mi,mo->mio', x[c:], grad[c:])
        squares = np.sum(outer**2, (1, 2))
        return (np.sum(squares / q) - np.sum(outer.sum(0) ** 2)) / (KEPT - c)

    c = np.argmin([(1 - p[:c].sum()) / (KEPT - c) for c in range(KEPT)])
    np.testing.assert_allclose(np.sum(estimates().var(0)), variance(c), rtol=0.03)
    assert c > 3 and variance(c) < 0.65 * variance(0)


@pytest.mark.parametrize('spread', [0.0, 0.5, 1.5, 4.0])
def test_count_winners_minimizes_cost(spread):
    """Tries every c. Catches a sum that includes the token itself, or K too."""
    for seed in range(20):
        sizes = np.sort(np.exp(spread * np.random.default_rng(seed).normal(size=TOKENS)))[::-1]
        p = sizes / sizes.sum()
        costs = [(1 - p[:c].sum()) / (KEPT - c) for c in range(KEPT)]
        assert count_winners(jnp.float32(p[:KEPT])) == np.argmin(np.round(costs, 7))
        assert spread or np.argmin(np.round(costs, 7)) == 0


@pytest.mark.default_rows('wta_crs')
@pytest.mark.parametrize('name', ['direct', 'wta_crs'])
def test_forward_and_input_gradient_are_exact(name):
    """Bitwise equal to the plain product. Catches samples that reach the forward pass."""
    expected, pull = jax.vjp(kernels_for('cpu', matmul=name).matmul, X, W)
    y, dx, _ = forward_and_gradients(WTACRS())(jax.random.key(1))
    np.testing.assert_array_equal(y, expected)
    np.testing.assert_array_equal(dx, pull(GRAD)[0])


def test_sampling_all_tokens_is_exact():
    """A ratio of 1, or a minimum above the number of tokens, samples all."""
    for options in ({'wta_crs_ratio': 1.0}, {'wta_crs_least': TOKENS}):
        assert WTACRS(**options).sample_rows(jax.random.key(0), X) is None


@pytest.mark.default_rows('20-True')
@pytest.mark.parametrize(('n_nonzero', 'exact'), [(0, True), (1, True), (KEPT, True), (30, False)])
def test_zero_rows_are_never_drawn(n_nonzero, exact):
    """Experts without tokens have such rows. Catches 0 / 0, and draws from nothing."""
    sizes = jnp.zeros(TOKENS).at[np.arange(n_nonzero) * 2].set(jnp.arange(1.0, n_nonzero + 1))
    for seed in range(5):
        indices, weights = sample_indices(jax.random.key(seed), sizes, KEPT)
        total = jnp.zeros(TOKENS).at[indices].add(weights)
        assert np.isfinite(weights).all() and not total[sizes == 0].any()
        if exact:
            np.testing.assert_allclose(total[sizes > 0], 1, rtol=1e-5)


@pytest.mark.full
def test_shards_draw_their_own_rows():
    """Unbiased, and each shard has its own rows. Catches indices counted from the first token of
    the batch, and a key shared by all shards.
    """
    kernel, mesh = WTACRS(wta_crs_ratio=0.4, wta_crs_least=1), make_mesh(MeshConfig(data=4))
    rows = trace_on_mesh(
        mesh, lambda: kernel.sample_rows(jax.random.key(0), jnp.tile(X[:16], (4, 1)))
    )()
    assert rows.scaled_SKI.shape == (4, 6, WIDE)
    assert rows.places_SK.max() < 16 and len(np.unique(rows.places_SK, axis=0)) > 1
    draw = jax.vmap(trace_on_mesh(mesh, lambda key: forward_and_gradients(kernel)(key)[2]))
    keys = jax.random.split(jax.random.key(1), 20_000)
    assert_unbiased(np.float64(jax.jit(draw)(keys)), EXACT)


class TwoProducts(nn.Module):
    """Two products of a shared input, and a third with an input of its own."""

    options: tuple = (('wta_crs_ratio', 0.25), ('wta_crs_least', 1))

    @nn.compact
    def __call__(self, x_BTD):
        product_options = {
            'matmul': kernels_for(
                'cpu', matmul='wta_crs', matmul_options=dict(self.options)
            ).matmul,
            'dtype': jnp.float32,
        }
        shared = prepare_input(self, 'input', x_BTD, **product_options)
        a, b = (
            product(self, name, shared, ('embed', 'mlp'), ('embed',), 6, **product_options)
            for name in 'ab'
        )
        return product(self, 'c', a + b, ('mlp', 'embed'), ('mlp',), 3, **product_options)


def training_loss(layer, stats, x):
    """Returns params -> (sum of squares, updated statistics), in training."""

    def run(params):
        y, carried = layer.apply({'params': params, **stats}, x, mutable=[STATS])
        return jnp.sum(y**2), carried

    return run


def init_layer(layer, x):
    variables = layer.init(jax.random.key(0), x)
    return split_boxes(variables['params'])[0], {STATS: variables[STATS]}


@pytest.mark.full
def test_keys_advance_only_in_training():
    """Each update draws other tokens, and the same from the same state; evaluation needs no key."""
    x = X.reshape(4, 16, WIDE)
    params, stats = init_layer(TwoProducts(), x)
    assert stats[STATS].keys() == {'input_rows', 'c_rows'}
    step = jax.jit(jax.grad(training_loss(TwoProducts(), stats, x), has_aux=True))
    (first, carried), (repeated, _) = step(params), step(params)
    later, _ = jax.grad(training_loss(TwoProducts(), carried, x), has_aux=True)(params)
    np.testing.assert_array_equal(first['a'], repeated['a'])
    assert np.abs(first['a'] - later['a']).max() > 1e-2
    exact = jax.grad(lambda p: jnp.sum(TwoProducts().apply({'params': p}, x) ** 2))(params)
    plain = jax.grad(
        training_loss(TwoProducts(options=(('wta_crs_ratio', 1.0),)), stats, x), has_aux=True
    )
    np.testing.assert_allclose(exact['a'], plain(params)[0]['a'], rtol=1e-5, atol=1e-5)


class Experts(nn.Module):
    """A product with separate rows for each expert."""

    @nn.compact
    def __call__(self, x_ECD):
        options = {'wta_crs_ratio': 0.4, 'wta_crs_least': 1}
        matmul = kernels_for('cpu', matmul='wta_crs', matmul_options=options).matmul
        axes = ('expert', 'embed', 'mlp')
        product_options = {'matmul': matmul, 'dtype': jnp.float32}
        return product(self, 'up', x_ECD, axes, ('embed',), 3, **product_options)


@pytest.mark.full
def test_experts_draw_separately():
    """Unbiased for each, and 0 for an expert without tokens. Catches a shared draw for all
    experts.
    """
    x = X.reshape(4, 16, WIDE).at[2].set(0)
    params, stats = init_layer(Experts(), x)

    def gradient(key):
        carried = jax.tree.map(lambda _: key_to_int(key), stats)
        return jax.grad(lambda p: training_loss(Experts(), carried, x)(p)[0])(params)['up']

    keys = jax.random.split(jax.random.key(0), 10_000)
    draws = np.float64(jax.jit(jax.vmap(gradient))(keys))
    exact = jax.grad(lambda p: jnp.sum(Experts().apply({'params': p}, x) ** 2))(params)['up']
    assert not draws[:, 2].any()
    used = [0, 1, 3]
    assert_unbiased(draws[:, used], np.float64(exact)[np.array(used)])
    assert abs(np.corrcoef(draws[:, 0, 0, 0], draws[:, 1, 0, 0])[0, 1]) < 0.05


def residual_shapes(run, params):
    """Returns the shapes of the residuals of run(params), each array once."""
    _, pull = jax.vjp(lambda p: run(p)[0], params)
    leaves = {id(leaf): leaf for leaf in jax.tree.leaves(pull)}
    return sorted(leaf.shape for leaf in leaves.values() if leaf.ndim > 1)


@pytest.mark.full
def test_residuals_are_sampled_rows():
    """16 of 64 rows once for both products with their indices, and no [tokens, width]. Catches the
    input kept beside its rows, and separate rows for each product of an input.
    """
    x = X.reshape(4, 16, WIDE)
    params, stats = init_layer(TwoProducts(), x)
    shapes = residual_shapes(training_loss(TwoProducts(), stats, x), params)
    input_shapes = [shape for shape in shapes if WIDE in shape and shape != (WIDE, 6)]
    assert input_shapes == [(1, 16, WIDE)]
    assert shapes.count((1, 16, 6)) == 1 and (64, 6) not in shapes


def test_mlp_has_smaller_residuals():
    """Hidden activations are kept for the activation function only, and its input as rows. Catches
    rows kept beside the whole input.
    """
    x = jax.ShapeDtypeStruct((8, 128, 64), jnp.float32)

    def residual_bytes(matmul):
        kernels = kernels_for('cpu', matmul=matmul)
        layer = MLP(256, ACTIVATIONS['relu'], kernels, jnp.float32)
        shapes = jax.eval_shape(layer.init, jax.random.key(0), x)
        params, stats = split_boxes(shapes['params'])[0], shapes.get(STATS, {})

        def compute_residuals(params, stats, x):
            run = training_loss(layer, {STATS: stats}, x)
            return jax.vjp(lambda p: run(p)[0], params)[1]

        leaves = jax.tree.leaves(jax.eval_shape(compute_residuals, params, stats, x))
        return sum(leaf.size * leaf.dtype.itemsize for leaf in leaves)

    assert residual_bytes('wta_crs') < 0.75 * residual_bytes('direct')


def test_rows_keep_input_type():
    """Norms are computed in float32, but stored rows in float32 would take twice the memory."""
    rows = sample_shard_rows(jax.random.key(0), X.astype(jnp.bfloat16), KEPT)
    assert rows.scaled_SKI.dtype == jnp.bfloat16
