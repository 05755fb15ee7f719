"""Sophia."""

import sys
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.adamw import ABOVE_0, B1, B2
from modules.optim.base import PerParameter, of_family, when
from modules.options import Option


@of_family('adam', forward_mode='gradient', own_loss=True)
def sophia(
    specs: Any,
    *,
    b1: B1 = 0.96,
    b2: B2 = 0.99,
    sophia_gamma: Annotated[
        float,
        Option(
            'factor of the curvature; the larger, the fewer are clipped',
            0,
            sys.float_info.max,
            traced=True,
        ),
    ] = 0.01,
    sophia_eps: Annotated[
        float, Option('least denominator', ABOVE_0, sys.float_info.max, traced=True)
    ] = 1e-12,
    sophia_every: Annotated[
        int, Option('steps from one look at the curvature to the next', 1, counted_in='steps')
    ] = 10,
) -> optax.GradientTransformationExtraArgs:
    """clip(m / max(sophia_gamma h, sophia_eps), -1, 1), Sophia-H (arXiv:2305.14342, algorithm 3).

    m = b1 m + (1 - b1) g; h = b2 h + (1 - b2) u * (H u) in every `sophia_every`-th update from the
    first on, u normal and H the Hessian of the loss of the batch, of all of it where the paper
    takes a part. A coordinate of negative curvature moves by the learning rate itself.
    H u is the derivative of `value_fn`'s gradient along u, in forward mode: kernels.attention must
    be reference or blocked.
    The authors' code has the other form, Sophia-G, whose curvature is the squared gradient at
    sampled labels. ValueError where the extra argument value_fn is missing, or has no such
    derivative.
    """
    del specs

    def init(params):
        kept = {name: jax.tree.map(jnp.zeros_like, params) for name in ('momentum', 'curvature')}
        return PerParameter(jnp.int32(0), kept)

    def update(grads, state, params=None, *, value_fn=None, **more):
        del more
        if params is None or value_fn is None:
            raise ValueError(
                'sophia looks at the curvature of the loss; give `update` the parameters and '
                'value_fn(params), the loss of the batch'
            )
        count, h = state.count + 1, state.of['curvature']
        m = jax.tree.map(lambda m, g: b1 * m + (1 - b1) * g, state.of['momentum'], grads)

        def look():
            found = curvature_estimate(value_fn, params, random_like(params, count))
            return jax.tree.map(lambda h, e: b2 * h + (1 - b2) * e, h, found)

        h = when((count - 1) % sophia_every == 0, look, h)
        directions = jax.tree.map(
            lambda m, h: jnp.clip(m / jnp.maximum(sophia_gamma * h, sophia_eps), -1, 1), m, h
        )
        return directions, PerParameter(count, {'momentum': m, 'curvature': h})

    return optax.GradientTransformationExtraArgs(init, update)


def curvature_estimate(value_fn: Callable[[Any], jax.Array], params: Any, u: Any) -> Any:
    """u * (H u), whose mean over u is the Hessian's diagonal (Hutchinson's estimate).

    ValueError where part of the gradient has no derivative in forward mode.
    """
    try:
        _, along = jax.jvp(jax.grad(value_fn), (params,), (u,))
    except (NotImplementedError, TypeError) as error:
        raise ValueError(
            'the gradient of this loss cannot be differentiated, which the curvature needs; choose '
            f'kernels.attention=reference or blocked. JAX says: {error}'
        ) from error
    return jax.tree.map(jnp.multiply, u, along)


def random_like(params: Any, count: jax.Array) -> Any:
    """Standard normal numbers, others in each update `count` and for each parameter."""
    leaves, tree = jax.tree.flatten(params)
    key = jax.random.fold_in(jax.random.key(0), count)
    keys = (jax.random.fold_in(key, i) for i in range(len(leaves)))
    return tree.unflatten(
        [jax.random.normal(k, w.shape, w.dtype) for k, w in zip(keys, leaves, strict=True)]
    )
