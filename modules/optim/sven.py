"""Sven."""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.choices import nearest_divisor
from modules.optim.base import of_family
from modules.options import Option

LEAST_SINGULAR_VALUE = 1e-10  # the authors' absolute bound


def whole_groups(recipe: Any, part: Any) -> None:
    """Raises ValueError where sequences do not make groups of one size."""
    group, rows = part.options['sven_group'], recipe.data.batch_size
    if rows % group:
        raise ValueError(
            f'optim.sven_group must divide data.batch_size; got {group} for {rows} sequences. '
            f'Nearest that works: {nearest_divisor(rows, group)}.'
        )


@of_family('adam', most_parameters=5_000_000, own_loss=True, check=whole_groups)
def sven(
    specs: Any,
    *,
    sven_kappa: Annotated[
        float, Option('residuals are losses to the power of half of it', 0.01, 100, traced=True)
    ] = 2.0,
    sven_rtol: Annotated[
        float, Option('least singular value kept, over the largest', 0, 1, traced=True)
    ] = 1e-3,
    sven_k: Annotated[int, Option('singular values kept at most; 0: all', 0)] = 0,
    sven_group: Annotated[int, Option('sequences that share a residual', 1)] = 1,
) -> optax.GradientTransformationExtraArgs:
    """J^+ r: the least change of the parameters that takes the residuals r of the batch to 0.

    To first order, with J [B, P] their Jacobian. There is one residual a sequence, or a group of
    `sven_group` in the batch's order: r = l^(sven_kappa / 2), of the sum of its objective over the
    mean number of target tokens of such a group, so that the mean of l is the objective. At a
    learning rate of 1 it is the whole step; the authors use 0.1.

    J^+ r = J^T K^+ r by the eigenvectors of K = J J^T [B, B], whose eigenvalues are squared
    singular values: in float32 those below about a thousandth of the largest are rounding. Kept are
    the `sven_k` largest that are above sven_rtol times the largest. A sequence is a microbatch of
    its own to layers that look at a batch, and J is held: B times the memory of the parameters.
    Source: arXiv:2604.01279, and https://github.com/sambt/sven, without its RMSProp and its growing
    k. ValueError where the extra arguments `rows` and `share_fn` are missing.
    """
    del specs

    def update(grads, state, params=None, *, rows=None, share_fn=None, **more):
        del grads, more
        if params is None or share_fn is None:
            raise ValueError(
                'sven looks at the loss of each sequence; give `update` the parameters, rows [n, '
                'b, ...], and share_fn(params, some of the rows), what they add to the loss'
            )
        values_B, jacobian = sequence_jacobian(share_fn, params, rows)
        values_G, jacobian = grouped((values_B, jacobian), sven_group)
        sizes_G = jnp.abs(values_G)
        residuals_G = jnp.sign(values_G) * sizes_G ** (sven_kappa / 2)
        slopes_G = sven_kappa / 2 * sizes_G ** (sven_kappa / 2 - 1)
        slopes_G = jnp.where(sizes_G > 0, slopes_G, 0.0)  # all tokens may be padding
        jacobian = jax.tree.map(lambda j: _weighted(slopes_G, j), jacobian)
        return pseudo_inverse(jacobian, residuals_G, sven_k, sven_rtol), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def sequence_jacobian(share_fn: Callable[..., jax.Array], params: Any, rows: Any) -> Any:
    """(the value of each sequence [B], its gradient [B, ...]), in the batch's order, of which part
    i of n has the rows i, i + n, ...; their mean is the value of the batch.
    """
    n, b = jax.tree.leaves(rows)[0].shape[:2]

    def of_sequence(sequence):
        alone = jax.tree.map(lambda tokens_T: tokens_T[None], sequence)
        value, grads = jax.value_and_grad(share_fn)(params, alone)
        return jax.tree.map(lambda leaf: n * b * leaf, (value, grads))

    found = jax.lax.map(jax.vmap(of_sequence), rows)
    return jax.tree.map(
        lambda leaf: jnp.swapaxes(leaf, 0, 1).reshape(n * b, *leaf.shape[2:]), found
    )


def grouped(tree: Any, size: int) -> Any:
    """[B, ...] -> [B / size, ...]: means of so many after each other."""
    if size == 1:
        return tree
    return jax.tree.map(lambda x: jnp.mean(x.reshape(-1, size, *x.shape[1:]), 1), tree)


def pseudo_inverse(jacobian: Any, residuals_G: jax.Array, k: int, rtol: Any) -> Any:
    """J^T K^+ r, like the parameters, of a Jacobian whose leaves are [G, ...]."""
    groups = residuals_G.shape[0]
    flat = [leaf.reshape(groups, -1) for leaf in jax.tree.leaves(jacobian)]
    gram_GG = sum(jnp.einsum('gp,hp->gh', j, j, precision=jax.lax.Precision.HIGHEST) for j in flat)
    squares_G, vectors_GG = jnp.linalg.eigh(gram_GG)  # ascending
    singular_G = jnp.sqrt(jnp.maximum(squares_G, 0.0))
    kept_G = (singular_G > rtol * singular_G[-1]) & (singular_G > LEAST_SINGULAR_VALUE)
    if k:
        kept_G = kept_G & (jnp.arange(groups) >= groups - k)
    inverse_G = jnp.where(kept_G, 1 / jnp.where(kept_G, squares_G, 1.0), 0.0)
    weights_G = vectors_GG @ (inverse_G * (vectors_GG.T @ residuals_G))
    return jax.tree.map(lambda leaf: jnp.sum(_weighted(weights_G, leaf), 0), jacobian)


def _weighted(weights_G: jax.Array, leaf: jax.Array) -> jax.Array:
    return weights_G.reshape(-1, *(1,) * (leaf.ndim - 1)) * leaf
