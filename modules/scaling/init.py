"""Initial standard deviations of matrices and embeddings, before a parametrisation."""

import math

import jax
import jax.numpy as jnp

from modules.facts import row_decorator
from modules.params import ParamSpec, as_matrices, from_matrices
from modules.scaling.parametrization import fan_sizes, writes_to_stream

SMALL = 0.02


def orthogonalize(spec: ParamSpec, unit: jax.Array) -> jax.Array:
    """Replaces hidden matrices by their orthogonal factors times sqrt(max(I, O)), unless frozen.

    The factors of matrices of normal entries are uniformly distributed, and the root mean square of
    entries stays 1.
    """
    if spec.role != 'hidden' or spec.frozen:
        return unit
    matrices = as_matrices(spec, unit)
    rows, columns = matrices.shape[-2:]
    tall = matrices if rows >= columns else jnp.swapaxes(matrices, -2, -1)
    q, r = jnp.linalg.qr(tall)
    # With a positive diagonal of R, Q is unique, and uniformly distributed.
    q = q * jnp.sign(jnp.diagonal(r, axis1=-2, axis2=-1))[..., None, :]
    factor = q if rows >= columns else jnp.swapaxes(q, -2, -1)
    return from_matrices(spec, math.sqrt(max(rows, columns)) * factor, unit.shape)


# arrange(spec, unit) -> entries of the same root mean square, from independent normal entries.
init_row = row_decorator(arrange=lambda spec, unit: unit)


@init_row()
def fan_in(spec: ParamSpec, shape: tuple[int, ...], blocks: int) -> float:
    """1 / sqrt(fan_in), and 1 / sqrt(D) for embeddings (as the baseline of arXiv:2309.14322)."""
    terms = shape[-1] if spec.role == 'embedding' else spec.fan_in_size(shape)
    return 1 / math.sqrt(terms)


def _fans(spec, shape):
    """Returns (fan_in, fan_out) of one matrix, with heads merged."""
    terms, outputs = fan_sizes(spec, shape)
    experts = math.prod(n for n, a in zip(shape, spec.axes, strict=True) if a == 'expert')
    return terms, outputs // experts


@init_row()
def xavier(spec: ParamSpec, shape: tuple[int, ...], blocks: int) -> float:
    """sqrt(2 / (fan_in + fan_out)) for hidden matrices: where DeepNet starts (arXiv:2203.00555).

    Heads are merged; embeddings and readout have the deviation of `fan_in`. Source: Glorot and
    Bengio (2010), equation 12, with a normal distribution.
    """
    if spec.role != 'hidden':
        return fan_in(spec, shape, blocks)
    return math.sqrt(2 / sum(_fans(spec, shape)))


@init_row()
def small(spec: ParamSpec, shape: tuple[int, ...], blocks: int) -> float:
    """0.02 for all, as in BERT (arXiv:1810.04805)."""
    return SMALL


@init_row()
def depth_scaled(spec: ParamSpec, shape: tuple[int, ...], blocks: int) -> float:
    """0.02, and 0.02 / sqrt(2 L) for matrices that write to the stream: GPT-2's and Megatron's.

    The last matrices of attention and of the MLP in each of the L blocks write to the stream
    (arXiv:1909.08053, section 3).
    """
    return SMALL / math.sqrt(2 * blocks) if writes_to_stream(spec) else SMALL


@init_row(arrange=orthogonalize)
def orthogonal(spec: ParamSpec, shape: tuple[int, ...], blocks: int) -> float:
    """Hidden matrices with all singular values 1 (arXiv:1312.6120).

    Their entries have the root mean square 1 / sqrt(max(fan_in, fan_out)); embeddings and readout
    have the deviation of `fan_in`.
    """
    if spec.role != 'hidden':
        return fan_in(spec, shape, blocks)
    return 1 / math.sqrt(max(_fans(spec, shape)))


INITS = {
    'fan_in': fan_in,
    'depth_scaled': depth_scaled,
    'orthogonal': orthogonal,
    'small': small,
    'xavier': xavier,
}
