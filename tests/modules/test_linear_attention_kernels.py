"""Kernels of linear attention. Reference: against NumPy in float64, token by token. Equivalence:
chunked = quadratic. Property: memory grows with T.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.attention.linear import (
    EPS,
)
from modules.kernels.linear_attention import LINEAR_ATTENTION_KERNELS
from modules.kernels.linear_attention.base import AttentionSums, quadratic
from modules.kernels.linear_attention.chunked import chunked_linear_attention
from tests.helpers import assert_trees_close

LENGTH, HEADS, KV_HEADS = 9, 4, 2
SHOWING_EPS = 0.3
# Documents that end within a chunk, at its end, and over several of them; padding last.
SEGMENTS = np.repeat([1, 2, 3, 4, 0], [2, 6, 1, 9, 3])


def draw(length, batch=2, features=3, seed=0):
    """Draws q_num, k_num, q_den, k_den, v and the cotangents of the output and of the state.

    Numerators have signs, as they do after rotation.
    """
    rng = np.random.default_rng(seed)
    heads = [(HEADS, features), (KV_HEADS, features)] * 2 + [(KV_HEADS, 5), (HEADS, 5)]
    arrays = [rng.normal(size=(batch, n, length, f)) for n, f in heads]
    arrays[2:4] = [np.abs(a) for a in arrays[2:4]]
    grads = AttentionSums(
        jnp.float32(rng.normal(size=(batch, KV_HEADS, features, 5))),
        jnp.float32(rng.normal(size=(batch, KV_HEADS, features))),
    )
    return *map(jnp.float32, arrays), grads


@functools.partial(jax.jit, static_argnums=(0, 1))
def forward_and_gradients(name, options, *arrays, segments=None, state=None):
    """Returns ((output, state), gradients of q_num, k_num, q_den, k_den, v and the first state)."""
    *inputs, grad, state_grad = arrays
    kernel = functools.partial(LINEAR_ATTENTION_KERNELS[name], **dict(options))

    def run(inputs, state):
        return kernel(*inputs, EPS, segments, state)

    y, pull = jax.vjp(run, inputs, state)
    return y, pull((grad, state_grad))


def numpy_recurrence(q_num, k_num, q_den, k_den, v, segments=None, state=None):
    """Returns output and last state of the recurrence, a row, head and token at a time."""
    q_num, k_num, q_den, k_den, v = (np.float64(a) for a in (q_num, k_num, q_den, k_den, v))
    y = np.zeros((*q_num.shape[:3], v.shape[-1]))
    batch, heads, _, features = k_num.shape
    last_state = np.zeros((batch, heads, features, v.shape[-1])), np.zeros((batch, heads, features))
    for b, n in np.ndindex(q_num.shape[:2]):
        kv = n * k_num.shape[1] // q_num.shape[1]
        s, z = (0.0, 0.0) if state is None else (np.float64(a)[b, kv] for a in state)
        for t in range(q_num.shape[2]):
            if segments is not None and t and segments[t] != segments[t - 1]:
                s, z = 0.0, 0.0
            s = s + np.outer(k_num[b, kv, t], v[b, kv, t])
            z = z + k_den[b, kv, t]
            y[b, n, t] = q_num[b, n, t] @ s / (q_den[b, n, t] @ z + SHOWING_EPS)
        last_state[0][b, kv], last_state[1][b, kv] = s, z
    return y, last_state


@pytest.mark.parametrize('name', LINEAR_ATTENTION_KERNELS)
@pytest.mark.parametrize('extra', ['nothing', 'segments', 'state'])
def test_kernel_matches_recurrence(name, extra):
    """Forward, with the state behind the last token. Catches heads that share the wrong key head, a
    mask that excludes the token itself, forgotten eps or state, a document that sees the previous.
    """
    *inputs, _, grads = draw(LENGTH)
    segments = np.repeat([1, 2, 3], [4, 3, 2]) if extra == 'segments' else None
    state = jax.tree.map(jnp.abs, grads) if extra == 'state' else None
    rows = None if segments is None else jnp.tile(jnp.int32(segments), (2, 1))
    actual, last_state = LINEAR_ATTENTION_KERNELS[name](*inputs, SHOWING_EPS, rows, state)
    first_state = None if state is None else (state.products_BKFH, state.keys_BKF)
    expected, (products, keys) = numpy_recurrence(*inputs, segments, first_state)
    atol = 2e-5 * np.abs(expected).max()
    np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=atol)
    np.testing.assert_allclose(last_state.products_BKFH, products, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(last_state.keys_BKF, keys, rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    'chunk', [4, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 6, 7, 128))]
)
@pytest.mark.parametrize('extra', ['nothing', 'segments', 'state'])
def test_chunk_size_does_not_matter(chunk, extra):
    """Forward, state and gradients, for lengths that a chunk divides and others. Catches a chunk
    that reads the state of another document, a state from padding, and documents that start with a
    chunk.
    """
    arrays = draw(len(SEGMENTS))
    options = {}
    if extra == 'segments':
        options = {'segments': jnp.int32(np.stack([SEGMENTS, SEGMENTS[::-1]]))}
    if extra == 'state':
        options = {'state': jax.tree.map(jnp.abs, draw(1, seed=1)[-1])}
    actual = forward_and_gradients('chunked', (('chunk', chunk),), *arrays, **options)
    expected = forward_and_gradients('quadratic', (), *arrays, **options)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected[0]))
    assert_trees_close(actual[0], expected[0], rtol=1e-4, atol=1e-6 * scale)
    scale = max(float(jnp.abs(leaf).max()) for leaf in jax.tree.leaves(expected[1]))
    assert_trees_close(actual[1], expected[1], rtol=1e-3, atol=3e-6 * scale)


@pytest.mark.full
def test_kernels_keep_type_and_sum_in_float32():
    for kernel in LINEAR_ATTENTION_KERNELS.values():
        *inputs, _, _ = (a for a in draw(LENGTH))
        halves = [a.astype(jnp.bfloat16) for a in inputs]
        actual, state = kernel(*halves, EPS)
        assert actual.dtype == jnp.bfloat16
        assert {leaf.dtype for leaf in jax.tree.leaves(state)} == {jnp.dtype('float32')}
        exact, _ = kernel(*(a.astype(jnp.float32) for a in halves), EPS)
        np.testing.assert_array_equal(actual, exact.astype(jnp.bfloat16))


def test_state_with_segments_is_rejected():
    *inputs, _, state = draw(LENGTH)
    for kernel in LINEAR_ATTENTION_KERNELS.values():
        with pytest.raises(ValueError, match='a state belongs to a single document'):
            kernel(*inputs, EPS, jnp.ones((2, LENGTH), jnp.int32), state)


def program_bytes(kernel, length, features=32):
    """Returns the temporary memory of the program of output and gradients."""
    shapes = [jax.ShapeDtypeStruct((1, 2, length, features), np.float32)] * 5

    def total(*arrays):
        return jnp.sum(jnp.square(kernel(*arrays, EPS)[0]))

    program = jax.jit(jax.value_and_grad(total, argnums=range(5)))
    return program.lower(*shapes).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_chunked_memory_grows_linearly():
    """At T = 4,096, with gradients: 1.6 times the arrays themselves. Catches pairs of all chunks
    kept for the backward pass, with which it would be 4.2 times.
    """
    half, whole = (
        program_bytes(chunked_linear_attention, 2048),
        program_bytes(chunked_linear_attention, 4096),
    )
    arrays, pairs = 5 * 2 * 4096 * 32 * 4, 2 * 4096**2 * 4
    assert whole < 2.2 * half
    assert whole < 2.5 * arrays
    assert program_bytes(quadratic, 4096) > pairs
