"""Layers of linear attention. Reference: against NumPy in float64, token by token. Equivalence:
both kernels, and a row read in parts. Property: weights.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.attention import ATTENTIONS
from modules.attention.base import CACHE
from modules.attention.linear import (
    EPS,
    LinearAttention,
    NaLaAttention,
    nala_key_features,
    nala_query_features,
)
from modules.kernels import kernels_for
from modules.norms import NORMS
from modules.params import split_boxes
from modules.positions import POSITIONS
from modules.sequence import packed_rows, partial_rows, whole_rows
from modules.statistics import DIAGNOSTICS
from tests.helpers import assert_trees_close

LINEAR = {'linear': LinearAttention, 'nala': NaLaAttention}
LENGTH, D, HEADS, KV_HEADS, HEAD_DIM = 9, 16, 4, 2, 4
SHOWING_EPS = 0.3


def layer(name, qk_norm='none', position='rope', implementation='xla', **options):
    return ATTENTIONS[name](
        n_heads=HEADS,
        n_kv_heads=KV_HEADS,
        head_dim=HEAD_DIM,
        qk_norm=lambda name, over: NORMS[qk_norm](name=name),
        rotate=POSITIONS[position].rotate,
        kernels=kernels_for('cpu', implementation),
        dtype=jnp.float32,
        **options,
    )


def draw_x(batch=1, length=LENGTH, seed=0):
    return jnp.float32(np.random.default_rng(seed).normal(size=(batch, length, D)))


@functools.cache
def draw_params(module):
    variables = jax.jit(module.init)(jax.random.key(0), draw_x(), whole_rows(LENGTH))
    return jax.tree.map(lambda w: w / 4 if w.ndim > 1 else w, split_boxes(variables['params'])[0])


@functools.partial(jax.jit, static_argnums=0)
def apply_layer(module, params, x_BTD, sequence):
    """Applies a layer to whole rows."""
    return module.apply({'params': params}, x_BTD, sequence)


def relu(x):
    return np.maximum(x, 0)


def numpy_features(name, q, k):
    """Returns the halves of the features of q and of k, by the papers' equations."""
    if name == 'linear':
        return ([np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))] for x in (q, k))
    norm = np.linalg.norm(q, axis=-1, keepdims=True)
    power = 3 * (0.5 + np.tanh(norm))
    queries = [relu(q / norm) ** power, relu(-q / norm) ** power]
    return queries, [relu(k**3), relu(-(k**3))]


def numpy_rope(x_TH):
    half = x_TH.shape[-1] // 2
    angles = np.arange(len(x_TH))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    z = (x_TH[:, :half] + 1j * x_TH[:, half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize('name', LINEAR)
@pytest.mark.parametrize('position', ['rope', 'none'])
def test_layer_matches_equation(name, position):
    """Reference: head by head in NumPy float64; positions rotate each half of the features, in the
    numerator only. Catches a rotated denominator, and halves rotated as one vector.
    """
    module = layer(name, position=position)
    w = {key: np.float64(value) for key, value in draw_params(module).items()}
    x = np.float64(draw_x()[0])
    rotate = numpy_rope if position == 'rope' else lambda y: y
    causal, expected = np.tri(LENGTH), np.zeros_like(x)
    for n in range(HEADS):
        q, k, v = x @ w['query'][:, n], x @ w['key'][:, n // 2], x @ w['value'][:, n // 2]
        queries, keys = numpy_features(name, q, k)
        numerators = causal * sum(
            rotate(a) @ rotate(b).T for a, b in zip(queries, keys, strict=True)
        )
        denominators = np.sum(causal * sum(a @ b.T for a, b in zip(queries, keys, strict=True)), -1)
        expected += numerators @ v / (denominators[:, None] + EPS) @ w['out'][n]
    actual = apply_layer(module, draw_params(module), draw_x(), whole_rows(LENGTH))[0]
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4 * np.abs(expected).max())


@pytest.mark.full
@pytest.mark.parametrize('name', LINEAR)
def test_kernels_agree_in_layer(name):
    """Compares documents, with gradients: the layer passes the same arrays to both."""
    x, sequence = draw_x(2), packed_rows(jnp.int32([[1, 1, 1, 2, 2, 2, 2, 2, 0], [5] * LENGTH]))

    def gradients(implementation):
        module = layer(name, implementation=implementation)

        def total(params):
            return jnp.sum(jnp.square(module.apply({'params': params}, x, sequence)))

        return jax.jit(jax.grad(total))(draw_params(layer(name)))

    actual, expected = gradients('xla'), gradients('reference')
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected))
    assert_trees_close(actual, expected, rtol=1e-3, atol=1e-5 * scale)


@functools.partial(jax.jit, static_argnums=0)
def apply_with_cache(module, variables, x_BTD, sequence):
    return module.apply(variables, x_BTD, sequence, mutable=[CACHE])


def apply_in_parts(module, params, x_BTD, counts):
    """Reads rows in parts of `counts` [parts, B] tokens; returns the outputs of each row, in
    order.
    """
    variables, start = {'params': params}, np.zeros(len(x_BTD), int)
    outputs = [[] for _ in x_BTD]
    for count in np.asarray(counts):
        length = max(count)
        part = np.full((len(x_BTD), length, D), 7.0, np.float32)  # padding is not zero
        for row, n in enumerate(count):
            part[row, :n] = x_BTD[row, start[row] : start[row] + n]
        sequence = partial_rows(jnp.int32(start), jnp.int32(count), int(length), capacity=LENGTH)
        part_outputs, updated_cache = apply_with_cache(module, variables, part, sequence)
        variables = {'params': params} | updated_cache
        for row, n in enumerate(count):
            outputs[row].append(np.asarray(part_outputs[row, :n]))
        start = start + count
    return [np.concatenate(row) for row in outputs], variables[CACHE]


@pytest.mark.full
@pytest.mark.parametrize('name', LINEAR)
def test_cached_row_equals_whole_row(name):
    """Rows of different lengths with padding, read a token or many at a time. Catches padding in
    the state, positions that restart, and a reused cache that is not reset.
    """
    module = layer(name, qk_norm='rmsnorm')
    params, x = draw_params(module), draw_x(2)
    whole = apply_layer(module, params, x, whole_rows(LENGTH))
    parts, cache = apply_in_parts(module, params, x, [(4, 2), (1, 1), (1, 0), (3, 4)])
    for row, part in enumerate(parts):
        np.testing.assert_allclose(part, whole[row, : len(part)], rtol=1e-4, atol=1e-5)
    features = HEAD_DIM * (2 if name == 'nala' else 1)
    assert {key: (v.shape, v.dtype.name) for key, v in cache.items()} == {
        'state': ((2, KV_HEADS, features, HEAD_DIM), 'float32'),
        'normalizer': ((2, KV_HEADS, features), 'float32'),
    }
    sequence = partial_rows(jnp.int32([0, 0]), jnp.int32([3, 3]), 3, capacity=LENGTH)
    reused, _ = apply_with_cache(module, {'params': params, CACHE: cache}, x[:, :3], sequence)
    np.testing.assert_allclose(reused, whole[:, :3], rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('name', LINEAR)
def test_log_weights_match_layer(name):
    """exp(log_weights), masked and normalized, mix the values as the layer does without
    positions.
    """
    module = layer(name, position='none')
    params, x = draw_params(module), draw_x()
    q, k, v = (jnp.einsum('btd,dnh->bnth', x, params[key]) for key in ('query', 'key', 'value'))
    logs_BNTS = np.float64(type(module).log_weights(q[:, :, 4:], k))  # a block of queries
    assert logs_BNTS.shape == (1, HEADS, LENGTH - 4, LENGTH)
    weights = np.exp(logs_BNTS) * np.tri(LENGTH)[None, None, 4:]
    probs = weights / weights.sum(-1, keepdims=True)
    mixed = np.einsum('bnts,bnsh->btnh', probs, np.repeat(v, 2, axis=1))
    expected = np.einsum('btnh,nhd->btd', mixed, params['out'])
    actual = apply_layer(module, params, x, whole_rows(LENGTH))[:, 4:]
    np.testing.assert_allclose(actual, expected, rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize('name', LINEAR)
def test_recorded_statistics_match_weights(name):
    """Reference: entropy and the first token's share, dense in NumPy float64, with positions and in
    documents. Catches rotated weights, which have signs and no entropy.
    """
    module, segments = layer(name), np.array([1, 1, 1, 1, 2, 2, 2, 2, 2])
    params, x = draw_params(module), np.float64(draw_x()[0])
    run = jax.jit(lambda p, x, s: module.apply({'params': p}, x, s, mutable=[DIAGNOSTICS]))
    _, sown = run(params, draw_x(), packed_rows(jnp.int32(segments[None])))
    w = {key: np.float64(values) for key, values in params.items()}
    visible = np.tri(LENGTH) * (segments[:, None] == segments)
    entropy, first = np.zeros(HEADS), np.zeros(HEADS)
    for n in range(HEADS):
        queries, keys = numpy_features(name, x @ w['query'][:, n], x @ w['key'][:, n // 2])
        weights = visible * sum(a @ b.T for a, b in zip(queries, keys, strict=True))
        probs = weights / weights.sum(-1, keepdims=True)
        entropy[n] = -np.sum(probs * np.log(np.where(probs > 0, probs, 1)), -1).mean()
        first[n] = np.concatenate([probs[1:4, 0], probs[5:, 4]]).mean()
    statistics = {key: values[0] for key, values in sown[DIAGNOSTICS].items()}
    np.testing.assert_allclose(statistics['attention_entropy'], entropy, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(statistics['attention_first_token'], first, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_nala_is_sharper_for_longer_queries():
    """Property: the entropy of its weights falls with the norm of the query. Catches a norm that is
    divided out of the power too, so that weights depend on directions only.
    """
    rng = np.random.default_rng(0)
    q, k = (jnp.float32(rng.normal(size=(1, 1, n, 16))) for n in (8, 64))
    q = q / jnp.linalg.norm(q, axis=-1, keepdims=True)

    def entropy(scale):
        logs = NaLaAttention.log_weights(scale * q, k)
        probs = np.asarray(jax.nn.softmax(logs, -1), np.float64)
        return -np.sum(probs * np.log(np.maximum(probs, 1e-300)), -1)[0, 0]

    short, middle, long = (entropy(scale) for scale in (0.05, 0.5, 3.0))
    assert np.all(short > middle + 0.05) and np.all(middle > long + 0.05)


@pytest.mark.full
def test_zero_features_have_finite_gradients():
    """0^p has no logarithm: a query of zeros, or with a zero among its features, as in bfloat16.
    Catches NaN from the branch that `where` does not select.
    """
    q = jnp.float32([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, -2.0, 0.0], [1e-20, 0.0, 0.0, 0.0]])
    for features in (nala_query_features, nala_key_features):
        features_q = features(q)
        slopes = jax.grad(lambda q, f=features: sum(jnp.sum(a) for a in f(q)))(q)
        assert all(np.isfinite(a).all() for a in (*features_q, slopes))
    first, second = nala_query_features(q)
    np.testing.assert_array_equal(first[0], 0)
    np.testing.assert_array_equal((first > 0)[1], [False, True, False, False])
    np.testing.assert_array_equal((second > 0)[1], [False, False, True, False])
