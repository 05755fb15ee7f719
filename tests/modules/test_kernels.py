"""Reference: plain attention against numpy float64. Equivalence: all implementations agree."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.kernels import IMPLEMENTATIONS, attention
from modules.kernels.matmul import direct, narrow_first
from tests.helpers import FAST

FAST_ATTENTIONS = sorted(
    {k.attention for k in IMPLEMENTATIONS.values()} - {attention.plain}, key=str
)
ROUNDING = {'float32': 2**-23, 'bfloat16': 2**-8}


def draw(length, n_heads=2, n_kv_heads=1, batch=1, head_dim=4, dtype='float32', scale=1.0):
    """q, k, v and the cotangent of the output, exact in `dtype`."""
    rng = np.random.default_rng(length)
    heads = (n_heads, n_kv_heads, n_kv_heads, n_heads)
    shapes = [(batch, n, length, head_dim) for n in heads]
    return [jnp.asarray(scale * rng.normal(size=shape), dtype) for shape in shapes]


def segments_of(length, batch=1):
    """Documents of uneven lengths that cross every block boundary, then padding."""
    edges = np.array([length // 5, length // 5 + 1, (3 * length) // 4])
    row = 1 + np.searchsorted(edges, np.arange(length), side='right')
    row[-max(1, length // 8) :] = 0
    return jnp.asarray(np.stack([np.roll(row, 3 * b) for b in range(batch)]), jnp.int32)


@functools.partial(jax.jit, static_argnums=0, compiler_options=FAST)
def forward_and_gradients(fn, q, k, v, grad, segments=None):
    out, pull = jax.vjp(lambda q, k, v: fn(q, k, v, segments), q, k, v)
    return out, *pull(grad)


def numpy_attention(q, k, v, grad, segments=None):
    """Output and gradients, one row and head at a time: softmax(q k^T / sqrt(H)) v."""
    q, k, v, grad = (np.asarray(a, np.float64) for a in (q, k, v, grad))
    out, dq, dk, dv = (np.zeros_like(a) for a in (q, q, k, v))
    batch, n_heads, length, head_dim = q.shape
    for b, n in np.ndindex(batch, n_heads):
        kv = n * k.shape[1] // n_heads
        logits = q[b, n] @ k[b, kv].T / np.sqrt(head_dim)
        seen = np.arange(length)[:, None] >= np.arange(length)
        if segments is not None:
            row = np.asarray(segments)[b]
            seen = seen & (row[:, None] == row)
        logits = np.where(seen, logits, -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        probs = weights / weights.sum(-1, keepdims=True)
        out[b, n] = probs @ v[b, kv]
        d_probs = grad[b, n] @ v[b, kv].T
        d_logits = probs * (d_probs - np.sum(probs * d_probs, -1, keepdims=True))
        dq[b, n] = d_logits @ k[b, kv] / np.sqrt(head_dim)
        dk[b, kv] += d_logits.T @ q[b, n] / np.sqrt(head_dim)
        dv[b, kv] += probs.T @ grad[b, n]
    return out, dq, dk, dv


def assert_close(actual, wanted, rounding):
    """Within some roundings of the largest value: measured, 1.6 in bfloat16 and 5 in float32."""
    for ours, right in zip(actual, wanted, strict=True):
        right = np.asarray(right, np.float64)
        assert np.isfinite(right).all()
        assert np.abs(right).max() > 0
        atol = 8 * rounding * np.abs(right).max()
        np.testing.assert_allclose(np.asarray(ours, np.float64), right, rtol=0, atol=atol)


@pytest.mark.parametrize('segmented', [False, True])
@pytest.mark.parametrize(('n_heads', 'n_kv_heads'), [(1, 1), (4, 2), (6, 2)])
def test_plain_attention_is_the_equation(n_heads, n_kv_heads, segmented):
    """Forward and gradient. Catches heads that share the wrong key head, masks off by one."""
    arrays = draw(9, n_heads, n_kv_heads, batch=2)
    segments = segments_of(9, batch=2) if segmented else None
    ours = forward_and_gradients(attention.plain, *arrays, segments)
    assert_close(ours, numpy_attention(*arrays, segments), 2**-23)


@pytest.mark.parametrize('fn', FAST_ATTENTIONS)
@pytest.mark.parametrize(
    ('length', 'segmented', 'dtype'),
    [  # 7, 96, 130: one block; 256, 384, 512: two, three, four
        (7, False, 'float32'),
        (96, True, 'float32'),
        (130, False, 'float32'),
        (256, False, 'float32'),
        (256, True, 'bfloat16'),
        (384, True, 'float32'),
        (512, False, 'bfloat16'),
        (512, True, 'float32'),
    ],
)
def test_fast_attention_is_plain_attention(fn, length, segmented, dtype):
    """Forward and gradient, against numpy, and as near as `plain` is.

    Catches a block that sees one key too few or many, or adds its gradient to the wrong keys.
    """
    arrays = draw(length, dtype=dtype)
    segments = segments_of(length) if segmented else None
    ours = forward_and_gradients(fn, *arrays, segments)
    assert all(a.dtype == jnp.dtype(dtype) for a in ours)
    assert_close(ours, numpy_attention(*arrays, segments), ROUNDING[dtype])


@pytest.mark.parametrize('fn', FAST_ATTENTIONS)
def test_fast_attention_under_vmap(fn):
    """A leading axis, of runs: the same as one at a time; segments are shared."""
    runs = [draw(256, 2, 2, scale=s) for s in (1.0, 0.3)]
    stacked = [jnp.stack(arrays) for arrays in zip(*runs, strict=True)]
    segments = segments_of(256)
    mapped = jax.vmap(
        lambda *arrays: forward_and_gradients(fn, *arrays, segments),
    )(*stacked)
    for i, run in enumerate(runs):
        alone = forward_and_gradients(fn, *run, segments)
        assert_close([a[i] for a in mapped], alone, 2**-23)


@pytest.mark.parametrize('fn', sorted({k.attention for k in IMPLEMENTATIONS.values()}, key=str))
def test_extreme_logits_stay_finite(fn):
    """Logits near 1e6: softmax picks one key, and q and k get no gradient beyond the rounding of
    dP = dO v^T, which they multiply. Catches exp without its maximum taken off.
    """
    scale = 300.0
    ours = forward_and_gradients(fn, *draw(256, scale=scale), None)
    out, _, _, dv = numpy_attention(*draw(256, scale=scale))
    np.testing.assert_allclose(ours[0], out, rtol=1e-5)
    np.testing.assert_allclose(ours[3], dv, rtol=1e-5, atol=1e-2)
    for grad in ours[1:3]:
        assert np.abs(grad).max() <= 32 * 2**-23 * scale**3


def test_blocked_attention_has_no_forward_mode_and_plain_has():
    """As its docstring says."""
    q, k, v, _ = draw(8)
    with pytest.raises(TypeError, match='forward-mode'):
        jax.jvp(lambda q: attention.blocked(q, k, v), (q,), (q,))
    jax.jvp(lambda q: attention.plain(q, k, v), (q,), (q,))


@pytest.mark.parametrize('name', IMPLEMENTATIONS)
def test_every_implementation_agrees(name):
    """The rows of the table, whatever they hold."""
    kernels, reference = IMPLEMENTATIONS[name], IMPLEMENTATIONS['reference']
    arrays = draw(256)
    ours, wanted = (forward_and_gradients(k.attention, *arrays, None) for k in (kernels, reference))
    assert_close(ours, wanted, 2**-23)
    x, w = (jnp.float32(np.random.default_rng(0).normal(size=s)) for s in ((5, 8), (8, 3)))
    np.testing.assert_allclose(kernels.matmul(x, w), reference.matmul(x, w), rtol=1e-5)


@pytest.mark.parametrize('dtype', ROUNDING)
@pytest.mark.parametrize('shape', [(6, 5, 3), (6, 3, 5), (6, 4, 4)])
def test_narrow_first_product(shape, dtype):
    """Forward, gradient and tangent equal those of x @ w, whichever side is narrow."""
    m, i, o = shape
    rng = np.random.default_rng(0)
    x, dx, w, dw, g = (
        jnp.asarray(rng.normal(size=s), dtype) for s in ((m, i), (m, i), (i, o), (i, o), (m, o))
    )

    @functools.partial(jax.jit, static_argnums=0)
    def everything(fn):
        y, pull = jax.vjp(fn, x, w)
        return y, *pull(g), jax.jvp(fn, (x, w), (dx, dw))[1]

    x64, w64, g64 = (np.asarray(a, np.float64) for a in (x, w, g))
    tangent = np.asarray(dx, np.float64) @ w64 + x64 @ np.asarray(dw, np.float64)
    wanted = (x64 @ w64, g64 @ w64.T, x64.T @ g64, tangent)
    for fn in (direct, narrow_first):
        for ours, right in zip(everything(fn), wanted, strict=True):
            assert ours.dtype == jnp.dtype(dtype)
            atol = 4 * ROUNDING[dtype] * np.abs(right).max()
            np.testing.assert_allclose(np.asarray(ours, np.float64), right, rtol=0, atol=atol)


def test_narrow_first_under_vmap():
    x, w = (jnp.float32(np.random.default_rng(0).normal(size=s)) for s in ((2, 6, 5), (2, 5, 3)))
    np.testing.assert_allclose(jax.vmap(narrow_first)(x, w), x @ w, rtol=1e-5, atol=1e-6)
