"""Equivalence: documents as cuDNN gets them, lengths and offsets in a row, computed in plain
operations, match the reference. Property: each token is in one document. cuDNN itself is tested on
a GPU only.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax._src.cudnn import fused_attention_stablehlo as fused

from modules.kernels.attention import Scores, attend, check_documents, cudnn
from modules.kernels.attention.cudnn import (
    MIN_DOCUMENTS,
    assume_capability,
    lengths_and_offsets,
    max_documents,
)
from modules.numerics import REMAT_POLICIES
from tests.modules.test_fused_attention import assert_close, draw

QUERIES = ('check_cudnn_version', 'check_compute_capability', 'is_cuda_compute_capability_equal')


@pytest.fixture
def hopper(monkeypatch):
    """Makes the process compile for Hopper."""
    for name in QUERIES:
        monkeypatch.setattr(fused, name, vars(fused)[name])  # restored after the test
    assume_capability('9.0')


def same_document(lengths_BM, offsets_BM, length):
    """Returns the mask [B, T, T] that lengths and offsets describe, as cuDNN reads them."""
    positions = jnp.arange(length)[None, None]
    starts_BM1 = offsets_BM[:, :-1, None]
    inside_BMT = (positions >= starts_BM1) & (positions < starts_BM1 + lengths_BM[..., None])
    inside_BMT &= (starts_BM1 >= 0) & (lengths_BM[..., None] > 0)
    return jnp.einsum('BMT,BMS->BTS', *[inside_BMT.astype(jnp.float32)] * 2) > 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def plain_attention(q_BTNH, k_BSKH, v_BSKH, lengths_BM, offsets_BM, scale, window):
    heads = [jnp.swapaxes(x, 1, 2) for x in (q_BTNH, k_BSKH, v_BSKH)]
    k_BNSH, v_BNSH = (jnp.repeat(x, heads[0].shape[1] // x.shape[1], 1) for x in heads[1:])
    length = q_BTNH.shape[1]
    distance = (jnp.arange(length)[:, None] - jnp.arange(length)[None])[None]
    visible_BTS = same_document(lengths_BM, offsets_BM, length) & (distance >= 0)
    visible_BTS &= distance < (window or length)
    logits_BNTS = scale * jnp.einsum('BNTH,BNSH->BNTS', heads[0], k_BNSH)
    logits_BNTS = jnp.where(visible_BTS[:, None], logits_BNTS.astype(jnp.float32), -1e30)
    probs_BNTS = jax.nn.softmax(logits_BNTS).astype(v_BSKH.dtype)
    return jnp.swapaxes(jnp.einsum('BNTS,BNSH->BNTH', probs_BNTS, v_BNSH), 1, 2)


def plain_forward(*args):
    output_BTNH = plain_attention(*args)
    return output_BTNH, (args[:5], 2 * output_BTNH)  # a residual that is no argument, as statistics


def plain_backward(scale, window, residuals, grad):
    (*inputs, lengths, offsets), _ = residuals
    call = plain_attention.__wrapped__
    _, pull = jax.vjp(lambda q, k, v: call(q, k, v, lengths, offsets, scale, window), *inputs)
    return *pull(grad), None, None


plain_attention.defvjp(plain_forward, plain_backward)


@jax.custom_batching.custom_vmap
def identity(lengths_BM):
    return lengths_BM


@identity.def_vmap
def refuse(*_):
    raise NotImplementedError('JAX drops documents under vmap')


@pytest.fixture
def plain_operations(hopper, monkeypatch):
    def compute(q, k, v, q_seqlen, kv_seqlen, q_offsets, kv_offsets, **options):
        window, mask_type = options['sliding_window_length'], options['mask_type']
        assert mask_type is fused.MaskType.PADDING_CAUSAL  # the others have no lengths
        assert q.shape[0] == q_seqlen.shape[0] == q_offsets.shape[0]
        assert kv_seqlen is q_seqlen and kv_offsets is q_offsets
        return plain_attention(q, k, v, identity(q_seqlen), q_offsets, options['scale'], window)

    monkeypatch.setattr(cudnn, 'OFFSET_PARAMETERS', ())
    monkeypatch.setattr(fused, 'dot_product_attention', compute)


def draw_segments(length, batch, seed=0):
    """Returns documents numbered from 1 on, then padding, 0."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(1, length + 1, size=(batch, 5)), axis=1)
    numbers = 1 + (np.arange(length) >= ends[..., None]).sum(1)
    return np.where(np.arange(length) >= length - rng.integers(0, 4, size=(batch, 1)), 0, numbers)


@pytest.mark.parametrize('seed', range(4))
def test_offsets_describe_documents(seed):
    """One document, documents of one token, and some between. Catches an offset off by one, a row's
    end taken for a start, and padding without a document.
    """
    length = 40
    segments = draw_segments(length, 6, seed)
    segments[0], segments[1] = 1, np.arange(length)
    lengths, offsets = jax.jit(lengths_and_offsets, static_argnums=1)(jnp.asarray(segments), length)
    assert lengths.shape == (6, length) and offsets.shape == (6, length + 1)
    assert lengths.dtype == offsets.dtype == jnp.int32
    for row, row_lengths, row_offsets in zip(
        segments, np.asarray(lengths), np.asarray(offsets), strict=True
    ):
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        n = len(starts)
        np.testing.assert_array_equal(row_offsets, [*starts, *[-1] * (length + 1 - n)])
        np.testing.assert_array_equal(
            row_lengths, [*np.diff([*starts, length]), *[-1] * (length - n)]
        )
    mask = same_document(lengths, offsets, length)
    np.testing.assert_array_equal(mask, segments[:, :, None] == segments[:, None, :])


def forward_and_gradients(name, scores, q, k, v, grad, segments):
    y, pull = jax.vjp(lambda *inputs: attend(name, *inputs, scores, segments), q, k, v)
    return y, *pull(grad)


@pytest.mark.full
@pytest.mark.usefixtures('plain_operations')
@pytest.mark.parametrize('scores', [Scores(), Scores(scale=0.3, window=3)], ids=['plain', 'window'])
def test_documents_match_reference(scores):
    q, k, v, grad, *_ = draw(24, dtype='bfloat16')
    segments = jnp.asarray(draw_segments(24, 2))
    outputs = [
        forward_and_gradients(n, scores, q, k, v, grad, segments) for n in ('cudnn', 'reference')
    ]
    assert_close(*outputs, 2**-8)


@pytest.mark.full
@pytest.mark.usefixtures('plain_operations')
def test_mapped_runs_keep_documents():
    """vmapped over three runs, with some arrays shared. JAX's own rule drops the documents."""
    run_arrays = [draw(24, dtype='bfloat16', batch=6)[i] for i in (0, 1, 2, 3)]
    q, k, v, grad = (x.reshape(3, 2, *x.shape[1:]) for x in run_arrays)
    for shared in (False, True):
        segments = jnp.asarray(
            draw_segments(24, 2) if shared else draw_segments(24, 6).reshape(3, 2, 24)
        )
        axes = (0, 0, 0, 0, None if shared else 0)
        outputs = [
            jax.jit(jax.vmap(functools.partial(forward_and_gradients, name, Scores()), axes))(
                q, k, v, grad, segments
            )
            for name in ('cudnn', 'reference')
        ]
        assert_close(*outputs, 2**-8)


@pytest.mark.full
@pytest.mark.usefixtures('plain_operations')
def test_too_many_documents_give_nan():
    """Catches documents that are dropped silently."""
    length = MIN_DOCUMENTS + 8
    assert max_documents(length) == MIN_DOCUMENTS and max_documents(8192) == 128
    q, k, v, *_ = draw(length, dtype='bfloat16')
    segments = [np.minimum(np.arange(length), n - 1) for n in (MIN_DOCUMENTS, MIN_DOCUMENTS + 1)]
    y = attend('cudnn', q, k, v, Scores(), jnp.asarray(np.stack(segments)))
    assert np.isfinite(np.asarray(y[0], np.float32)).all()
    assert np.isnan(np.asarray(y[1], np.float32)).any()


@pytest.mark.usefixtures('hopper')
def test_check_documents_rejects_too_many():
    """Runs and rows. Catches uncounted padding, and a limit where none applies."""
    segments = np.zeros((3, 2, 64), int)
    segments[2, 1] = np.minimum(np.arange(64), MIN_DOCUMENTS - 1)
    check_documents('cudnn', segments)
    segments[2, 1, -1] = 0
    with pytest.raises(
        ValueError, match=r'cudnn supports at most 32 documents .* 64 tokens.* has 33\.'
    ):
        check_documents('cudnn', segments)
    check_documents('blocked', segments)
    assume_capability('8.0')
    check_documents('cudnn', segments)


@pytest.mark.usefixtures('hopper')
@pytest.mark.parametrize('window', [None, 3])
def test_hopper_program_has_offsets(window):
    """Lowered without a GPU: no [B, 1, T, T] array; a single forward call with `dots`."""
    q, k, v, *_ = draw(2048, dtype='bfloat16', batch=2)
    segments = jnp.asarray(draw_segments(2048, 2))

    def loss(q):
        weights = jnp.eye(8, dtype=q.dtype)
        y = attend('cudnn', q @ weights, k, v, Scores(window=window), segments)
        return jnp.sum(y @ weights)

    rematerialized = jax.checkpoint(loss, policy=REMAT_POLICIES['dots'])
    lowered = jax.jit(jax.grad(rematerialized)).trace(q).lower(lowering_platforms=('cuda',))
    text = lowered.as_text().replace(r'\22', '')
    assert sorted(re.findall(r'@__cudnn\$(\w+)', text)) == ['fmhaSoftmax', 'fmhaSoftmaxBackward']
    assert text.count('max_seg_per_batch: 32') == 2
    assert text.count(f'sliding_window_length: {window or 0}') == 2
    assert '2048x2048' not in text


def test_missing_cudnn_is_reported(monkeypatch):
    q, k, v, *_, segments, _ = draw(8, dtype='bfloat16')

    def missing():
        raise RuntimeError('cuDNN not found.')

    monkeypatch.setattr(fused, 'check_cudnn_version', missing)
    with pytest.raises(ValueError, match=r'needs cuDNN: cuDNN not found\. .*--extra cuda\.$'):
        attend('cudnn', q, k, v, Scores(), segments)
    monkeypatch.setattr(fused, 'check_cudnn_version', lambda: 91000)
    monkeypatch.setattr(fused, 'dot_product_attention', lambda query, key, value: query)
    with pytest.raises(ValueError, match=r'function has no kv_offsets, kv_seqlen, .*blocked\.$'):
        attend('cudnn', q, k, v, Scores(), segments)
