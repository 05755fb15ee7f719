"""Weight gradients from a sample of the tokens: winner-take-all column-row sampling (WTA-CRS)."""

import dataclasses
import functools
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import struct

from modules.options import Option
from modules.parallel.axes import count_axis_shards
from modules.statistics import at_least_float32


class SampledRows(struct.PyTreeNode):
    """K rows of each of S shards of an input x [M, I]: the residual of a product.

    scaled_SKI: the rows times their weights. places_SK: their indices in a shard.
    """

    scaled_SKI: jax.Array
    places_SK: jax.Array


@dataclasses.dataclass(frozen=True)
class WTACRS:
    """WTA-CRS (arXiv:2305.15265): `y = x w`, with a weight gradient estimated from some of the
    tokens.

    In training, the weight gradient is an unbiased estimate of `sum_i x_i^T g_i` over the tokens
    `i`, where `g_i` is the gradient of `y_i`:

    `sum_(i in S) x_i^T g_i + sum_(j in R) x_j^T g_j / (q_j (K - c))`

    `S` are the `c` tokens with the largest `p_i`, and `R` are `K - c` tokens drawn from the rest
    with replacement, with probabilities `q_j`:

    `p_i = |x_i| / (sum_i |x_i|)`
    `q_j = p_j / (1 - P_c)`
    `c = argmin_(c < K) (1 - P_c) / (K - c)`

    `P_c` is the sum of the `c` largest `p_i`. The output and the gradient of `x` are exact. The
    backward pass keeps these rows and their indices instead of `x`. With `K = M` tokens everything
    is exact.

    In the paper, `p` is also weighted by the size of `g_i` when the sample was last seen; here each
    sample is seen once. The paper's code does not divide the draws of a first visit by
    `q_j (K - c)`, which is biased; here they are divided.
    """

    wta_crs_ratio: Annotated[
        float, Option('share of tokens used for weight gradients', 1e-37, 1)
    ] = 0.3
    wta_crs_least: Annotated[
        int, Option('minimum number of tokens used for weight gradients', 1)
    ] = 10

    flat: ClassVar[bool] = True
    any_rank: ClassVar[bool] = False

    @staticmethod
    def check(recipe: Any, part: Any) -> None:
        """Raises ValueError if no matrix is trained, or a gradient is differentiated.

        Args:
          recipe: the resolved config.
          part: the matmul kernel with its options.
        """
        if recipe.train.trainable == 'norms':
            raise ValueError(
                f'{part} estimates the gradients of matrices, but '
                f'train.trainable={recipe.train.trainable} trains no matrix, so it would have no '
                'effect. Leave one of them out.'
            )
        for source, quantity in recipe.forward_mode_targets.items():
            raise ValueError(
                f'{source} differentiates the {quantity}, but {part} estimates weight gradients '
                'from a few tokens, and this estimate has no correct derivative. Leave '
                'kernels.matmul at auto, or leave the other out.'
            )

    def __call__(
        self, x_MI: jax.Array, w_IO: jax.Array, out_dtype: jnp.dtype | None = None
    ) -> jax.Array:
        """Computes x w with exact gradients.

        Args:
          x_MI: activations.
          w_IO: a weight matrix.
          out_dtype: the type of the result; None: the type of x and w.
        """
        return jnp.matmul(x_MI, w_IO, preferred_element_type=out_dtype)

    def sample_rows(self, key: jax.Array, x_MI: jax.Array) -> SampledRows | None:
        """Draws the rows that replace x in weight gradients; None if that would be all rows.

        Each shard of the batch draws its own rows, so that no token moves to another device; the
        draw therefore depends on the number of devices.
        """
        n_shards = count_axis_shards('M')
        x_SMI = x_MI.reshape(n_shards if len(x_MI) % n_shards == 0 else 1, -1, x_MI.shape[-1])
        n_tokens = x_SMI.shape[1]
        n_kept = max(self.wta_crs_least, int(self.wta_crs_ratio * n_tokens))
        if n_kept >= n_tokens:
            return None
        # The sample is a residual of the product and no path for gradients: x gets its own exactly.
        x_SMI = jax.lax.stop_gradient(x_SMI)
        keys_S = jax.random.split(key, len(x_SMI))
        return jax.vmap(functools.partial(sample_shard_rows, n_kept=n_kept))(keys_S, x_SMI)


def sample_shard_rows(key: jax.Array, x_MI: jax.Array, n_kept: int) -> SampledRows:
    """Draws `SampledRows` of one shard, without the axis S.

    Args:
      key: the random key.
      x_MI: activations.
      n_kept: K, rows to draw.
    """
    norms_M = jnp.linalg.norm(at_least_float32(x_MI), axis=-1)
    places_K, weights_K = sample_indices(key, norms_M, n_kept)
    scaled_KI = (weights_K[:, None] * at_least_float32(x_MI[places_K])).astype(x_MI.dtype)
    return SampledRows(scaled_KI, places_K)


def sample_indices(key: jax.Array, sizes_M: jax.Array, n_kept: int) -> tuple[jax.Array, jax.Array]:
    """Draws (indices [K], weights [K]) of an unbiased estimate.

    The expectation of sum_k weights_k f(indices_k) is sum_m f(m), for any f that is 0 where the
    size is 0.

    Args:
      key: the random key.
      sizes_M: the size of each row, at least 0.
      n_kept: K, rows to draw.
    """
    total = jnp.sum(sizes_M)
    p_M = sizes_M / jnp.where(total > 0, total, 1.0)
    places_K = jnp.argsort(-p_M)[:n_kept]  # not top_k, which XLA does not shard
    n_top = count_winners(p_M[places_K])
    is_top_K = jnp.arange(n_kept) < n_top
    # The c largest are kept for certain and cannot be drawn again.
    rest_M = p_M.at[places_K].multiply(1 - is_top_K)
    ends_M = jnp.cumsum(rest_M)
    # Points are above 0, so that leading rows with probability 0 are never drawn.
    points_K = ends_M[-1] * (1 - jax.random.uniform(key, (n_kept,), ends_M.dtype))
    drawn_K = jnp.minimum(jnp.searchsorted(ends_M, points_K), len(p_M) - 1)
    chance_K = rest_M[drawn_K] * (n_kept - n_top)
    # Nothing is left to draw where fewer than K sizes are above 0.
    weights_K = jnp.where(chance_K > 0, ends_M[-1] / jnp.where(chance_K > 0, chance_K, 1.0), 0.0)
    return jnp.where(is_top_K, places_K, drawn_K), jnp.where(is_top_K, 1.0, weights_K)


def count_winners(top_K: jax.Array) -> jax.Array:
    """Returns c = argmin (1 - P_c) / (K - c) over 0 <= c < K, for the K largest p, descending."""
    n_kept = len(top_K)
    rest_K = 1 - jnp.cumsum(top_K) + top_K
    return jnp.argmin(jnp.maximum(rest_K, 0.0) / (n_kept - jnp.arange(n_kept)))


@jax.custom_vjp
def sampled_product(x_MI: jax.Array, w_IO: jax.Array, rows: SampledRows) -> jax.Array:
    """Computes x w with a weight gradient from `rows`; the backward pass keeps w and `rows`.

    Args:
      x_MI: activations.
      w_IO: a weight matrix.
      rows: the sample of x.
    """
    del rows
    return jnp.matmul(x_MI, w_IO)


def _forward(x_MI, w_IO, rows):
    return sampled_product(x_MI, w_IO, rows), (w_IO, rows)


def _backward(residuals, grad_MO):
    w_IO, rows = residuals
    n_shards, n_kept, _ = rows.scaled_SKI.shape
    grad_SMO = grad_MO.reshape(n_shards, -1, grad_MO.shape[-1])
    grad_SKO = jnp.take_along_axis(grad_SMO, rows.places_SK[:, :, None], 1)
    scaled_MI = rows.scaled_SKI.reshape(n_shards * n_kept, -1)
    grad_w_IO = jnp.einsum('mi,mo->io', scaled_MI, grad_SKO.reshape(n_shards * n_kept, -1))
    return jnp.einsum('mo,io->mi', grad_MO, w_IO), grad_w_IO, None


sampled_product.defvjp(_forward, _backward)
