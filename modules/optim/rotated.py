"""Optimizers that rotate gradients: ARO, Conda, Shampoo, SOAP and SOAP-Muon."""

import functools
import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.base import (
    ABOVE_0,
    B1,
    B2,
    Eps,
    Momentum,
    ParamState,
    compute_if,
    divide_or_zero,
    from_0,
    optimizer_row,
    per_parameter,
    steps_between,
)
from modules.optim.matrices import (
    SIDES,
    boxed_identity,
    float_matrices,
    from_whole_matrices,
    gram,
    identity,
    lay_out_whole,
    rotate,
    rotate_back,
    smaller_side,
    update_whole_matrices,
    whole_matrices,
)
from modules.optim.muon import (
    SCALES,
    MuonPolynomial,
    MuonScale,
    MuonSteps,
    check_polynomial,
    newton_schulz,
)
from modules.options import Option
from modules.params import as_matrices, from_matrices, matrix_axes
from modules.spectrum import precise_einsum
from modules.statistics import at_least_float32

STREAM = 'embed'  # the axis of the residual stream
SHIFT = 1e-7  # of the Gram matrix, in the square of the Frobenius norm
MIN_NORM = 1e-8
MIN_EIGENVALUE = 1e-32  # where all gradients were zero


@optimizer_row('adam', roles=('hidden',))
def aro(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    aro_map: Annotated[
        str,
        Option(
            'map of the rotated momentum: Sinkhorn, row normalization, or sign',
            choices=('sink', 'row', 'sign'),
        ),
    ] = 'sink',
    aro_steps: Annotated[int, Option('number of Sinkhorn iterations', 1, 100)] = 5,
    aro_scale: Annotated[
        float, from_0('root mean square of an update before the learning rate')
    ] = 0.2,
) -> optax.GradientTransformation:
    """ARO, rotated momentum (arXiv:2602.09006): `u = c R f(R^T m) with R = QR(m f(R_old^T m)^T)`.

    `m <- mu m + (1 - mu) g`

    `QR` returns the orthogonal factor, and `R_old` is the previous rotation, the identity at first.
    `mu` is `momentum`, and `c` is `aro_scale`. `R` rotates the rows of `m`: the residual stream, or
    in matrices without a stream the summed side. The map `f` (`aro_map`) gives entries of mean
    square 1:

    - `sink` normalizes rows, then columns, several times (arXiv:2502.06742).
    - `row` normalizes rows once. With a constant gradient, `R f(R^T m)` then converges to the
      orthogonal factor of `m`.
    - `sign` normalizes each entry.

    The QR decomposition follows the authors' code (github.com/microsoft/dion, dion/aro.py at
    d5a31dd3): Cholesky's of a Gram matrix shifted by 1e-7, or Householder's if that fails. Their
    code rotates the output side and multiplies by `0.2 sqrt(max(I, O))`, as for orthogonal updates;
    ours uses the paper's side and its root mean square, 0.2.
    """
    f = {
        'sink': functools.partial(_sinkhorn, steps=aro_steps),
        'row': _normalize_rows,
        'sign': jnp.sign,
    }[aro_map]

    def init(spec, weight):
        matrices = _orient_stream(spec, float_matrices(spec, weight))
        rotation = boxed_identity(spec, matrices, 'left')
        return {'momentum': jnp.zeros_like(weight), 'rotation': rotation}

    def update(spec, grad, state, weight, count):
        momentum_buffer = momentum * state['momentum'] + (1 - momentum) * grad
        m = _orient_stream(spec, float_matrices(spec, momentum_buffer))
        aligned = precise_einsum('...io,...jo->...ij', m, f(rotate(m, {'left': state['rotation']})))
        rotation = {'left': _orthogonalize(aligned)}
        direction = aro_scale * rotate_back(f(rotate(m, rotation)), rotation)
        direction = from_matrices(spec, _orient_stream(spec, direction), grad.shape)
        return direction, {'momentum': momentum_buffer, 'rotation': rotation['left']}

    return per_parameter(specs, init, update)


def _orient_stream(spec, matrices):
    """Transposes matrices that write to the residual stream; inverts itself."""
    _, rows, columns = matrix_axes(spec)
    in_rows, in_columns = (any(spec.axes[i] == STREAM for i in axes) for axes in (rows, columns))
    return jnp.swapaxes(matrices, -2, -1) if in_columns and not in_rows else matrices


def _normalize_rows(matrices):
    norms = jnp.linalg.norm(matrices, axis=-1, keepdims=True)
    return math.sqrt(matrices.shape[-1]) * matrices / jnp.maximum(norms, MIN_NORM)


def _sinkhorn(matrices, steps):
    def normalize_both(matrices, _):
        row_normalized = _normalize_rows(matrices)
        return jnp.swapaxes(_normalize_rows(jnp.swapaxes(row_normalized, -2, -1)), -2, -1), None

    return jax.lax.scan(normalize_both, matrices, None, length=steps)[0]


def _orthogonalize(square):
    """Returns Q of the QR decomposition of [..., n, n], with the diagonal of R positive."""
    size = jnp.sum(jnp.square(square), (-2, -1), keepdims=True)
    shifted = gram(square, 'right') + SHIFT * size * identity(square, 'right')
    lower = jnp.linalg.cholesky(shifted)
    q = jax.lax.linalg.triangular_solve(lower, square, lower=True, transpose_a=True)
    failed = ~jnp.all(jnp.isfinite(q), (-2, -1), keepdims=True)
    return compute_if(jnp.any(failed), lambda: jnp.where(failed, jnp.linalg.qr(square)[0], q), q)


@optimizer_row('adam', roles=('hidden',))
def conda(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.99,
    eps: Eps = 1e-8,
    conda_every: Annotated[
        int, steps_between('steps between singular value decompositions')
    ] = 2000,
    conda_scale: Annotated[float, from_0('factor of the update')] = 0.25,
) -> optax.GradientTransformation:
    """Conda (arXiv:2509.24218): Adam in the singular vectors of the momentum.

    `u = c (sqrt(1 - b2^t) / (1 - b1^t)) Q (Q^T m / (sqrt(v) + eps))`
    `m <- b1 m + (1 - b1) G`
    `v <- b2 v + (1 - b2) (Q^T G)^2`

    `Q` are the singular vectors of the smaller side of `m`, recomputed every `conda_every` updates
    from the first on, and `c` is `conda_scale`. As in the authors' code, eps is outside the bias
    correction. `v` does not change with `Q`. The signs of `Q` change no direction. The defaults
    come from the authors' scripts (github.com/jie040109/Conda); their class has b2 0.999, every
    2000 and scale 1.
    """

    def init(spec, weight):
        matrices = float_matrices(spec, weight)
        zeros = jnp.zeros_like(weight)
        basis = boxed_identity(spec, matrices, smaller_side(matrices))
        return {'momentum': zeros, 'second': zeros, 'basis': basis}

    def update(spec, grad, state, weight, count):
        m = b1 * state['momentum'] + (1 - b1) * grad
        matrices = float_matrices(spec, m)
        side = smaller_side(matrices)

        def singular_vectors():
            # Of the smaller side: the larger one has more vectors than singular values.
            left_vectors, _, right_vectors = jnp.linalg.svd(matrices, full_matrices=False)
            return left_vectors if side == 'left' else jnp.swapaxes(right_vectors, -2, -1)

        bases = {side: compute_if((count - 1) % conda_every == 0, singular_vectors, state['basis'])}
        rotated = rotate(float_matrices(spec, grad), bases)
        second = b2 * as_matrices(spec, state['second']) + (1 - b2) * jnp.square(rotated)
        adam = rotate(matrices, bases) / (jnp.sqrt(second) + eps)
        factor = conda_scale * jnp.sqrt(1 - b2**count) / (1 - b1**count)
        direction = factor * rotate_back(adam, bases)
        second = from_matrices(spec, second, grad.shape)
        new_state = {'momentum': m, 'second': second, 'basis': bases[side]}
        return from_matrices(spec, direction, grad.shape), new_state

    return per_parameter(specs, init, update)


@optimizer_row('adam', roles=('hidden',), other_sizes={'shampoo_graft': False})
def shampoo(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-8,
    shampoo_every: Annotated[int, steps_between('steps between updates of the matrix roots')] = 1,
    shampoo_eps: Annotated[
        float,
        Option('added to all eigenvalues, as a share of the largest', ABOVE_0, 1, traced=True),
    ] = 1e-6,
    shampoo_graft: Annotated[bool, Option("whether to give each update the norm of Adam's")] = True,
) -> optax.GradientTransformation:
    """Shampoo (arXiv:1802.09568): `u = L^(-1/4) m R^(-1/4)`, scaled to the norm of Adam's
    direction.

    `m <- b1 m + (1 - b1) G`
    `L <- b2 L + (1 - b2) G G^T`
    `R <- b2 R + (1 - b2) G^T G`

    All three are corrected for their start, as in github.com/facebookresearch/optimizers; `b1`,
    `b2` and `eps` are its values for a run that had AdamW. The paper (algorithm 1) sums `G G^T` and
    uses `G` itself. The share `shampoo_eps` of the largest eigenvalue is added to all eigenvalues
    (arXiv:2002.09018 and its code). With a share below the rounding of float32, such as 1e-12
    there, directions without any gradient would become the longest.

    Roots are computed every `shampoo_every` updates. Before the first roots, the direction is
    Adam's, or `m` without grafting. Grafting (`shampoo_graft`, arXiv:2002.11803) gives each matrix
    the Frobenius norm of Adam's direction; without it, the direction is as large as an orthogonal
    matrix.
    """

    def init(spec, weight):
        matrices = float_matrices(spec, weight)
        zeros = jnp.zeros_like(weight)
        state: ParamState = {'momentum': zeros} | ({'second': zeros} if shampoo_graft else {})
        for side in SIDES:
            state[f'{side}_products'] = boxed_identity(spec, matrices, side, 0.0)
            state[f'{side}_root'] = boxed_identity(spec, matrices, side)
        return lay_out_whole(spec, state)

    def update(spec, grad, state, weight, count):
        compute = functools.partial(_update_shampoo, period=shampoo_every)
        return update_whole_matrices(spec, compute, grad, state, (count, b1, b2, eps, shampoo_eps))

    return per_parameter(specs, init, update)


def _update_shampoo(inputs, count, b1, b2, eps, root_eps, period):
    """Computes an update of matrices [..., I, O]; grafts if a second moment is stored."""
    grads, state = inputs
    g = at_least_float32(grads)
    momentum = b1 * state['momentum'] + (1 - b1) * grads
    m = momentum * (1 / (1 - b1**count))
    correction = 1 / (1 - b2**count)
    products = {side: b2 * state[f'{side}_products'] + (1 - b2) * gram(g, side) for side in SIDES}
    roots = compute_if(
        count % period == 0,
        lambda: {
            side: _inverse_fourth_root(p * correction, root_eps) for side, p in products.items()
        },
        {side: state[f'{side}_root'] for side in SIDES},
    )
    directions = rotate(m, roots)  # the roots are symmetric
    new_state = {'momentum': momentum}
    for side in SIDES:
        new_state |= {f'{side}_products': products[side], f'{side}_root': roots[side]}
    if 'second' in state:
        second = b2 * state['second'] + (1 - b2) * jnp.square(grads)
        adam = m / (jnp.sqrt(second * correction) + eps)
        directions = jnp.where(count < period, adam, _graft_norms(adam, directions))
        new_state['second'] = second
    return directions, new_state


def _inverse_fourth_root(square, eps):
    """Returns (P + eps |P| I)^(-1/4) of P [..., n, n]; eigenvalues below 0 count as 0."""
    values, vectors = jnp.linalg.eigh(square)
    values = jnp.maximum(values, 0.0) + eps * values[..., -1:]
    values = jnp.maximum(values, MIN_EIGENVALUE)
    scaled = vectors / jnp.sqrt(jnp.sqrt(values))[..., None, :]
    return precise_einsum('...ik,...jk->...ij', scaled, vectors)


def _graft_norms(references, matrices):
    """Scales each matrix to the Frobenius norm of its reference."""
    norm, target = (
        jnp.linalg.norm(x, axis=(-2, -1), keepdims=True) for x in (matrices, references)
    )
    return matrices * divide_or_zero(target, norm)


SoapEvery = Annotated[int, steps_between('steps between updates of the bases')]
SoapMaxDim = Annotated[int, Option('longest side that is rotated', 0)]
SoapSides = Annotated[
    str,
    Option('rotate both sides of a matrix, or only the smaller', choices=('both', 'smaller')),
]


@optimizer_row('adam', roles=('hidden',))
def soap(
    specs: Any,
    *,
    b1: B1 = 0.95,
    b2: B2 = 0.95,
    eps: Eps = 1e-8,
    soap_every: SoapEvery = 10,
    soap_max_dim: SoapMaxDim = 10000,
    soap_sides: SoapSides = 'both',
) -> optax.GradientTransformation:
    """SOAP (arXiv:2409.11321): Adam in the eigenvectors of Shampoo's two matrices.

    `u = (sqrt(1 - b2^t) / (1 - b1^t)) Q_L (Q_L^T m Q_R / (sqrt(v) + eps)) Q_R^T`
    `m <- b1 m + (1 - b1) G`
    `v <- b2 v + (1 - b2) (Q_L^T G Q_R)^2`
    `L <- b2 L + (1 - b2) G G^T`
    `R <- b2 R + (1 - b2) G^T G`

    `Q_L` and `Q_R` are the eigenvectors of `L` and `R`, computed from the first gradient, then
    refreshed every `soap_every` updates by one power iteration and a QR decomposition.
    `soap_sides=smaller` is the one-sided version of the paper's section 7. A side above
    `soap_max_dim` is not rotated.

    As in the authors' code (github.com/nikhilvyas/SOAP), an update uses the bases from before its
    gradient. The first update is therefore zero and only computes them, `t` counts from the second,
    and `v` is sorted by eigenvalues before a refresh. Their first step omits weight decay too; here
    the optimizer does not apply weight decay.

    The signs of the vectors change no direction, since `v` has squares and `m` is rotated back. For
    equal eigenvalues, among them 0 for a gradient of low rank, the vectors are any basis of their
    space, from LAPACK or cuSOLVER, and the direction depends on it. Source: algorithm 3.
    """

    def init(spec, weight):
        matrices = float_matrices(spec, weight)
        zeros = jnp.zeros_like(weight)
        state: ParamState = {'momentum': zeros, 'second': zeros}
        for side in SIDES if soap_sides == 'both' else (smaller_side(matrices),):
            if matrices.shape[SIDES[side]] <= soap_max_dim:
                state[f'{side}_products'] = boxed_identity(spec, matrices, side, 0.0)
                state[f'{side}_basis'] = boxed_identity(spec, matrices, side)
        return lay_out_whole(spec, state)

    def update(spec, grad, state, weight, count):
        compute = functools.partial(_update_soap, period=soap_every)
        return update_whole_matrices(spec, compute, grad, state, (count, b1, b2, eps))

    return per_parameter(specs, init, update)


def _update_soap(inputs, count, b1, b2, eps, period):
    """Computes an update of matrices [..., I, O]."""
    grads, state = inputs
    g = at_least_float32(grads)
    bases = {side: state[f'{side}_basis'] for side in SIDES if f'{side}_basis' in state}
    products = {side: b2 * state[f'{side}_products'] + (1 - b2) * gram(g, side) for side in bases}
    # The first gradient is only for the bases; 0 times a meaningless correction is 0.
    t = jnp.maximum(count - 1, 1)
    is_used = jnp.where(count == 1, 0.0, 1.0)
    m = is_used * (b1 * state['momentum'] + (1 - b1) * grads)
    second = is_used * (b2 * state['second'] + (1 - b2) * jnp.square(rotate(g, bases)))
    adam = rotate(m, bases) / (jnp.sqrt(second) + eps)
    factor = jnp.sqrt(1 - b2**t) / (1 - b1**t)
    directions = factor * rotate_back(adam, bases)
    second, bases = _refresh_bases(count, period, second, products, bases)
    new_state = {'momentum': m, 'second': second}
    for side in bases:
        new_state |= {f'{side}_products': products[side], f'{side}_basis': bases[side]}
    return directions, new_state


def _refresh_bases(count, period, second, products, bases):
    """Returns (second, bases) after update `count`."""

    def decompose():
        # Largest eigenvalue first.
        new_bases = {s: jnp.flip(jnp.linalg.eigh(p)[1], axis=-1) for s, p in products.items()}
        return second, new_bases

    def iterate():
        ordered, new_bases = second, {}
        for side, square in products.items():
            basis = bases[side]
            values = jnp.sum(basis * precise_einsum('...ij,...jk->...ik', square, basis), axis=-2)
            order = jnp.argsort(-values, axis=-1)
            by_column = order[..., None, :]
            basis = jnp.take_along_axis(basis, by_column, axis=-1)
            permutation = order[..., :, None] if side == 'left' else by_column
            ordered = jnp.take_along_axis(ordered, permutation, axis=SIDES[side])
            new_bases[side], _ = jnp.linalg.qr(precise_einsum('...ij,...jk->...ik', square, basis))
        return ordered, new_bases

    due = (count > 1) & ((count - 1) % period == 0)
    refreshed = compute_if(due, iterate, (second, bases))
    return compute_if(count == 1, decompose, refreshed)


@optimizer_row(
    'spectral', roles=('hidden',), other_sizes={'muon_scale': 'rms'}, check=check_polynomial
)
def soap_muon(
    specs: Any,
    *,
    b1: B1 = 0.95,
    b2: B2 = 0.9,
    eps: Eps = 1e-8,
    soap_every: SoapEvery = 1,
    soap_max_dim: SoapMaxDim = 10000,
    soap_sides: SoapSides = 'both',
    muon_steps: MuonSteps = 5,
    muon_polynomial: MuonPolynomial = 'quintic',
    muon_scale: MuonScale = 'original',
) -> optax.GradientTransformation:
    """SOAP-Muon: `u = s NS(d)` of the direction `d` of SOAP.

    `NS` and `s` are those of `muon`, which brings the singular values of `d` near 1. The options of
    `soap` and `muon` keep their meaning; `eps` is that of both. As in SOAP, the first update is
    zero.

    Source: the code of https://github.com/KellerJordan/modded-nanogpt, track 3, whose best entries
    have it as a part; `b2` and the refresh at each step are theirs. There the second moment is that
    of the rotated momentum, and the momentum is Nesterov's; here both are SOAP's. They also give
    `d` the norm of the momentum, which `NS` does not see.
    """
    rotated = soap(
        specs,
        b1=b1,
        b2=b2,
        eps=eps,
        soap_every=soap_every,
        soap_max_dim=soap_max_dim,
        soap_sides=soap_sides,
    )

    def orthogonalize(spec, direction):
        matrices = whole_matrices(spec, direction)
        x = newton_schulz(matrices, muon_steps, eps, muon_polynomial)
        return from_whole_matrices(spec, SCALES[muon_scale](*x.shape[-2:]) * x, direction)

    def update(updates, state, params=None, **batch):
        directions, state = rotated.update(updates, state, params, **batch)
        return jax.tree.map(orthogonalize, specs, directions), state

    return optax.GradientTransformationExtraArgs(rotated.init, update)
