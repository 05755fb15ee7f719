"""Kernels of linear recurrences. Reference: the authors' recurrence in NumPy float64. Equivalence:
chunked = token by token, with gradients. Property: the delta rule, and large decays.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.kernels.linear_attention.base import quadratic
from modules.kernels.recurrence import RECURRENCE_KERNELS
from modules.kernels.recurrence.base import token_by_token
from modules.kernels.recurrence.chunked import chunked_recurrence
from tests.helpers import assert_trees_close

HEADS, K, V = 2, 4, 6
# Documents that end within a chunk, at its end, and over several of them; padding last.
SEGMENTS = np.repeat([1, 2, 3, 4, 0], [2, 6, 1, 9, 3])
LENGTH = len(SEGMENTS)
FORMS = ['plain', 'delta']


def draw(form, length=LENGTH, batch=2, seed=0):
    """Draws q, k, v, g, beta (None without the delta rule) and a first state, in float64."""
    rng = np.random.default_rng(seed)
    q, k = rng.normal(size=(2, batch, HEADS, length, K))
    k /= np.linalg.norm(k, axis=-1, keepdims=True)
    v = rng.normal(size=(batch, HEADS, length, V))
    g = -rng.exponential(0.3, (batch, HEADS, length))
    beta = rng.uniform(0, 2, (batch, HEADS, length)) if form == 'delta' else None
    return (q, k, v, g, beta), rng.normal(size=(batch, HEADS, K, V))


def numpy_recurrence(q, k, v, g, beta, segments=None, state=None):
    """Follows naive_recurrent_gated_delta_rule and naive_recurrent_simple_gla of
    flash-linear-attention, a row, head and token at a time.
    """
    y, last = np.zeros_like(v), np.zeros((*k.shape[:2], K, v.shape[-1]))
    for b, n in np.ndindex(q.shape[:2]):
        s = last[b, n] if state is None else state[b, n]
        for t in range(q.shape[2]):
            if segments is not None and t and segments[b][t] != segments[b][t - 1]:
                s = np.zeros_like(s)
            s = s * np.exp(g[b, n, t])
            value = v[b, n, t]
            if beta is not None:
                value = beta[b, n, t] * (value - k[b, n, t] @ s)
            s = s + np.outer(k[b, n, t], value)
            y[b, n, t] = (q[b, n, t] * K**-0.5) @ s
        last[b, n] = s
    return y, last


def extras(extra, state):
    """Returns the keyword arguments of a case: documents, a first state, or neither."""
    if extra == 'segments':
        return {'segments_BT': np.int32([SEGMENTS, SEGMENTS[::-1]])}
    return {'state_BNKV': state} if extra == 'state' else {}


@functools.cache
def run_exactly(form, extra, chunk=None):
    """Returns ((y, state), gradients) in float64; `chunk` None: token by token."""
    arrays, state = draw(form)
    kernel = token_by_token
    if chunk is not None:
        kernel = functools.partial(chunked_recurrence, recurrence_chunk=chunk)
    case = extras(extra, state)
    rng = np.random.default_rng(1)

    @jax.jit
    def run(arrays, case):
        segments = {key: x for key, x in case.items() if key == 'segments_BT'}
        first = {key: x for key, x in case.items() if key == 'state_BNKV'}
        forward, pull = jax.vjp(lambda a, f: kernel(*a, **segments, **f), arrays, first)
        return forward, pull(jax.tree.map(lambda x: jnp.asarray(rng.normal(size=x.shape)), forward))

    with jax.enable_x64(True):
        return jax.device_get(run(arrays, case))


@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('extra', ['nothing', 'segments', 'state'])
@pytest.mark.parametrize('chunk', [None, pytest.param(1, marks=pytest.mark.full), 4, 64])
def test_kernel_matches_recurrence(form, extra, chunk):
    """Token by token, and in chunks of 1, of 4 that documents cut, and of more than the row.

    Catches a decay after the write, a missing 1 / sqrt(K), a mask without the token itself, a
    document that reads the state of the previous, and a last chunk whose padding decays the state.
    """
    arrays, state = draw(form)
    case = extras(extra, state)
    expected = numpy_recurrence(*arrays, case.get('segments_BT'), case.get('state_BNKV'))
    actual, _ = run_exactly(form, extra, chunk)
    assert_trees_close(actual, expected, rtol=1e-10, atol=1e-12)


@pytest.mark.full
@pytest.mark.parametrize('form', FORMS)
@pytest.mark.parametrize('extra', ['nothing', 'segments', 'state'])
@pytest.mark.parametrize('chunk', [1, 4, 6, 7, 64])
def test_gradients_do_not_depend_on_chunks(form, extra, chunk):
    _, actual = run_exactly(form, extra, chunk)
    _, expected = run_exactly(form, extra)
    assert_trees_close(actual, expected, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize('form', FORMS)
def test_large_decay_has_finite_gradients(form):
    """With g = -50 the masked exponents reach 50 * 20. Catches a mask behind exp: NaN."""
    (q, k, v, g, beta), _ = draw(form)
    arrays = q, k, v, np.full_like(g, -50.0), beta
    arrays = jax.tree.map(jnp.float32, arrays)

    @jax.jit
    def slopes(arrays):
        return jax.grad(lambda a: jnp.sum(jnp.square(chunked_recurrence(*a)[0])))(arrays)

    gradients = slopes(arrays)
    assert all(np.isfinite(leaf).all() for leaf in jax.tree.leaves(gradients))
    assert np.abs(gradients[2]).max() > 0.01  # a token still reads what it has written


@pytest.mark.parametrize('kernel', RECURRENCE_KERNELS)
def test_zero_strength_keeps_the_state(kernel):
    (q, k, v, g, beta), state = draw('delta')
    arrays = jax.tree.map(jnp.float32, (q, k, v, 0 * g, 0 * beta, None, state))
    _, last = RECURRENCE_KERNELS[kernel](*arrays)
    np.testing.assert_allclose(last, state, rtol=1e-6)


@pytest.mark.parametrize('kernel', RECURRENCE_KERNELS)
def test_orthonormal_keys_are_read_back(kernel):
    """Without decay and with strength 1, each key reads its value, also one that was replaced.

    Catches a state that adds to an earlier value of the same key.
    """
    keys, _ = np.linalg.qr(np.random.default_rng(0).normal(size=(K, K)))
    k = np.concatenate([keys, keys])[None, None]  # each key is written twice
    v = np.random.default_rng(1).normal(size=(1, 1, 2 * K, V))
    zeros = np.zeros((1, 1, 2 * K))
    arrays = jax.tree.map(jnp.float32, (np.zeros_like(k), k, v, zeros, zeros + 1))
    _, state = RECURRENCE_KERNELS[kernel](*arrays)
    np.testing.assert_allclose(keys @ np.asarray(state)[0, 0], v[0, 0, K:], rtol=1e-4, atol=1e-5)
    y, _ = RECURRENCE_KERNELS[kernel](arrays[1], *arrays[1:])
    np.testing.assert_allclose(y, v / np.sqrt(K), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kernel', RECURRENCE_KERNELS)
def test_without_decay_it_is_linear_attention_without_denominator(kernel):
    """With keys of 0 in the denominator and eps = 1, linear attention divides by 1."""
    (q, k, v, g, _), _ = draw('plain')
    q, k, v, g = map(jnp.float32, (q, k, v, 0 * g))
    y, state = RECURRENCE_KERNELS[kernel](q, k, v, g)
    expected, sums = quadratic(q / np.sqrt(K), k, q, 0 * k, v, 1.0)
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)
    np.testing.assert_allclose(state, sums.products_BKFH, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize('kernel', RECURRENCE_KERNELS)
def test_state_with_segments_is_rejected(kernel):
    arrays, state = draw('plain', length=3)
    with pytest.raises(ValueError, match='a state belongs to a single document'):
        RECURRENCE_KERNELS[kernel](*arrays, np.ones((2, 3), np.int32), state)


@pytest.mark.full
@pytest.mark.parametrize('kernel', RECURRENCE_KERNELS)
def test_sums_are_in_float32(kernel):
    arrays, _ = draw('delta')
    halves = jax.tree.map(lambda a: jnp.bfloat16(a), arrays)
    actual = RECURRENCE_KERNELS[kernel](*halves)
    expected = RECURRENCE_KERNELS[kernel](*jax.tree.map(jnp.float32, halves))
    jax.tree.map(np.testing.assert_array_equal, actual, expected)
    assert {leaf.dtype for leaf in jax.tree.leaves(actual)} == {jnp.dtype('float32')}


def program_bytes(length, width=32):
    """Returns the temporary memory of the program of output and gradients."""
    wide = jax.ShapeDtypeStruct((1, 2, length, width), np.float32)
    numbers = jax.ShapeDtypeStruct((1, 2, length), np.float32)

    def total(*arrays):
        return jnp.sum(jnp.square(chunked_recurrence(*arrays)[0]))

    program = jax.jit(jax.value_and_grad(total, argnums=range(5)))
    lowered = program.lower(wide, wide, wide, numbers, numbers)
    return lowered.compile().memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_chunked_memory_grows_linearly():
    """Catches pairs of tokens of different chunks."""
    half, whole = program_bytes(2048), program_bytes(4096)
    assert whole < 2.2 * half
