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
    """Deviation by fan_in (arXiv:2309.14322): `s = 1 / sqrt(fan_in)`.

    Embeddings have `s = 1 / sqrt(D)`. This is the baseline of the paper.
    """
    terms = shape[-1] if spec.role == 'embedding' else spec.fan_in_size(shape)
    return 1 / math.sqrt(terms)


def _fans(spec, shape):
    """Returns (fan_in, fan_out) of one matrix, with heads merged."""
    terms, outputs = fan_sizes(spec, shape)
    experts = math.prod(n for n, a in zip(shape, spec.axes, strict=True) if a == 'expert')
    return terms, outputs // experts


@init_row()
def xavier(spec: ParamSpec, shape: tuple[int, ...], blocks: int) -> float:
    """Xavier, where DeepNet starts (arXiv:2203.00555): `s = sqrt(2 / (fan_in + fan_out))`.

    This applies to hidden matrices, with heads merged; embeddings and readout have the deviation of
    `fan_in`. Source: Glorot and Bengio (2010), equation 12, with a normal distribution.
    """
    if spec.role != 'hidden':
        return fan_in(spec, shape, blocks)
    return math.sqrt(2 / sum(_fans(spec, shape)))


@init_row()
def small(spec: ParamSpec, shape: tuple[int, ...], blocks: int) -> float:
    """The same deviation for all, as in BERT (arXiv:1810.04805): `s = 0.02`."""
    return SMALL


@init_row()
def depth_scaled(spec: ParamSpec, shape: tuple[int, ...], blocks: int) -> float:
    """GPT-2 and Megatron (arXiv:1909.08053): `s = 0.02`, and less for matrices that write to the
    stream.

    The last matrices of attention and of the MLP in each of the `L` blocks write to the stream:

    `s = 0.02 / sqrt(2 L)`

    Source: section 3.
    """
    return SMALL / math.sqrt(2 * blocks) if writes_to_stream(spec) else SMALL


@init_row(arrange=orthogonalize)
def orthogonal(spec: ParamSpec, shape: tuple[int, ...], blocks: int) -> float:
    """Orthogonal hidden matrices (arXiv:1312.6120): all singular values are 1.

    The root mean square of their entries is `1 / sqrt(max(fan_in, fan_out))`. Embeddings and
    readout have the deviation of `fan_in`.
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
