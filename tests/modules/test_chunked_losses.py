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


def problem(dtype=jnp.float32, softcap=0.0, bias=False):
    """(x, readout, labels, weights)."""
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
        found = loss(x, readout, labels, weights, **numbers)
        return found[of] / 7, found

    grad = jax.value_and_grad(objective, argnums=(0, 1), has_aux=True)
    (_, found), grads = jax.jit(grad)(x, readout)
    return found, grads


@pytest.mark.parametrize(
    'chunk', [12, *(pytest.param(n, marks=pytest.mark.full) for n in (1, 3, 6, 7, 30, 1000))]
)
@pytest.mark.parametrize('name', sorted(LOSSES))
def test_chunks_equal_all_at_once(name, chunk):
    """float64: every term and the gradients, whatever the chunk does not divide, with all options
    given as a step gives them. Catches filled-up tokens that count, a lost last chunk, and an
    option that is no number.
    """
    with jax.enable_x64(True):
        given = problem(jnp.float64, softcap=3.0, bias=True)
        numbers = {
            option: jnp.asarray(declared.default) if declared.option.traced else declared.default
            for option, declared in declared_options(LOSSES[name]).items()
        }
        wanted = sums_and_grads(LOSSES[name], *given, **numbers)
        found = sums_and_grads(chunk_loss(LOSSES[name], chunk), *given, **numbers)
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-12, atol=1e-12)


@pytest.mark.full
def test_every_term_has_its_gradient():
    """Not that of the objective, which the forward pass makes. Catches a gradient of 0."""
    given, row = problem(), LOSSES['cross_entropy']
    loss = functools.update_wrapper(functools.partial(row, z_loss=0.5), row)
    for term in ('ce', 'z_loss'):
        (_, wanted), (_, found) = (
            sums_and_grads(one, *given, of=term) for one in (loss, chunk_loss(loss, 6))
        )
        for a, b in zip(jax.tree.leaves(wanted), jax.tree.leaves(found), strict=True):
            assert np.abs(a).max() > 0.01
            np.testing.assert_allclose(b, a, rtol=1e-5, atol=1e-6)


@pytest.mark.full
def test_sums_are_exact_over_bfloat16():
    """Logits and their sums are float32, so the loss is that of exact arithmetic on the rounded
    inputs. Catches a log Z in bfloat16, off by 0.01.
    """
    x, readout, labels, weights = problem(jnp.bfloat16)
    found = chunk_loss(LOSSES['cross_entropy'], 6)(x, readout, labels, weights)
    weight_DV = np.float64(readout.weight_DV.astype(jnp.bfloat16))
    logits = np.float64(x) @ weight_DV
    log_z = np.log(np.exp(logits).sum(-1))
    ce = log_z - np.take_along_axis(logits, np.asarray(labels)[..., None], -1)[..., 0]
    np.testing.assert_allclose(found['ce'], np.sum(ce * weights), rtol=1e-6)


def test_no_array_has_all_logits():
    """Temporaries of 16,384 tokens by 8,192 words, forward and backward. Catches chunks whose
    logits are kept for the backward pass.
    """
    shape = jax.ShapeDtypeStruct
    x, labels = shape((16, 1024, 32), jnp.float32), shape((16, 1024), jnp.int32)
    readout = Readout(shape((32, 8192), jnp.float32), None, 0.0, direct, jnp.float32)
    weights, held = shape((16, 1024), jnp.float32), {}
    for chunk in (0, select_chunk_size(16 * 1024, 8192)):
        loss = chunk_loss(LOSSES['cross_entropy'], chunk)
        run = functools.partial(sums_and_grads, loss)
        compiled = jax.jit(run).lower(x, readout, labels, weights).compile()
        held[chunk] = compiled.memory_analysis().temp_size_in_bytes
    assert held[4096] < held[0] / 3 and list(held) == [0, 4096]


def test_chosen_chunk():
    """All at once where that is little; a device has 1,024 tokens at least, a TPU 2,048."""
    assert select_chunk_size(4096, 4096) == 0
    assert select_chunk_size(8192, 50304) == 1024
    assert select_chunk_size(8, 2**26) == 0
    assert select_chunk_size(2**20, 50304, pieces=16) == 16 * 1024
    assert select_chunk_size(2**20, 50304, pieces=16, platform='tpu') == 16 * 2048
    v6e = {'platform': 'tpu', 'kind': 'TPU v6 lite'}
    assert select_chunk_size(2**20, 50304, pieces=16, **v6e) == 16 * 4096
