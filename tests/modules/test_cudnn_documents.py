"""Equivalence: documents as cuDNN takes them, lengths and places in a row, computed in plain
operations, are the reference. Property: each token is in one document. What cuDNN itself computes
from them is seen on a GPU alone.
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

ASKS = ('check_cudnn_version', 'check_compute_capability', 'is_cuda_compute_capability_equal')


@pytest.fixture
def hopper(monkeypatch):
    """A process that compiles for Hopper."""
    for name in ASKS:
        monkeypatch.setattr(fused, name, vars(fused)[name])  # is put back afterwards
    assume_capability('9.0')


def same_document(lengths_BM, offsets_BM, length):
    """The mask [B, T, T] that lengths and places describe, as cuDNN reads them; see below."""
    places = jnp.arange(length)[None, None]
    begins_BM1 = offsets_BM[:, :-1, None]
    inside_BMT = (places >= begins_BM1) & (places < begins_BM1 + lengths_BM[..., None])
    inside_BMT &= (begins_BM1 >= 0) & (lengths_BM[..., None] > 0)
    return jnp.einsum('BMT,BMS->BTS', *[inside_BMT.astype(jnp.float32)] * 2) > 0


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def plain(q_BTNH, k_BSKH, v_BSKH, lengths_BM, offsets_BM, scale, window):
    heads = [jnp.swapaxes(x, 1, 2) for x in (q_BTNH, k_BSKH, v_BSKH)]
    k_BNSH, v_BNSH = (jnp.repeat(x, heads[0].shape[1] // x.shape[1], 1) for x in heads[1:])
    length = q_BTNH.shape[1]
    back = (jnp.arange(length)[:, None] - jnp.arange(length)[None])[None]
    seen_BTS = same_document(lengths_BM, offsets_BM, length) & (back >= 0)
    seen_BTS &= back < (window or length)
    logits_BNTS = scale * jnp.einsum('BNTH,BNSH->BNTS', heads[0], k_BNSH)
    logits_BNTS = jnp.where(seen_BTS[:, None], logits_BNTS.astype(jnp.float32), -1e30)
    probs_BNTS = jax.nn.softmax(logits_BNTS).astype(v_BSKH.dtype)
    return jnp.swapaxes(jnp.einsum('BNTS,BNSH->BNTH', probs_BNTS, v_BNSH), 1, 2)


def plain_forward(*args):
    out_BTNH = plain(*args)
    return out_BTNH, (args[:5], 2 * out_BTNH)  # something beside the arguments, as statistics


def plain_backward(scale, window, saved, grad):
    (*given, lengths, offsets), _ = saved
    call = plain.__wrapped__
    _, pull = jax.vjp(lambda q, k, v: call(q, k, v, lengths, offsets, scale, window), *given)
    return *pull(grad), None, None


plain.defvjp(plain_forward, plain_backward)


@jax.custom_batching.custom_vmap
def of_rows(lengths_BM):
    return lengths_BM


@of_rows.def_vmap
def refuse(*_):
    raise NotImplementedError('JAX drops documents under vmap')


@pytest.fixture
def in_plain_operations(hopper, monkeypatch):
    def compute(q, k, v, q_seqlen, kv_seqlen, q_offsets, kv_offsets, **options):
        window, mask_type = options['sliding_window_length'], options['mask_type']
        assert mask_type is fused.MaskType.PADDING_CAUSAL  # the others have no lengths
        assert q.shape[0] == q_seqlen.shape[0] == q_offsets.shape[0]
        assert kv_seqlen is q_seqlen and kv_offsets is q_offsets
        return plain(q, k, v, of_rows(q_seqlen), q_offsets, options['scale'], window)

    monkeypatch.setattr(cudnn, 'OFFSET_PARAMETERS', ())
    monkeypatch.setattr(fused, 'dot_product_attention', compute)


def rows(length, batch, seed=0):
    """Documents numbered from 1 on, then padding, 0."""
    rng = np.random.default_rng(seed)
    ends = np.sort(rng.integers(1, length + 1, size=(batch, 5)), axis=1)
    numbers = 1 + (np.arange(length) >= ends[..., None]).sum(1)
    return np.where(np.arange(length) >= length - rng.integers(0, 4, size=(batch, 1)), 0, numbers)


@pytest.mark.parametrize('seed', range(4))
def test_each_token_is_in_the_document_that_it_was_in(seed):
    """One document, all of one token, and some between. Catches a place that is one off, a row's
    end as the start of a document, and padding that is in none.
    """
    length = 40
    made = rows(length, 6, seed)
    made[0], made[1] = 1, np.arange(length)
    lengths, offsets = jax.jit(lengths_and_offsets, static_argnums=1)(jnp.asarray(made), length)
    assert lengths.shape == (6, length) and offsets.shape == (6, length + 1)
    assert lengths.dtype == offsets.dtype == jnp.int32
    for row, own, places in zip(made, np.asarray(lengths), np.asarray(offsets), strict=True):
        starts = np.flatnonzero(np.diff(row, prepend=-1))
        n = len(starts)
        np.testing.assert_array_equal(places, [*starts, *[-1] * (length + 1 - n)])
        np.testing.assert_array_equal(own, [*np.diff([*starts, length]), *[-1] * (length - n)])
    mask = same_document(lengths, offsets, length)
    np.testing.assert_array_equal(mask, made[:, :, None] == made[:, None, :])


def forward_and_gradients(name, scores, q, k, v, grad, segments):
    out, pull = jax.vjp(lambda *given: attend(name, *given, scores, segments), q, k, v)
    return out, *pull(grad)


@pytest.mark.full
@pytest.mark.usefixtures('in_plain_operations')
@pytest.mark.parametrize('scores', [Scores(), Scores(scale=0.3, window=3)], ids=['plain', 'window'])
def test_documents_by_length_and_place_are_the_reference(scores):
    q, k, v, grad, *_ = draw(24, dtype='bfloat16')
    segments = jnp.asarray(rows(24, 2))
    both = [
        forward_and_gradients(n, scores, q, k, v, grad, segments) for n in ('cudnn', 'reference')
    ]
    assert_close(*both, 2**-8)


@pytest.mark.full
@pytest.mark.usefixtures('in_plain_operations')
def test_runs_that_are_trained_together_keep_their_documents():
    """vmapped over three runs, some arrays shared. JAX's own rule drops the documents."""
    of_runs = [draw(24, dtype='bfloat16', batch=6)[i] for i in (0, 1, 2, 3)]
    q, k, v, grad = (x.reshape(3, 2, *x.shape[1:]) for x in of_runs)
    for shared in (False, True):
        segments = jnp.asarray(rows(24, 2) if shared else rows(24, 6).reshape(3, 2, 24))
        axes = (0, 0, 0, 0, None if shared else 0)
        both = [
            jax.jit(jax.vmap(functools.partial(forward_and_gradients, name, Scores()), axes))(
                q, k, v, grad, segments
            )
            for name in ('cudnn', 'reference')
        ]
        assert_close(*both, 2**-8)


@pytest.mark.full
@pytest.mark.usefixtures('in_plain_operations')
def test_a_row_with_too_many_documents_is_nan():
    """Catches documents left out in silence."""
    length = MIN_DOCUMENTS + 8
    assert max_documents(length) == MIN_DOCUMENTS and max_documents(8192) == 128
    q, k, v, *_ = draw(length, dtype='bfloat16')
    rows_of = [np.minimum(np.arange(length), n - 1) for n in (MIN_DOCUMENTS, MIN_DOCUMENTS + 1)]
    out = attend('cudnn', q, k, v, Scores(), jnp.asarray(np.stack(rows_of)))
    assert np.isfinite(np.asarray(out[0], np.float32)).all()
    assert np.isnan(np.asarray(out[1], np.float32)).any()


@pytest.mark.usefixtures('hopper')
def test_too_many_documents_are_an_error_before_a_step():
    """Runs and rows. Catches padding that is not counted, and a limit where there is none."""
    made = np.zeros((3, 2, 64), int)
    made[2, 1] = np.minimum(np.arange(64), MIN_DOCUMENTS - 1)
    check_documents('cudnn', made)
    made[2, 1, -1] = 0
    with pytest.raises(ValueError, match=r'cudnn takes 32 documents, .* 64 tokens, and one .* 33;'):
        check_documents('cudnn', made)
    check_documents('blocked', made)
    assume_capability('8.0')
    check_documents('cudnn', made)


@pytest.mark.usefixtures('hopper')
@pytest.mark.parametrize('window', [None, 3])
def test_a_program_for_hopper_has_documents_as_numbers(window):
    """Lowered without a GPU: no [B, 1, T, T] array; forward once with `dots`."""
    q, k, v, *_ = draw(2048, dtype='bfloat16', batch=2)
    segments = jnp.asarray(rows(2048, 2))

    def loss(q):
        weights = jnp.eye(8, dtype=q.dtype)
        out = attend('cudnn', q @ weights, k, v, Scores(window=window), segments)
        return jnp.sum(out @ weights)

    kept = jax.checkpoint(loss, policy=REMAT_POLICIES['dots'])
    lowered = jax.jit(jax.grad(kept)).trace(q).lower(lowering_platforms=('cuda',))
    text = lowered.as_text().replace(r'\22', '')
    assert sorted(re.findall(r'@__cudnn\$(\w+)', text)) == ['fmhaSoftmax', 'fmhaSoftmaxBackward']
    assert text.count('max_seg_per_batch: 32') == 2
    assert text.count(f'sliding_window_length: {window or 0}') == 2
    assert '2048x2048' not in text


def test_what_cudnn_lacks_is_said_in_a_line(monkeypatch):
    q, k, v, *_, segments, _ = draw(8, dtype='bfloat16')

    def missing():
        raise RuntimeError('cuDNN not found.')

    monkeypatch.setattr(fused, 'check_cudnn_version', missing)
    with pytest.raises(ValueError, match=r'needs cuDNN: cuDNN not found\. .*--extra cuda$'):
        attend('cudnn', q, k, v, Scores(), segments)
    monkeypatch.setattr(fused, 'check_cudnn_version', lambda: 91000)
    monkeypatch.setattr(fused, 'dot_product_attention', lambda query, key, value: query)
    with pytest.raises(ValueError, match=r'its function has no kv_offsets, kv_seqlen, .*blocked$'):
        attend('cudnn', q, k, v, Scores(), segments)
