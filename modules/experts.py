"""Mixtures of experts: a row of `modules.mlp.MLPS`."""

import functools
import math
import sys
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.options import Option
from modules.parallel.axes import shard_activation
from modules.position_wise import PositionWise
from modules.products import product
from modules.statistics import AUXILIARY, is_training, next_key


class MoE(PositionWise):
    """Mixture of experts (arXiv:2107.11817): `y = sum_(e in S) p_e F_e(x) with p = softmax(x
    W_router)`.

    `F_e` is the MLP of expert `e`, and `S` are the `k` (`experts_per_token`) of `E` experts with
    the largest `p_e`. With `gates=renormalised`, `p_e` is divided by the sum over `S`, which is a
    softmax over the logits of `S` (Mixtral, arXiv:2401.04088; norm_topk_prob of Qwen3,
    arXiv:2505.09388; gpt-oss, arXiv:2508.10925).

    In training, an expert accepts only its first `C` tokens of the `M = B T` tokens of a batch;
    later tokens are dropped. Training adds normal noise of standard deviation `r / E` to the logits
    of the router, with `r` the option `router_noise`; the layer stores the key of the noise. It
    also adds an auxiliary loss `A`, which is 1 if all experts get equally many tokens. `c` is
    `expert_capacity`, `P_e` the mean of `p_e` over tokens, and `h_e` the share of expert `e` in all
    `k M` choices:

    `C = ceil(c k M / E)`
    `A = E^2 mean_e(P_e h_e)`

    The output for a token therefore depends on earlier tokens of the batch, or only on those of its
    row with `capacity_over=row` (as in MaxText; then `M = T`). In that case rows stay on their
    devices, and an all-to-all sends their tokens to the devices of their experts. Evaluation drops
    no tokens and adds no noise. Router and gates are float32. Padding takes no slot. `bias` adds a
    bias to the matmul of the router, as in gpt-oss, and to the matmuls of each expert.

    Source: the code of WideNet (arXiv:2107.11817). Its experts also apply the activation after
    their second matmul; ours do not.
    """

    bias: bool = False
    n_experts: Annotated[int, Option('number of experts', 1)] = 4
    experts_per_token: Annotated[int, Option('experts per token', 1)] = 2
    expert_capacity: Annotated[
        float,
        Option(
            'capacity of an expert in training; 1: an even share of the tokens',
            1e-37,
            sys.float_info.max,
        ),
    ] = 1.2
    capacity_over: Annotated[
        str, Option('count capacity over the whole batch, or per row', choices=('batch', 'row'))
    ] = 'batch'
    gates: Annotated[
        str,
        Option(
            'weights of the chosen experts: softmax over all experts, or renormalised to sum to 1',
            choices=('softmax', 'renormalised'),
        ),
    ] = 'softmax'
    router_noise: Annotated[
        float,
        Option(
            'noise on router logits in training, in units of 1 / n_experts; 0: none',
            0,
            sys.float_info.max,
        ),
    ] = 1.0

    auxiliary = ('balance_loss',)

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:  # ty: ignore[incompatible-attribute-override]
        """Raises ValueError for more experts per token than there are experts."""
        n_experts, top_k = part.options['n_experts'], part.options['experts_per_token']
        if top_k > n_experts:
            raise ValueError(
                f'mlp.experts_per_token must be at most mlp.n_experts; got {top_k} and {n_experts}'
            )

    @nn.compact
    def __call__(self, x_BTD: jax.Array, valid_BT1: jax.Array | None = None) -> jax.Array:
        x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
        valid_M1 = None if valid_BT1 is None else valid_BT1.reshape(-1, 1)
        tokens, d_model = x_MD.shape
        training = is_training(self)
        groups = x_BTD.shape[0] if self.capacity_over == 'row' else 1
        axes = ('embed', 'router')
        options: dict[str, Any] = {'matmul': self.kernels.matmul, 'dtype': jnp.float32}
        options |= {'bias': self.bias}
        logits_ME = product(self, 'router', x_MD, axes, axes[:1], self.n_experts, **options)
        key = next_key(self) if self.router_noise else None  # without noise no key is stored
        if key is not None:
            noise_ME = jax.random.normal(key, logits_ME.shape)
            logits_ME += self.router_noise * noise_ME / self.n_experts
        probs_ME = self.kernels.softmax(logits_ME)
        gates_MK, expert_MK = jax.lax.top_k(probs_ME, self.experts_per_token)
        if self.gates == 'renormalised':
            gates_MK = gates_MK / jnp.sum(gates_MK, -1, keepdims=True)
        mask_ME = jnp.sum(jax.nn.one_hot(expert_MK, self.n_experts), 1)
        if valid_M1 is not None:
            mask_ME = mask_ME * valid_M1
        capacity = tokens // groups
        if training:
            share = self.expert_capacity * self.experts_per_token / self.n_experts
            capacity = min(capacity, math.ceil(share * capacity))
            self.sow(AUXILIARY, 'balance_loss', self.balance(probs_ME, mask_ME, valid_M1))

        def group_rows(array_M_):
            return array_M_.reshape(groups, -1, *array_M_.shape[1:])

        dispatch_group = functools.partial(dispatch, capacity=capacity)
        buffer_GECD, slot_GMK = jax.vmap(dispatch_group)(
            *map(group_rows, (x_MD, expert_MK, mask_ME))
        )
        # An all-to-all sends the tokens of a row to the devices of their experts, another back.
        buffer_GECD = shard_activation(shard_activation(buffer_GECD, 'B_CD'), 'GECD')
        buffer_ECD = jnp.swapaxes(buffer_GECD, 0, 1).reshape(self.n_experts, -1, d_model)
        y_EGCD = self.feed_forward(buffer_ECD, batch=('expert',), bias=self.bias)
        y_EGCD = y_EGCD.reshape(self.n_experts, groups, capacity, d_model)
        y_GECD = shard_activation(shard_activation(jnp.swapaxes(y_EGCD, 0, 1), 'GECD'), 'B_CD')
        combined_GMD = jax.vmap(combine)(y_GECD, slot_GMK, group_rows(gates_MK.astype(self.dtype)))
        return combined_GMD.reshape(x_BTD.shape)

    def balance(
        self, probs_ME: jax.Array, mask_ME: jax.Array, valid_M1: jax.Array | None
    ) -> jax.Array:
        """Returns E sum_e mean(p_e) share_e, over the tokens that are not padding.

        Args:
          probs_ME: p, the probabilities of the router.
          mask_ME: 1 where a token chose an expert.
          valid_M1: 0 for padding; None: no padding.

        Returns:
          The auxiliary loss, a scalar.
        """
        valid_M1 = jnp.ones_like(probs_ME[:, :1]) if valid_M1 is None else valid_M1
        count = jnp.maximum(jnp.sum(valid_M1), 1.0)
        proxy_E = jnp.sum(probs_ME * valid_M1, 0) / count
        share_E = jnp.sum(mask_ME, 0) / (count * self.experts_per_token)
        return self.n_experts * jnp.sum(proxy_E * share_E)


def dispatch(
    x_MD: jax.Array, expert_MK: jax.Array, mask_ME: jax.Array, capacity: int
) -> tuple[jax.Array, jax.Array]:
    """Copies each token into the buffers of the experts that it chose, in token order.

    An expert accepts at most `capacity` tokens; later choices are dropped.

    Args:
      x_MD: tokens.
      expert_MK: the K experts of each token.
      mask_ME: 1 where a token chose an expert.
      capacity: C, slots per expert.

    Returns:
      (buffer_ECD, slot_MK): the experts' inputs, and the row of the flattened buffer that holds
      each choice; E * C if it is dropped.
    """
    (_, d_model), n_experts = x_MD.shape, mask_ME.shape[1]
    rank_ME = jnp.cumsum(mask_ME, 0).astype(jnp.int32) - 1
    rank_MK = jnp.take_along_axis(rank_ME, expert_MK, 1)
    fits_MK = (jnp.take_along_axis(mask_ME, expert_MK, 1) > 0) & (rank_MK < capacity)
    # Dropped choices share one extra row, so that shapes stay static under jit.
    slot_MK = jnp.where(fits_MK, expert_MK * capacity + rank_MK, n_experts * capacity)
    copies_MKD = jnp.broadcast_to(x_MD[:, None], (*slot_MK.shape, d_model))
    buffer = jnp.zeros((n_experts * capacity + 1, d_model), x_MD.dtype)
    buffer = buffer.at[slot_MK.reshape(-1)].set(copies_MKD.reshape(-1, d_model))
    return buffer[:-1].reshape(n_experts, capacity, d_model), slot_MK


def combine(y_ECD: jax.Array, slot_MK: jax.Array, gates_MK: jax.Array) -> jax.Array:
    """Computes sum_k gate_k y_k for each token; dropped choices contribute 0. Inverts `dispatch`.

    Args:
      y_ECD: the experts' outputs.
      slot_MK: from `dispatch`.
      gates_MK: the weight of each choice.

    Returns:
      The outputs, [M, D].
    """
    d_model = y_ECD.shape[-1]
    rows = y_ECD.reshape(-1, d_model)
    y = jnp.concatenate([rows, jnp.zeros((1, d_model), rows.dtype)])
    weights_MK = jnp.where(slot_MK < len(rows), gates_MK, 0)
    return jnp.einsum('mk,mkd->md', weights_MK, y[slot_MK])
