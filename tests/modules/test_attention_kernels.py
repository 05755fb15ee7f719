"""Reference: attention and each field of its scores against numpy float64. Equivalence: all kernels
agree. Contract: a kernel refuses by name what it does not serve.
"""

import functools
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.kernels.attention import ATTENTION_KERNELS, Scores, attend, check_scores

ANYWHERE = [name for name, row in ATTENTION_KERNELS.items() if row.platforms is None]
FAST_ATTENTIONS = sorted({*ANYWHERE} - {'reference'})  # test_fused_attention.py has the others
PLAIN = Scores()
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


@functools.partial(jax.jit, static_argnums=(0, 6))
def forward_and_gradients(name, q, k, v, grad, segments=None, scores=PLAIN, more=None):
    """The output, and gradients of q, k, v and of the arrays in `more`, by name."""

    def run(q, k, v, more):
        return attend(name, q, k, v, scores, segments, **more)

    out, pull = jax.vjp(run, q, k, v, more or {})
    *slopes, of_more = pull(grad)
    return out, *slopes, *(of_more[name] for name in sorted(of_more) if name != 'prefix_BT')


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
    """Output and gradients, one row and head at a time."""
    q, k, v, grad = (np.asarray(a, np.float64) for a in (q, k, v, grad))
    out, dq, dk, dv = (np.zeros_like(a) for a in (q, q, k, v))
    of_more = [None if a is None else np.zeros(a.shape) for a in (key_bias_BKS, sinks_N, slopes_N)]
    dbias, dsinks, dslopes = of_more
    scale = q.shape[-1] ** -0.5 if scores.scale is None else scores.scale
    batch, n_heads, length, _ = q.shape
    for b, n in np.ndindex(batch, n_heads):
        kv = n * k.shape[1] // n_heads
        logits, slope = q[b, n] @ k[b, kv].T * scale, 1.0
        if key_bias_BKS is not None:
            logits = logits + np.float64(key_bias_BKS)[b, kv]
        if scores.softcap:
            bent = np.tanh(logits / scores.softcap)
            logits, slope = scores.softcap * bent, 1 - bent**2
        back = np.arange(length)[:, None] - np.arange(length)
        if prefix_BT is not None:
            number = np.asarray(prefix_BT)[b]
            mutual = (number[:, None] == number) & (number > 0)
            back = np.where(mutual, np.abs(back), back)
        if slopes_N is not None:
            logits = logits - np.float64(slopes_N)[n] * back
        seen = (back >= 0) & (back < (scores.window or length))
        if segments is not None:
            row = np.asarray(segments)[b]
            seen = seen & (row[:, None] == row)
        logits = np.where(seen, logits, -np.inf)
        largest = logits.max(-1, keepdims=True)
        weights = np.exp(logits - largest)
        sunk = 0.0 if sinks_N is None else np.exp(np.float64(sinks_N)[n] - largest)
        probs = weights / (weights.sum(-1, keepdims=True) + sunk)
        out[b, n] = probs @ v[b, kv]
        d_probs = grad[b, n] @ v[b, kv].T
        d_logits = probs * (d_probs - np.sum(probs * d_probs, -1, keepdims=True))
        if key_bias_BKS is not None:
            dbias[b, kv] += np.sum(slope * d_logits, 0)
        if slopes_N is not None:
            dslopes[n] -= np.sum(d_logits * back)
        if sinks_N is not None:
            share = 1 - probs.sum(-1)
            dsinks[n] -= np.sum(share * np.sum(probs * d_probs, -1))
        dq[b, n] = slope * d_logits @ k[b, kv] * scale
        dk[b, kv] += (slope * d_logits).T @ q[b, n] * scale
        dv[b, kv] += probs.T @ grad[b, n]
    return out, dq, dk, dv, *(a for a in of_more if a is not None)


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
def test_attention_is_the_equation(n_heads, n_kv_heads, segmented):
    """Forward and gradient. Catches heads that share the wrong key head, masks off by one."""
    arrays = draw(9, n_heads, n_kv_heads, batch=2)
    segments = segments_of(9, batch=2) if segmented else None
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
SERVED = [(n, f) for n in ANYWHERE for f in FIELDS if ATTENTION_KERNELS[n].supports >= f.keys()]


def arrays_of(scores, length, n_heads=4, n_kv_heads=2, batch=2):
    """What `scores` announces."""
    rng, more = np.random.default_rng(1), {}
    if scores.sinks:
        more['sinks_N'] = jnp.float32(rng.normal(size=n_heads))
    if scores.slopes:
        more['slopes_N'] = jnp.float32(rng.uniform(0.1, 1.0, n_heads))
    if scores.key_bias:
        more['key_bias_BKS'] = jnp.float32(rng.normal(size=(batch, n_kv_heads, length)))
    if scores.prefix:  # over the edges of documents and tiles too
        prefix = np.repeat([0, 2, 1, 0, 3], length)[rng.integers(0, 5) :: 5][:length]
        more['prefix_BT'] = jnp.asarray(np.stack([np.roll(prefix, b) for b in range(batch)]), int)
    return more


@pytest.mark.parametrize(('name', 'fields'), SERVED, ids=str)
def test_scores_are_their_equations(name, fields):
    """Forward and gradient, those of all arrays too, in documents and grouped heads. Catches a
    window that is one too wide, a cap after the slopes or without its slope, a sink with a value.
    """
    scores, arrays, segments = Scores(**fields), draw(9, 4, 2, batch=2), segments_of(9, batch=2)
    more = arrays_of(scores, 9)
    ours = forward_and_gradients(name, *arrays, segments, scores, more)
    wanted = numpy_attention(*arrays, segments, scores, **more)
    assert_close(ours, wanted, 2**-23)
    if fields.keys() - {'scale'}:
        plain = numpy_attention(*arrays, segments)[0]
        assert np.abs(plain - wanted[0]).max() > 1e-3


@pytest.mark.parametrize('dtype', ['bfloat16', 'float32'])
def test_a_query_that_sees_one_token_has_no_gradient(dtype):
    """Its dP and dO . O are one sum, which float32 adds in two orders. Catches products of dO and O
    in bfloat16, which leave 1e-2. Not under jit, where XLA for CPUs leaves that rounding out.
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
def test_fields_over_several_tiles(length, fields, monkeypatch):
    """Tiles of 4 tokens, two of them unrolled and four in loops, the last one padded. Catches keys
    of another tile, a window whose first tile is left out, a maximum that is not carried on.
    """
    for name in ('LEAST', 'MOST'):
        monkeypatch.setattr(sys.modules['modules.kernels.attention.blocked'], name, 4)
    scores, arrays = Scores(**fields), draw(length, 4, 2, batch=2)
    segments, more = segments_of(length, batch=2), arrays_of(scores, length)
    run = jax.jit(forward_and_gradients.__wrapped__, static_argnums=(0, 6))
    for of_rows in (None, segments):
        ours = run('blocked', *arrays, of_rows, scores, more)
        assert_close(ours, numpy_attention(*arrays, of_rows, scores, **more), 2**-23)


@pytest.mark.default_rows('reference')
@pytest.mark.parametrize('name', ANYWHERE)
def test_a_layer_may_leave_its_window_out(name):
    """By a traced scalar, as the layers of a scan differ; forward and gradient."""
    arrays = draw(9, 4, 2, batch=2)
    q, k, v, grad = arrays

    @functools.partial(jax.jit)
    def run(is_full):
        out, pull = jax.vjp(
            lambda q, k, v: attend(name, q, k, v, Scores(window=3), is_full=is_full), q, k, v
        )
        return out, *pull(grad)

    for is_full, window in ((True, None), (False, 3)):
        assert_close(run(is_full), numpy_attention(*arrays, scores=Scores(window=window)), 2**-23)


def test_long_rows_need_memory_that_grows_with_them():
    """4,096 tokens forward and backward: no array of all pairs, nor one of a block of queries and
    all keys, in the compiled program.
    """
    shape = jax.ShapeDtypeStruct((1, 4, 4096, 8), jnp.float32)

    def run(q, k, v, grad):
        return jax.vjp(lambda *a: attend('blocked', *a, PLAIN), q, k, v)[1](grad)

    memory = jax.jit(run).lower(*[shape] * 4).compile().memory_analysis()
    pairs = 4 * 4096**2 * 4
    assert memory.temp_size_in_bytes < pairs / 8


@pytest.mark.parametrize('name', ATTENTION_KERNELS)
@pytest.mark.parametrize('fields', FIELDS, ids=str)
def test_what_a_kernel_does_not_serve_is_refused_by_name(name, fields):
    """By the function that a check calls and by the kernel itself, which names those that do."""
    q, k, v, _ = draw(4)
    if ATTENTION_KERNELS[name].supports >= fields.keys():
        check_scores(name, Scores(**fields))
        return
    field = sorted(fields.keys() - ATTENTION_KERNELS[name].supports)[0]
    words = rf'kernels.attention={name} does not serve .*{field}={fields[field]}.*: blocked, ref'
    with pytest.raises(ValueError, match=words):
        check_scores(name, Scores(**fields))
    with pytest.raises(ValueError, match=words):
        attend(name, q, k, v, Scores(**fields))


def test_arrays_come_with_their_fields():
    """A bias that `scores` does not announce would be lost without a word, and the reverse."""
    q, k, v, _ = draw(4)
    with pytest.raises(ValueError, match='slopes_N came all the same'):
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
def test_fast_attention_is_attention(fn, length, segmented, dtype):
    """Forward and gradient, against numpy, and as near as `reference` is.

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


@pytest.mark.default_rows('blocked')
@pytest.mark.parametrize('fn', ANYWHERE)
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


@pytest.mark.full
def test_blocked_attention_has_no_forward_mode_and_the_reference_has():
    """As its docstring says."""
    q, k, v, _ = draw(8)
    with pytest.raises(TypeError, match='forward-mode'):
        jax.jvp(lambda q: attend('blocked', q, k, v, PLAIN), (q,), (q,))
    jax.jvp(lambda q: attend('reference', q, k, v, PLAIN), (q,), (q,))
