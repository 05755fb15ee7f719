"""Optimizers that evaluate the loss: Sophia, Gauss-Newton, Sven, and CGE, which has no gradient."""

import math
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.flatten_util import ravel_pytree

from modules.choices import check_divides
from modules.optim.base import (
    B1,
    B2,
    PerParameter,
    above_0,
    compute_if,
    from_0,
    jvp_along,
    mask_like,
    optimizer_row,
    steps_between,
    up_to_1,
)
from modules.options import Option
from modules.spectrum import precise_einsum

# From the authors' code of Gauss-Newton: an offset of gamma, and the least gamma.
GAMMA_OFFSET, MIN_GAMMA = 1e-8, 1e-9
TOLERANCE = 1e-5  # of conjugate gradients: residual over gradient
MIN_SINGULAR_VALUE = 1e-10  # the absolute bound in the authors' code of Sven


@optimizer_row('adam', forward_mode='gradient', evaluates_loss=True)
def sophia(
    specs: Any,
    *,
    b1: B1 = 0.96,
    b2: B2 = 0.99,
    sophia_gamma: Annotated[
        float, from_0('factor of the curvature; larger values clip fewer coordinates')
    ] = 0.01,
    sophia_eps: Annotated[float, above_0('smallest denominator')] = 1e-12,
    sophia_every: Annotated[int, steps_between('steps between estimates of the curvature')] = 10,
) -> optax.GradientTransformationExtraArgs:
    """Sophia-H (arXiv:2305.14342): `u = clip(m / max(gamma h, epsilon), -1, 1)`.

    `m <- b1 m + (1 - b1) g`
    `h <- b2 h + (1 - b2) r * (H r)`

    ``gamma`` is `sophia_gamma`, and `epsilon` is `sophia_eps`. `h` is an estimate of the diagonal
    of the Hessian `H` of the loss, with `r` a normal vector; the product is elementwise. It is
    updated every `sophia_every` updates, from the first on, with the whole batch; the paper uses a
    part of the batch. A coordinate of negative curvature moves by exactly the learning rate.

    `H r` is the derivative of the gradient of `value_fn` along `r`, in forward mode, so
    `kernels.attention` must be reference or blocked. The authors' code has the other form,
    Sophia-G, with the squared gradient at sampled labels as curvature. Source: algorithm 3. Raises
    ValueError if the extra argument value_fn is missing, or has no such derivative.
    """

    def init(params):
        moments = {name: jax.tree.map(jnp.zeros_like, params) for name in ('momentum', 'curvature')}
        return PerParameter(jnp.int32(0), moments)

    def update(updates, state, params=None, *, value_fn=None, **_):
        if params is None or value_fn is None:
            raise ValueError(
                'sophia needs the curvature of the loss: pass `update` the parameters and '
                'value_fn(params), the loss of the batch'
            )
        count, h = state.count + 1, state.of['curvature']
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.of['momentum'], updates)

        def update_curvature():
            estimate = estimate_curvature(value_fn, params, random_like(params, count))
            return jax.tree.map(lambda h, e: b2 * h + (1 - b2) * e, h, estimate)

        h = compute_if((count - 1) % sophia_every == 0, update_curvature, h)
        directions = jax.tree.map(
            lambda m, h: jnp.clip(m / jnp.maximum(sophia_gamma * h, sophia_eps), -1, 1), m, h
        )
        return directions, PerParameter(count, {'momentum': m, 'curvature': h})

    return optax.GradientTransformationExtraArgs(init, update)


def estimate_curvature(value_fn: Callable[[Any], jax.Array], params: Any, u: Any) -> Any:
    """Returns u * (H u). Its mean over u is the Hessian's diagonal (Hutchinson's estimate).

    Args:
      value_fn: maps the parameters to the loss.
      params: the parameters.
      u: random numbers like them.
    """
    supported = 'reference or blocked'
    _, slope = jvp_along(jax.grad(value_fn), params, u, 'gradient of this loss', supported)
    return jax.tree.map(jnp.multiply, u, slope)


def random_like(params: Any, count: jax.Array) -> Any:
    """Draws standard normal numbers, new for each update `count` and each parameter."""
    leaves, tree = jax.tree.flatten(params)
    key = jax.random.fold_in(jax.random.key(0), count)
    keys = (jax.random.fold_in(key, i) for i in range(len(leaves)))
    samples = [jax.random.normal(k, w.shape, w.dtype) for k, w in zip(keys, leaves, strict=True)]
    return tree.unflatten(samples)


class GaussNewtonState(NamedTuple):
    """State of `gauss_newton`."""

    gamma: jax.Array  # after the last trial


@optimizer_row('adam', forward_mode='logits', convex_loss=True, evaluates_loss=True)
def gauss_newton(
    specs: Any,
    *,
    gauss_newton_gamma: Annotated[float, above_0('initial gamma')] = 1.0,
    gauss_newton_tries: Annotated[
        int, Option('maximum number of solutions tried per update', 1)
    ] = 8,
    gauss_newton_products: Annotated[
        int, Option('maximum number of matrix products per solution', 1)
    ] = 50,
) -> optax.GradientTransformationExtraArgs:
    """Damped Gauss-Newton (arXiv:2506.13710): `u = (J^T H J + (|g| / gamma) I)^-1 g`.

    `J` is the Jacobian of the logits, `H` the Hessian of the loss in the logits, and `g` the
    gradient before clipping. A learning rate of 1 gives the published step, `w <- w - u`. The step
    is accepted if, on the same batch,

    `L(w) - L(w - u) >= |g(w - u)|^2 gamma / (8 |g|)`

    Then ``gamma`` is doubled; otherwise it is halved and the step tried again. The last of
    `gauss_newton_tries` steps is taken without the test, as in the authors' code, which has 40.

    They solve by Cholesky's factors. This uses conjugate gradients, with one forward-mode and one
    backward pass per product, so `kernels.attention` must be reference. It is meant for
    cross_entropy: `H` is exact, also with z-loss and label smoothing. Terms that layers add to the
    loss are only in `g`. If it is used for some roles, its evaluations keep the other parameters
    fixed. Source: algorithm 1, and https://github.com/epfml/grad-norm-smooth. Raises ValueError if
    an extra argument is missing.
    """

    def init(params):
        return GaussNewtonState(jnp.float32(gauss_newton_gamma))

    def update(updates, state, params=None, **extra):
        if missing := sorted({'value', 'grad', 'value_fn', 'rows', 'logits_fn'} - extra.keys()):
            raise ValueError(
                f'gauss_newton needs the loss and the logits: pass `update` {", ".join(missing)}'
            )
        gradient = mask_like(extra['grad'], params)
        grad_norm = optax.tree.norm(gradient)

        def attempt(carry):
            gamma, _, tries, _ = carry
            damping = grad_norm / (gamma + GAMMA_OFFSET)

            def product(v):
                return optax.tree.add_scale(gauss_newton_product(params, v, extra), damping, v)

            delta, _ = jax.scipy.sparse.linalg.cg(
                product, gradient, tol=TOLERANCE, maxiter=gauss_newton_products
            )
            candidate = optax.tree.sub(params, delta)
            value, slope = jax.value_and_grad(extra['value_fn'])(candidate)
            gain = 8 * damping * (extra['value'] - value)
            accepted = gain >= optax.tree.norm(slope, squared=True)
            gamma = jnp.where(accepted, jnp.maximum(2 * gamma, MIN_GAMMA), gamma / 2)
            return gamma, delta, tries + 1, accepted

        def is_rejected(carry):
            *_, tries, accepted = carry
            return (tries < gauss_newton_tries) & ~accepted

        start = (state.gamma, jax.tree.map(jnp.zeros_like, params), 0, jnp.bool(False))
        gamma, delta, *_ = jax.lax.while_loop(is_rejected, attempt, start)
        return delta, GaussNewtonState(gamma)

    return optax.GradientTransformationExtraArgs(init, update)


def gauss_newton_product(params: Any, v: Any, batch: dict[str, Any]) -> Any:
    """Returns J^T H J v, summed over microbatches.

    Args:
      params: the parameters.
      v: a tree like them.
      batch: the extra arguments of `update`.
    """

    def add(total, rows):
        def logits_fn(params):
            return batch['logits_fn'](params, rows)

        def logit_gradient(logits):
            return jax.grad(batch['share_from_logits'])(logits, rows)

        logits, logits_tangent = jvp_along(logits_fn, params, v)
        _, gradient_tangent = jax.jvp(logit_gradient, (logits,), (logits_tangent,))
        (product,) = jax.vjp(logits_fn, params)[1](gradient_tangent)
        return optax.tree.add(total, product), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, v), batch['rows'])[0]


def check_group_size(recipe: Any, part: Any) -> None:
    """Raises ValueError if sequences do not make groups of one size."""
    group = part.options['sven_group']
    check_divides('optim.sven_group', group, 'data.batch_size', recipe.data.batch_size)


@optimizer_row('adam', max_parameters=5_000_000, evaluates_loss=True, check=check_group_size)
def sven(
    specs: Any,
    *,
    sven_kappa: Annotated[
        float,
        Option('kappa: a residual is the loss to the power kappa / 2', 0.01, 100, traced=True),
    ] = 2.0,
    sven_rtol: Annotated[
        float, up_to_1('smallest singular value kept, relative to the largest')
    ] = 1e-3,
    sven_k: Annotated[int, Option('maximum number of singular values kept; 0: all', 0)] = 0,
    sven_group: Annotated[int, Option('sequences that share a residual', 1)] = 1,
) -> optax.GradientTransformationExtraArgs:
    """Sven (arXiv:2604.01279), the least change of the parameters that takes residuals to 0:
    `u = J^+ r`.

    This holds to first order: `r` are the residuals of the batch, `J` [B, P] is their Jacobian, and
    `J^+` its pseudo-inverse. At a learning rate of 1 it is the whole step; the authors use 0.1.
    There is one residual for each sequence, or for each `sven_group` sequences in the order of the
    batch:

    `r = l^(kappa / 2)`

    `kappa` is `sven_kappa`. `l` is the summed objective of the group over the mean number of target
    tokens per group, so that the mean of `l` is the objective.

    `J^+ r = J^T K^+ r` is computed from the eigenvectors of `K = J J^T` [B, B]. Its eigenvalues are
    squared singular values: in float32, eigenvalues below about a thousandth of the largest are
    rounding errors. At most `sven_k` singular values are kept, those above `sven_rtol` times the
    largest. Layers that look at a batch see each sequence as a microbatch. `J` takes B times the
    memory of the parameters.

    Source: the paper and https://github.com/sambt/sven, without its RMSProp and its growing k.
    Raises ValueError if the extra arguments `rows` and `share_fn` are missing.
    """

    def update(updates, state, params=None, *, rows=None, share_fn=None, **_):
        if params is None or share_fn is None:
            raise ValueError(
                'sven needs the loss of each sequence: pass `update` the parameters, rows [n, b, '
                '...], and share_fn(params, rows), their share of the loss'
            )
        values_B, jacobian = sequence_jacobian(share_fn, params, rows)
        values_G, jacobian = average_groups((values_B, jacobian), sven_group)
        sizes_G = jnp.abs(values_G)
        residuals_G = jnp.sign(values_G) * sizes_G ** (sven_kappa / 2)
        slopes_G = sven_kappa / 2 * sizes_G ** (sven_kappa / 2 - 1)
        slopes_G = jnp.where(sizes_G > 0, slopes_G, 0.0)  # all tokens may be padding
        jacobian = jax.tree.map(lambda j: _weight_rows(slopes_G, j), jacobian)
        return pseudo_inverse(jacobian, residuals_G, sven_k, sven_rtol), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def sequence_jacobian(share_fn: Callable[..., jax.Array], params: Any, rows: Any) -> Any:
    """Returns (the value of each sequence [B], its gradient [B, ...]), in the batch's order.

    Microbatch i of n holds the rows i, i + n, ... of the batch. The mean of the values is the
    batch's.

    Args:
      share_fn: (params, rows) -> their share of the loss.
      params: the parameters.
      rows: the batch in its microbatches, [n, b, ...].
    """
    n, b = jax.tree.leaves(rows)[0].shape[:2]

    def value_and_gradient(sequence):
        row = jax.tree.map(lambda tokens_T: tokens_T[None], sequence)
        value, grads = jax.value_and_grad(share_fn)(params, row)
        return jax.tree.map(lambda leaf: n * b * leaf, (value, grads))

    jacobian = jax.lax.map(jax.vmap(value_and_gradient), rows)
    return jax.tree.map(
        lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(n * b, *leaf.shape[2:]), jacobian
    )


def average_groups(tree: Any, size: int) -> Any:
    """Returns means of `size` consecutive entries: [B, ...] -> [B / size, ...]."""
    if size == 1:
        return tree
    return jax.tree.map(lambda x: jnp.mean(x.reshape(-1, size, *x.shape[1:]), 1), tree)


def pseudo_inverse(jacobian: Any, residuals_G: jax.Array, k: int, rtol: Any) -> Any:
    """Returns J^T K^+ r, a tree like the parameters.

    Args:
      jacobian: J, with leaves [G, ...].
      residuals_G: r.
      k: the number of singular values that are kept at most; 0: all.
      rtol: the least kept singular value, over the largest.
    """
    groups = residuals_G.shape[0]
    flat = [leaf.reshape(groups, -1) for leaf in jax.tree.leaves(jacobian)]
    gram_GG = sum(precise_einsum('gp,hp->gh', j, j) for j in flat)
    squares_G, vectors_GG = jnp.linalg.eigh(gram_GG)  # ascending
    singular_G = jnp.sqrt(jnp.maximum(squares_G, 0.0))
    is_kept_G = (singular_G > rtol * singular_G[-1]) & (singular_G > MIN_SINGULAR_VALUE)
    if k:
        is_kept_G = is_kept_G & (jnp.arange(groups) >= groups - k)
    inverse_G = jnp.where(is_kept_G, 1 / jnp.where(is_kept_G, squares_G, 1.0), 0.0)
    weights_G = vectors_GG @ (inverse_G * (vectors_GG.T @ residuals_G))
    return jax.tree.map(lambda leaf: jnp.sum(_weight_rows(weights_G, leaf), 0), jacobian)


def _weight_rows(weights_G: jax.Array, leaf: jax.Array) -> jax.Array:
    return weights_G.reshape(-1, *(1,) * (leaf.ndim - 1)) * leaf


class CGEState(NamedTuple):
    """State of `cge`."""

    count: jax.Array  # updates done


@optimizer_row('sgd', max_parameters=100_000, gradient=False, evaluates_loss=True)
def cge(
    specs: Any,
    *,
    cge_step: Annotated[
        float, Option('size of the finite-difference step', 1e-7, 1, traced=True)
    ] = 5e-3,
    cge_coordinates: Annotated[
        int, Option('coordinates estimated per update, drawn at random; 0: all', 0)
    ] = 0,
    cge_at_a_time: Annotated[int, Option('coordinates estimated in parallel', 1)] = 16,
) -> optax.GradientTransformationExtraArgs:
    """Coordinate-wise gradient estimate (arXiv:2310.02025): `u_i = (L(w + mu e_i) - L(w)) / mu`.

    `L` is the loss of the batch, `e_i` the unit vector of coordinate `i`, and `mu` is `cge_step`.
    This takes a forward pass per coordinate, and one more, of the same batch. With
    `cge_coordinates`, each update draws other coordinates, and `u` is 0 for the rest. The gradient
    is not read, so that XLA removes its computation, and clipping it has no effect.

    In float32, differences of the loss have an error of about 1e-7 of the loss, divided by `mu`;
    keep `model.dtype=float32`. If no step is given, the authors move by the learning rate itself;
    the default is from their pruning, which is omitted here. Source: the paper and
    https://github.com/OPTML-Group/DeepZero. Raises ValueError if the extra argument value_fn is
    missing.
    """

    def update(updates, state, params=None, *, value_fn=None, **_):
        if params is None or value_fn is None:
            raise ValueError(
                'cge needs losses of changed parameters: pass `update` the parameters and '
                'value_fn(params), the loss of the batch'
            )
        key = jax.random.fold_in(jax.random.key(0), state.count)
        flat_P, unravel = ravel_pytree(params)
        size, indices = flat_P.size, jnp.arange(flat_P.size)
        if 0 < cge_coordinates < size:
            indices = jax.random.choice(key, size, (cge_coordinates,), replace=False)
        n = indices.size
        count = cge_at_a_time * math.ceil((n + 1) / cge_at_a_time)
        # Index `size` moves nothing. Its loss is computed among the others, for the same rounding.
        moved_indices = jnp.concatenate([indices, jnp.full(count - n, size)])

        def value(i):
            return value_fn(unravel(flat_P.at[i].add(cge_step, mode='drop')))

        values = jax.lax.map(value, moved_indices, batch_size=cge_at_a_time)
        slopes = (values[:n] - values[n]) / cge_step
        estimate = unravel(jnp.zeros_like(flat_P).at[indices].set(slopes.astype(flat_P.dtype)))
        return estimate, CGEState(state.count + 1)

    return optax.GradientTransformationExtraArgs(lambda params: CGEState(jnp.int32(0)), update)
