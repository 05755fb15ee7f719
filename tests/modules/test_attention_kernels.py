"""Reference: attention and each field of its scores against NumPy in float64. Equivalence: all
kernels agree. Contract: a kernel rejects unsupported options by name.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.kernels.attention import ATTENTION_KERNELS, Scores, attend, check_scores

PORTABLE = [name for name, row in ATTENTION_KERNELS.items() if row.platforms is None]
FAST_ATTENTIONS = sorted({*PORTABLE} - {'reference'})  # test_fused_attention.py has the others
PLAIN = Scores()
ROUNDING = {'float32': 2**-23, 'bfloat16': 2**-8}


def draw(length, n_heads=2, n_kv_heads=1, batch=1, head_dim=4, dtype='float32', scale=1.0):
    """Draws q, k, v and the cotangent of the output, exact in `dtype`."""
    rng = np.random.default_rng(length)
    heads = (n_heads, n_kv_heads, n_kv_heads, n_heads)
    shapes = [(batch, n, length, head_dim) for n in heads]
    return [jnp.asarray(scale * rng.normal(size=shape), dtype) for shape in shapes]


def draw_segments(length, batch=1):
    """Returns documents of uneven lengths that cross every block boundary, then padding."""
    edges = np.array([length // 5, length // 5 + 1, (3 * length) // 4])
    row = 1 + np.searchsorted(edges, np.arange(length), side='right')
    row[-max(1, length // 8) :] = 0
    return jnp.asarray(np.stack([np.roll(row, 3 * b) for b in range(batch)]), jnp.int32)


@functools.partial(jax.jit, static_argnums=(0, 6))
def forward_and_gradients(name, q, k, v, grad, segments=None, scores=PLAIN, arrays=None):
    """Returns the output, and gradients of q, k, v and of the arrays in `arrays`, by name."""

    def run(q, k, v, arrays):
        return attend(name, q, k, v, scores, segments, **arrays)

    y, pull = jax.vjp(run, q, k, v, arrays or {})
    *slopes, array_gradients = pull(grad)
    return (
        y,
        *slopes,
        *(array_gradients[name] for name in sorted(array_gradients) if name != 'prefix_BT'),
    )


def numpy_attention(
    q,
    k,
    v,
    grad,
    segments=None,
    scores=PLAIN,
    sinks_N=None,
    slopes_N=None,
    key_bias_BKS=None,
    prefix_BT=None,
):
    """Returns the output and gradients, computed a row and a head at a time."""
    q, k, v, grad = (np.asarray(a, np.float64) for a in (q, k, v, grad))
    y, dq, dk, dv = (np.zeros_like(a) for a in (q, q, k, v))
    array_gradients = [
        None if a is None else np.zeros(a.shape) for a in (key_bias_BKS, sinks_N, slopes_N)
    ]
    dbias, dsinks, dslopes = array_gradients
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    batch, n_heads, length, _ = q.shape
    for b, n in np.ndindex(batch, n_heads):
        kv = n * k.shape[1] // n_heads
        logits, slope = q[b, n] @ k[b, kv].T * scale, 1.0
        if key_bias_BKS is not None:
            logits = logits + np.float64(key_bias_BKS)[b, kv]
        if scores.softcap:
            bounded = np.tanh(logits / scores.softcap)
            logits, slope = scores.softcap * bounded, 1 - bounded**2
        distance = np.arange(length)[:, None] - np.arange(length)
        if prefix_BT is not None:
            number = np.asarray(prefix_BT)[b]
            mutual = (number[:, None] == number) & (number > 0)
            distance = np.where(mutual, np.abs(distance), distance)
        if slopes_N is not None:
            logits = logits - np.float64(slopes_N)[n] * distance
        visible = (distance >= 0) & (distance < (scores.window or length))
        if segments is not None:
            row = np.asarray(segments)[b]
            visible = visible & (row[:, None] == row)
        logits = np.where(visible, logits, -np.inf)
        largest = logits.max(-1, keepdims=True)
        weights = np.exp(logits - largest)
        sink_weight = 0.0 if sinks_N is None else np.exp(np.float64(sinks_N)[n] - largest)
        probs = weights / (weights.sum(-1, keepdims=True) + sink_weight)
        y[b, n] = probs @ v[b, kv]
        d_probs = grad[b, n] @ v[b, kv].T
        d_logits = probs * (d_probs - np.sum(probs * d_probs, -1, keepdims=True))
        if key_bias_BKS is not None:
            dbias[b, kv] += np.sum(slope * d_logits, 0)
        if slopes_N is not None:
            dslopes[n] -= np.sum(d_logits * distance)
        if sinks_N is not None:
            share = 1 - probs.sum(-1)
            dsinks[n] -= np.sum(share * np.sum(probs * d_probs, -1))
        dq[b, n] = slope * d_logits @ k[b, kv] * scale
        dk[b, kv] += (slope * d_logits).T @ q[b, n] * scale
        dv[b, kv] += probs.T @ grad[b, n]
    return y, dq, dk, dv, *(a for a in array_gradients if a is not None)


def assert_close(actual, expected, rounding):
    """Checks to a few roundings of the largest value: measured, 1.6 (bfloat16) and 5 (float32)."""
    for actual_array, expected_array in zip(actual, expected, strict=True):
        expected_array = np.asarray(expected_array, np.float64)
        assert np.isfinite(expected_array).all()
        assert np.abs(expected_array).max() > 0
        atol = 8 * rounding * np.abs(expected_array).max()
        np.testing.assert_allclose(
            np.asarray(actual_array, np.float64), expected_array, rtol=0, atol=atol
        )


@pytest.mark.parametrize('segmented', [False, True])
@pytest.mark.parametrize(('n_heads', 'n_kv_heads'), [(1, 1), (4, 2), (6, 2)])
def test_reference_matches_equation(n_heads, n_kv_heads, segmented):
    """Forward and gradient. Catches heads that share the wrong key head, masks off by one."""
    arrays = draw(9, n_heads, n_kv_heads, batch=2)
    segments = draw_segments(9, batch=2) if segmented else None
    ours = forward_and_gradients('reference', *arrays, segments)
    assert_close(ours, numpy_attention(*arrays, segments), 2**-23)


# A value of each field of Scores, and all of them at once.
FIELDS = [
    {'scale': 0.3},
    {'softcap': 0.7},
    {'window': 2},
    {'window': 3},
    {'sinks': True},
    {'slopes': True},
    {'key_bias': True},
    {'prefix': True},
    {'prefix': True, 'window': 3},
    {
        'scale': 2.0,
        'softcap': 1.5,
        'window': 4,
        'sinks': True,
        'slopes': True,
        'key_bias': True,
        'prefix': True,
    },
]
SUPPORTED = [(n, f) for n in PORTABLE for f in FIELDS if ATTENTION_KERNELS[n].supports >= f.keys()]


def draw_arrays(scores, length, n_heads=4, n_kv_heads=2, batch=2):
    """Draws the arrays that `scores` declares."""
    rng, arrays = np.random.default_rng(1), {}
    if scores.sinks:
        arrays['sinks_N'] = jnp.float32(rng.normal(size=n_heads))
    if scores.slopes:
        arrays['slopes_N'] = jnp.float32(rng.uniform(0.1, 1.0, n_heads))
    if scores.key_bias:
        arrays['key_bias_BKS'] = jnp.float32(rng.normal(size=(batch, n_kv_heads, length)))
    if scores.prefix:  # over the edges of documents and tiles too
        prefix = np.repeat([0, 2, 1, 0, 3], length)[rng.integers(0, 5) :: 5][:length]
        arrays['prefix_BT'] = jnp.asarray(np.stack([np.roll(prefix, b) for b in range(batch)]), int)
    return arrays


@pytest.mark.parametrize(('name', 'fields'), SUPPORTED, ids=str)
def test_scores_match_equations(name, fields):
    """Forward and gradient, of all arrays too, in documents and grouped heads. Catches a window
    that is one too wide, a cap after the slopes or without its derivative, a sink with a value.
    """
    scores, arrays, segments = Scores(**fields), draw(9, 4, 2, batch=2), draw_segments(9, batch=2)
    extra = draw_arrays(scores, 9)
    ours = forward_and_gradients(name, *arrays, segments, scores, extra)
    expected = numpy_attention(*arrays, segments, scores, **extra)
    assert_close(ours, expected, 2**-23)
    if fields.keys() - {'scale'}:
        plain = numpy_attention(*arrays, segments)[0]
        assert np.abs(plain - expected[0]).max() > 1e-3


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_query_with_one_key_has_no_gradient(dtype):
    """Its dP and dO . O are the same sum, which float32 adds in two orders. Catches products of dO
    and O in bfloat16, which leave 1e-2. Not under jit, where XLA for CPUs omits that rounding.
    """
    q, k, v, grad = draw(1, n_kv_heads=2, head_dim=64, dtype=dtype)
    _, pull = jax.vjp(lambda *arrays: attend('blocked', *arrays, PLAIN), q, k, v)
    dq, dk, dv = pull(grad)
    np.testing.assert_array_equal(dv, grad)
    for slope in (dq, dk):
        np.testing.assert_allclose(np.float64(slope), 0.0, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize(
    ('length', 'fields'),
    [
        pytest.param(15, {}, marks=pytest.mark.full),
        pytest.param(15, {'window': 2}, marks=pytest.mark.full),
        (15, {'prefix': True}),
        (15, FIELDS[-1]),
        pytest.param(7, FIELDS[-1], marks=pytest.mark.full),
    ],
    ids=str,
)
def test_blocked_fields_over_several_tiles(length, fields, monkeypatch):
    """Tiles of 4 tokens: two unrolled and four in loops, the last with padding. Catches keys of
    another tile, a window without its first tile, a maximum that is not carried on.
    """
    for name in ('MIN_TILE', 'MAX_TILE'):
        monkeypatch.setattr(sys.modules['modules.kernels.attention.blocked'], name, 4)
    scores, arrays = Scores(**fields), draw(length, 4, 2, batch=2)
    segments, extra = draw_segments(length, batch=2), draw_arrays(scores, length)
    run = jax.jit(forward_and_gradients.__wrapped__, static_argnums=(0, 6))
    for row_segments in (None, segments):
        ours = run('blocked', *arrays, row_segments, scores, extra)
        assert_close(ours, numpy_attention(*arrays, row_segments, scores, **extra), 2**-23)


@pytest.mark.default_rows('reference')
@pytest.mark.parametrize('name', PORTABLE)
def test_is_full_turns_window_off(name):
    """`is_full` is a traced scalar, as the layers of a scan differ; forward and gradient."""
    arrays = draw(9, 4, 2, batch=2)
    q, k, v, grad = arrays

    @functools.partial(jax.jit)
    def run(is_full):
        y, pull = jax.vjp(
            lambda q, k, v: attend(name, q, k, v, Scores(window=3), is_full=is_full), q, k, v
        )
        return y, *pull(grad)

    for is_full, window in ((True, None), (False, 3)):
        assert_close(run(is_full), numpy_attention(*arrays, scores=Scores(window=window)), 2**-23)


def test_blocked_memory_grows_linearly():
    """4,096 tokens forward and backward: the compiled program has no array of all pairs, nor of a
    block of queries with all keys.
    """
    shape = jax.ShapeDtypeStruct((1, 4, 4096, 8), jnp.float32)

    def run(q, k, v, grad):
        return jax.vjp(lambda *a: attend('blocked', *a, PLAIN), q, k, v)[1](grad)

    memory = jax.jit(run).lower(*[shape] * 4).compile().memory_analysis()
    pairs = 4 * 4096**2 * 4
    assert memory.temp_size_in_bytes < pairs / 8


@pytest.mark.parametrize('name', ATTENTION_KERNELS)
@pytest.mark.parametrize('fields', FIELDS, ids=str)
def test_unsupported_scores_are_rejected(name, fields):
    """The function that config checks call and the kernel itself refuse; the error lists
    alternatives.
    """
    q, k, v, _ = draw(4)
    if ATTENTION_KERNELS[name].supports >= fields.keys():
        check_scores(name, Scores(**fields))
        return
    field = sorted(fields.keys() - ATTENTION_KERNELS[name].supports)[0]
    words = rf'kernels.attention={name} does not support .*{field}={fields[field]}.*: blocked, ref'
    with pytest.raises(ValueError, match=words):
        check_scores(name, Scores(**fields))
    with pytest.raises(ValueError, match=words):
        attend(name, q, k, v, Scores(**fields))


def test_arrays_must_match_fields():
    """A bias that `scores` does not declare would be dropped silently, and the reverse."""
    q, k, v, _ = draw(4)
    with pytest.raises(ValueError, match='slopes_N is not expected'):
        attend('blocked', q, k, v, PLAIN, slopes_N=jnp.zeros(2))
    with pytest.raises(ValueError, match='sinks_N is missing'):
        attend('reference', q, k, v, Scores(sinks=True))
    with pytest.raises(ValueError, match='at least 1; got 0'):
        Scores(window=0)


@pytest.mark.default_rows('7-False-float32-blocked', '130-True-float32-blocked')
@pytest.mark.parametrize('fn', FAST_ATTENTIONS)
@pytest.mark.parametrize(
    ('length', 'segmented', 'dtype'),
    [  # 7, 130, 512: one tile; 520: two, 1100: three
        (7, False, 'float32'),
        (130, True, 'float32'),
        (512, True, 'bfloat16'),
        (520, False, 'float32'),
        (1100, False, 'bfloat16'),
        (1100, True, 'float32'),
    ],
)
def test_fast_attention_matches_reference(fn, length, segmented, dtype):
    """Forward and gradient, against NumPy, as close as `reference` is.

    Catches a block that sees a key too few or many, or adds its gradient to the wrong keys.
    """
    arrays = draw(length, dtype=dtype)
    segments = draw_segments(length) if segmented else None
    ours = forward_and_gradients(fn, *arrays, segments)
    assert all(a.dtype == jnp.dtype(dtype) for a in ours)
    assert_close(ours, numpy_attention(*arrays, segments), ROUNDING[dtype])


@pytest.mark.parametrize('fn', FAST_ATTENTIONS)
def test_fast_attention_under_vmap(fn):
    """A leading axis of runs: the same as a run at a time, with shared segments."""
    runs = [draw(256, 2, 2, scale=s) for s in (1.0, 0.3)]
    stacked = [jnp.stack(arrays) for arrays in zip(*runs, strict=True)]
    segments = draw_segments(256)
    mapped = jax.vmap(
        lambda *arrays: forward_and_gradients(fn, *arrays, segments),
    )(*stacked)
    for i, run in enumerate(runs):
        single = forward_and_gradients(fn, *run, segments)
        assert_close([a[i] for a in mapped], single, 2**-23)


@pytest.mark.default_rows('blocked')
@pytest.mark.parametrize('fn', PORTABLE)
def test_extreme_logits_stay_finite(fn):
    """Logits near 1e6: softmax picks one key, and q and k get no gradient beyond the rounding of dP
    = dO v^T, which they multiply. Catches exp without subtraction of the maximum.
    """
    scale = 300.0
    ours = forward_and_gradients(fn, *draw(256, scale=scale), None)
    y, _, _, dv = numpy_attention(*draw(256, scale=scale))
    np.testing.assert_allclose(ours[0], y, rtol=1e-5)
    np.testing.assert_allclose(ours[3], dv, rtol=1e-5, atol=1e-2)
    for grad in ours[1:3]:
        assert np.abs(grad).max() <= 32 * 2**-23 * scale**3


@pytest.mark.full
def test_only_reference_has_forward_mode():
    """Its docstring states this."""
    q, k, v, _ = draw(8)
    with pytest.raises(TypeError, match='forward-mode'):
        jax.jvp(lambda q: attend('blocked', q, k, v, PLAIN), (q,), (q,))
    jax.jvp(lambda q: attend('reference', q, k, v, PLAIN), (q,), (q,))
