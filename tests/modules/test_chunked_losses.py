"""Fast path: losses by chunks of tokens equal the same losses of all tokens at once."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.kernels.matmul import direct
from modules.losses import LOSSES, chunk_loss, select_chunk_size
from modules.options import declared_options
from modules.products import Readout

B, T, D, V = 3, 10, 8, 13


def draw_problem(dtype=jnp.float32, softcap=0.0, bias=False):
    """Draws (x, readout, labels, weights)."""
    rng = np.random.default_rng(0)
    stored = jnp.promote_types(dtype, jnp.float32)
    readout = Readout(
        jnp.asarray(rng.normal(size=(D, V)), stored),
        jnp.asarray(rng.normal(size=V), stored) if bias else None,
        softcap=softcap,
        matmul=direct,
        dtype=dtype,
    )
    labels = jnp.asarray(rng.integers(0, V, (B, T)))
    weights = jnp.asarray(rng.integers(0, 2, (B, T)), stored).at[:, -1].set(1)
    return jnp.asarray(rng.normal(size=(B, T, D)), dtype), readout, labels, weights


def sums_and_grads(loss, x, readout, labels, weights, of='objective', **numbers):
    def objective(x, readout):
        terms = loss(x, readout, labels, weights, **numbers)
        return terms[of] / 7, terms

    grad = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
    (_, terms), grads = jax.jit(grad)(x, readout)
    return terms, grads


@pytest.mark.parametrize(
    'chunk', [12, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 3, 6, 7, 30, 1000))]
)
@pytest.mark.parametrize('name', sorted(LOSSES))
def test_chunks_equal_all_at_once(name, chunk):
    """float64: every term and the gradients, for chunks that divide and do not divide, with all
    options as a step passes them. Catches counted padding, a lost last chunk, and an option that is
    not a number.
    """
    with jax.enable_x64(True):
        arrays = draw_problem(jnp.float64, softcap=3.0, bias=True)
        numbers = {
            option: jnp.asarray(declared.default) if declared.option.traced else declared.default
            for option, declared in declared_options(LOSSES[name]).items()
        }
        expected = sums_and_grads(LOSSES[name], *arrays, **numbers)
        actual = sums_and_grads(chunk_loss(LOSSES[name], chunk), *arrays, **numbers)
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.full
def test_every_term_has_a_gradient():
    """Besides the objective's, which the forward pass computes. Catches a gradient of 0."""
    arrays, row = draw_problem(), LOSSES['cross_entropy']
    loss = functools.update_wrapper(functools.partial(row, z_loss=0.5), row)
    for term in ('ce', 'z_loss'):
        (_, expected), (_, actual) = (
            sums_and_grads(function, *arrays, of=term) for function in (loss, chunk_loss(loss, 6))
        )
        for a, b in zip(jax.tree.leaves(expected), jax.tree.leaves(actual), strict=True):
            assert np.abs(a).max() > 0.01
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_sums_over_bfloat16_are_float32():
    """Logits and their sums are float32, so the loss is exact for the rounded inputs. Catches a log
    Z in bfloat16, off by 0.01.
    """
    x, readout, labels, weights = draw_problem(jnp.bfloat16)
    terms = chunk_loss(LOSSES['cross_entropy'], 6)(x, readout, labels, weights)
    weight_DV = np.float64(readout.weight_DV.astype(jnp.bfloat16))
    logits = np.float64(x) @ weight_DV
    log_z = np.log(np.exp(logits).sum(-1))
    ce = log_z - np.take_along_axis(logits, np.asarray(labels)[..., None], -1)[..., 0]
    np.testing.assert_allclose(terms['ce'], np.sum(ce * weights), rtol=1e-6)


def test_no_array_has_all_logits():
    """Temporaries of 16,384 tokens by 8,192 words, forward and backward. Catches chunks that keep
    their logits for the backward pass.
    """
    shape = jax.ShapeDtypeStruct
    x, labels = shape((16, 1024, 32), jnp.float32), shape((16, 1024), jnp.int32)
    readout = Readout(shape((32, 8192), jnp.float32), None, 0.0, direct, jnp.float32)
    weights, temporary_bytes = shape((16, 1024), jnp.float32), {}
    for chunk in (0, select_chunk_size(16 * 1024, 8192)):
        loss = chunk_loss(LOSSES['cross_entropy'], chunk)
        run = functools.partial(sums_and_grads, loss)
        compiled = jax.jit(run).lower(x, readout, labels, weights).compile()
        temporary_bytes[chunk] = compiled.memory_analysis().temp_size_in_bytes
    assert temporary_bytes[4096] < temporary_bytes[0] / 3 and list(temporary_bytes) == [0, 4096]


def test_select_chunk_size():
    """No chunks if there are few logits; at least 1,024 tokens per device, 2,048 per TPU."""
    assert select_chunk_size(4096, 4096) == 0
    assert select_chunk_size(8192, 50304) == 1024
    assert select_chunk_size(8, 2**26) == 0
    assert select_chunk_size(2**20, 50304, pieces=16) == 16 * 1024
    assert select_chunk_size(2**20, 50304, pieces=16, platform='tpu') == 16 * 2048
    v6e = {'platform': 'tpu', 'kind': 'TPU v6 lite'}
    assert select_chunk_size(2**20, 50304, pieces=16, **v6e) == 16 * 4096
