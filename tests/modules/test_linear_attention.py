"""Layers of linear attention. Reference: against numpy float64, token by token. Equivalence: both
kernels, and a row read in parts. Property: weights.
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
def params_of(module):
    variables = jax.jit(module.init)(jax.random.key(0), draw_x(), whole_rows(LENGTH))
    return jax.tree.map(lambda w: w / 4 if w.ndim > 1 else w, split_boxes(variables['params'])[0])


@functools.partial(jax.jit, static_argnums=0)
def read(module, params, x_BTD, sequence):
    """What a layer gives of whole rows."""
    return module.apply({'params': params}, x_BTD, sequence)


def relu(x):
    return np.maximum(x, 0)


def numpy_features(name, q, k):
    """Halves of the features of q and of k, by the papers' equations."""
    if name == 'linear':
        return ([np.where(x > 0, x + 1, np.exp(np.minimum(x, 0)))] for x in (q, k))
    norm = np.linalg.norm(q, axis=-1, keepdims=True)
    power = 3 * (0.5 + np.tanh(norm))
    queries = [relu(q / norm) ** power, relu(-q / norm) ** power]
    return queries, [relu(k**3), relu(-(k**3))]


def rotated(x_TH):
    half = x_TH.shape[-1] // 2
    angles = np.arange(len(x_TH))[:, None] * 10_000.0 ** (-np.arange(half) / half)
    z = (x_TH[:, :half] + 1j * x_TH[:, half:]) * np.exp(1j * angles)
    return np.concatenate([z.real, z.imag], -1)


@pytest.mark.parametrize('name', LINEAR)
@pytest.mark.parametrize('position', ['rope', 'none'])
def test_a_layer_is_its_equation(name, position):
    """Reference: head by head in numpy float64; positions turn each half of the features, and those
    above the line alone. Catches a denominator that is turned, and halves turned as one vector.
    """
    module = layer(name, position=position)
    w = {key: np.float64(value) for key, value in params_of(module).items()}
    x = np.float64(draw_x()[0])
    turn = rotated if position == 'rope' else lambda y: y
    causal, wanted = np.tri(LENGTH), np.zeros_like(x)
    for n in range(HEADS):
        q, k, v = x @ w['query'][:, n], x @ w['key'][:, n // 2], x @ w['value'][:, n // 2]
        queries, keys = numpy_features(name, q, k)
        above = causal * sum(turn(a) @ turn(b).T for a, b in zip(queries, keys, strict=True))
        below = np.sum(causal * sum(a @ b.T for a, b in zip(queries, keys, strict=True)), -1)
        wanted += above @ v / (below[:, None] + EPS) @ w['out'][n]
    ours = read(module, params_of(module), draw_x(), whole_rows(LENGTH))[0]
    np.testing.assert_allclose(ours, wanted, rtol=1e-3, atol=1e-4 * np.abs(wanted).max())


@pytest.mark.full
@pytest.mark.parametrize('name', LINEAR)
def test_both_kernels_give_one_layer(name):
    """In documents, gradients too: the layer passes the same to both."""
    x, sequence = draw_x(2), packed_rows(jnp.int32([[1, 1, 1, 2, 2, 2, 2, 2, 0], [5] * LENGTH]))

    def gradients(implementation):
        module = layer(name, implementation=implementation)

        def total(params):
            return jnp.sum(jnp.square(module.apply({'params': params}, x, sequence)))

        return jax.jit(jax.grad(total))(params_of(layer(name)))

    ours, wanted = gradients('xla'), gradients('reference')
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(wanted))
    assert_trees_close(ours, wanted, rtol=1e-3, atol=1e-5 * scale)


@functools.partial(jax.jit, static_argnums=0)
def read_part(module, variables, x_BTD, sequence):
    return module.apply(variables, x_BTD, sequence, mutable=[CACHE])


def read_in_parts(module, params, x_BTD, counts):
    """The rows read by parts of `counts` [parts, B] tokens; what each row gave, in order."""
    variables, start = {'params': params}, np.zeros(len(x_BTD), int)
    found = [[] for _ in x_BTD]
    for count in np.asarray(counts):
        length = max(count)
        part = np.full((len(x_BTD), length, D), 7.0, np.float32)  # padding is not of zeros
        for row, n in enumerate(count):
            part[row, :n] = x_BTD[row, start[row] : start[row] + n]
        sequence = partial_rows(jnp.int32(start), jnp.int32(count), int(length), capacity=LENGTH)
        out, filled = read_part(module, variables, part, sequence)
        variables = {'params': params} | filled
        for row, n in enumerate(count):
            found[row].append(np.asarray(out[row, :n]))
        start = start + count
    return [np.concatenate(row) for row in found], variables[CACHE]


@pytest.mark.full
@pytest.mark.parametrize('name', LINEAR)
def test_a_row_read_in_parts_is_the_row(name):
    """Rows of different length with padding, by one token and by many. Catches padding in the
    state, positions that start again, and an earlier use of the cache that is read on.
    """
    module = layer(name, qk_norm='rmsnorm')
    params, x = params_of(module), draw_x(2)
    whole = read(module, params, x, whole_rows(LENGTH))
    parts, cache = read_in_parts(module, params, x, [(4, 2), (1, 1), (1, 0), (3, 4)])
    for row, ours in enumerate(parts):
        np.testing.assert_allclose(ours, whole[row, : len(ours)], rtol=1e-4, atol=1e-5)
    features = HEAD_DIM * (2 if name == 'nala' else 1)
    assert {key: (v.shape, v.dtype.name) for key, v in cache.items()} == {
        'state': ((2, KV_HEADS, features, HEAD_DIM), 'float32'),
        'normalizer': ((2, KV_HEADS, features), 'float32'),
    }
    sequence = partial_rows(jnp.int32([0, 0]), jnp.int32([3, 3]), 3, capacity=LENGTH)
    again, _ = read_part(module, {'params': params, CACHE: cache}, x[:, :3], sequence)
    np.testing.assert_allclose(again, whole[:, :3], rtol=1e-4, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('name', LINEAR)
def test_weights_are_those_of_the_layer_without_positions(name):
    """exp(log_weights), of what is seen and over their sum, mix the values as the layer does."""
    module = layer(name, position='none')
    params, x = params_of(module), draw_x()
    q, k, v = (jnp.einsum('btd,dnh->bnth', x, params[key]) for key in ('query', 'key', 'value'))
    logs_BNTS = np.float64(type(module).log_weights(q[:, :, 4:], k))  # a block of queries
    assert logs_BNTS.shape == (1, HEADS, LENGTH - 4, LENGTH)
    weights = np.exp(logs_BNTS) * np.tri(LENGTH)[None, None, 4:]
    probs = weights / weights.sum(-1, keepdims=True)
    mixed = np.einsum('bnts,bnsh->btnh', probs, np.repeat(v, 2, axis=1))
    wanted = np.einsum('btnh,nhd->btd', mixed, params['out'])
    ours = read(module, params, x, whole_rows(LENGTH))[:, 4:]
    np.testing.assert_allclose(ours, wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize('name', LINEAR)
def test_what_a_layer_records_is_of_its_weights(name):
    """Reference: entropy and the first token's share, dense in numpy float64, where positions turn
    and in documents. Catches weights that are turned, which have signs and no entropy.
    """
    module, segments = layer(name), np.array([1, 1, 1, 1, 2, 2, 2, 2, 2])
    params, x = params_of(module), np.float64(draw_x()[0])
    run = jax.jit(lambda p, x, s: module.apply({'params': p}, x, s, mutable=[DIAGNOSTICS]))
    _, filled = run(params, draw_x(), packed_rows(jnp.int32(segments[None])))
    w = {key: np.float64(value) for key, value in params.items()}
    seen = np.tri(LENGTH) * (segments[:, None] == segments)
    entropy, first = np.zeros(HEADS), np.zeros(HEADS)
    for n in range(HEADS):
        queries, keys = numpy_features(name, x @ w['query'][:, n], x @ w['key'][:, n // 2])
        weights = seen * sum(a @ b.T for a, b in zip(queries, keys, strict=True))
        probs = weights / weights.sum(-1, keepdims=True)
        entropy[n] = -np.sum(probs * np.log(np.where(probs > 0, probs, 1)), -1).mean()
        first[n] = np.concatenate([probs[1:4, 0], probs[5:, 4]]).mean()
    found = {key: value[0] for key, value in filled[DIAGNOSTICS].items()}
    np.testing.assert_allclose(found['attention_entropy'], entropy, rtol=1e-3, atol=1e-4)
    np.testing.assert_allclose(found['attention_first_token'], first, rtol=1e-3, atol=1e-4)


@pytest.mark.full
def test_nala_is_sharper_for_longer_queries():
    """Property: the entropy of its weights falls with the norm of the query. Catches a norm that is
    divided out of the power too, by which weights would depend on directions alone.
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
def test_features_of_zeros_have_finite_slopes():
    """0^p has no logarithm: a query of zeros, or one with a zero among its features, as bfloat16
    gives them. Catches NaN from the branch that `where` does not take.
    """
    q = jnp.float32([[0.0, 0.0, 0.0, 0.0], [0.0, 1.0, -2.0, 0.0], [1e-20, 0.0, 0.0, 0.0]])
    for features in (nala_query_features, nala_key_features):
        found = features(q)
        slopes = jax.grad(lambda q, f=features: sum(jnp.sum(a) for a in f(q)))(q)
        assert all(np.isfinite(a).all() for a in (*found, slopes))
    first, second = nala_query_features(q)
    np.testing.assert_array_equal(first[0], 0)
    np.testing.assert_array_equal((first > 0)[1], [False, True, False, False])
    np.testing.assert_array_equal((second > 0)[1], [False, False, True, False])
