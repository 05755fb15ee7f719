"""Gauss-Newton steps, damped by the norm of the gradient."""

import sys
from typing import Annotated, Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from modules.optim.adamw import ABOVE_0
from modules.optim.base import along, of_family, restricted
from modules.options import Option

BESIDE_GAMMA, LEAST_GAMMA = 1e-8, 1e-9  # as in the authors' code
TOLERANCE = 1e-5  # of conjugate gradients, whose residual is then so small beside the gradient


class GaussNewtonState(NamedTuple):
    """gamma: of the last step that was tried."""

    gamma: jax.Array


@of_family('adam', forward_mode='logits', convex_loss=True, own_loss=True)
def gauss_newton(
    specs: Any,
    *,
    gauss_newton_gamma: Annotated[
        float, Option('gamma at the start', ABOVE_0, sys.float_info.max, traced=True)
    ] = 1.0,
    gauss_newton_tries: Annotated[int, Option('solutions tried at most in an update', 1)] = 8,
    gauss_newton_products: Annotated[
        int, Option('products with the matrix at most in a solution', 1)
    ] = 50,
) -> optax.GradientTransformationExtraArgs:
    """(G + (|g| / gamma) I)^-1 g, with G = J^T H J the generalised Gauss-Newton matrix.

    J is the Jacobian of the logits, H the Hessian of the loss in them, g the gradient before
    clipping. With a learning rate of 1 it is the published step x - d. That is accepted where

        f(x) - f(x - d) >= |g(x - d)|^2 / (8 |g| / gamma)

    on the same batch, and gamma is doubled; otherwise it is halved and the step tried again. The
    last of `gauss_newton_tries` is taken as it is, as in the authors' code, which has 40. They
    solve by Cholesky's factors; here it is conjugate gradients, with one forward-mode and one
    backward pass a product: kernels.attention must be reference. For cross_entropy, whose H is
    exact, z-loss and label smoothing too; what layers add to the loss is in g alone. Of some roles,
    the others stand still while it looks. Source: arXiv:2506.13710, algorithm 1, and
    https://github.com/epfml/grad-norm-smooth. ValueError where what it asks for is missing.
    """
    del specs

    def init(params):
        del params
        return GaussNewtonState(jnp.float32(gauss_newton_gamma))

    def update(grads, state, params=None, **more):
        del grads
        if missing := sorted({'value', 'grad', 'value_fn', 'rows', 'logits_fn'} - more.keys()):
            raise ValueError(
                f'gauss_newton looks at the loss and the logits; give `update` {", ".join(missing)}'
            )
        gradient = restricted(more['grad'], params)
        size = optax.tree.norm(gradient)

        def attempt(carry):
            gamma, _, tries, _ = carry
            damping = size / (gamma + BESIDE_GAMMA)

            def product(v):
                return optax.tree.add_scale(gauss_newton_product(params, v, more), damping, v)

            delta, _ = jax.scipy.sparse.linalg.cg(
                product, gradient, tol=TOLERANCE, maxiter=gauss_newton_products
            )
            beyond = optax.tree.sub(params, delta)
            value, slope = jax.value_and_grad(more['value_fn'])(beyond)
            gain = 8 * damping * (more['value'] - value)
            accepted = gain >= optax.tree.norm(slope, squared=True)
            gamma = jnp.where(accepted, jnp.maximum(2 * gamma, LEAST_GAMMA), gamma / 2)
            return gamma, delta, tries + 1, accepted

        def goes_on(carry):
            *_, tries, accepted = carry
            return (tries < gauss_newton_tries) & ~accepted

        start = (state.gamma, jax.tree.map(jnp.zeros_like, params), 0, jnp.bool(False))
        gamma, delta, *_ = jax.lax.while_loop(goes_on, attempt, start)
        return delta, GaussNewtonState(gamma)

    return optax.GradientTransformationExtraArgs(init, update)


def gauss_newton_product(params: Any, v: Any, asked: dict[str, Any]) -> Any:
    """J^T H J v, microbatch after microbatch. asked: the extra arguments of `update`."""

    def of_rows(rows):
        def logits_fn(params):
            return asked['logits_fn'](params, rows)

        def slope(logits):
            return jax.grad(asked['of_logits'])(logits, rows)

        logits, moved = along(logits_fn, params, v)
        _, bent = jax.jvp(slope, (logits,), (moved,))
        (found,) = jax.vjp(logits_fn, params)[1](bent)
        return found

    def add(total, rows):
        return optax.tree.add(total, of_rows(rows)), None

    return jax.lax.scan(add, jax.tree.map(jnp.zeros_like, v), asked['rows'])[0]
