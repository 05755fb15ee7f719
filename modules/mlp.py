"""The position-wise networks. A new one is a class here and a row in `MLPS`.

Each is a Linen class called on (x [M, D], valid [M, 1] or None) with M = B * T tokens.
"""

import math
import sys
from typing import Annotated

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.activations import Activation
from modules.kernels import Kernels
from modules.options import Option
from modules.params import declare
from modules.statistics import AUXILIARY, STATS, is_training


class MLP(nn.Module):
    """act(x W_up) W_down, or, with a gated activation, (act(x W_gate) * x W_up) W_down.

    Hidden width F; `bias` adds one to each product. Sources: arXiv:1706.03762, equation 2; gated
    arXiv:2002.05202.
    """

    d_ff: int
    activation: Activation
    kernels: Kernels
    dtype: jnp.dtype
    bias: bool = False
    init_gain: float = 1.0

    @nn.compact
    def __call__(self, x_MD, valid_M1=None):
        del valid_M1
        d_model = x_MD.shape[-1]
        up_MF = self.project('up', x_MD, ('embed', 'mlp'), self.d_ff)
        if self.activation.gated:
            gate_MF = self.project('gate', x_MD, ('embed', 'mlp'), self.d_ff)
            hidden_MF = self.activation.fn(gate_MF) * up_MF
        else:
            hidden_MF = self.activation.fn(up_MF)
        return self.project('down', hidden_MF, ('mlp', 'embed'), d_model)

    def project(self, name, x_MI, axes, features):
        init = declare(
            nn.initializers.normal(1.0), 'hidden', axes, axes[:1], init_gain=self.init_gain
        )
        w_IO = self.param(name, init, (x_MI.shape[-1], features))
        y_MO = self.kernels.matmul(x_MI, w_IO.astype(self.dtype))
        if self.bias:
            zeros = declare(nn.initializers.zeros, 'vector', axes[1:])
            b_O = self.param(f'{name}_bias', zeros, (features,)).astype(self.dtype)
            y_MO = y_MO + jnp.broadcast_to(b_O, y_MO.shape)
        return y_MO


class MoE(nn.Module):
    """sum over the k experts e likeliest by p = softmax(x W_router) of p_e(x) MLP_e(x).

    In training each expert takes capacity = ceil(expert_capacity * k * M / E) tokens, in order; to
    those that come later it adds nothing. Normal noise of deviation 1/E is added to the router's
    logits, from a key that the layer carries, and E^2 mean_e(mean(p_e) share_e), share_e being its
    share of the k M choices, is sown as an auxiliary loss, 1 where all is balanced. So a token's
    output depends on those before it in the batch. Evaluation drops no token and adds no noise.
    Router and gates are float32; p is not normalized over the k. Padding takes no place.

    Source: the code of WideNet (arXiv:2107.11817), whose experts also apply the activation after
    their second product; here they do not. Experts have no biases (`bias` must be False).
    """

    d_ff: int
    activation: Activation
    kernels: Kernels
    dtype: jnp.dtype
    bias: bool = False
    init_gain: float = 1.0
    n_experts: Annotated[int, Option('how many there are', 1)] = 4
    experts_per_token: Annotated[int, Option('how many a token goes through', 1)] = 2
    expert_capacity: Annotated[
        float, Option('of an even share of the tokens, in training', 1e-37, sys.float_info.max)
    ] = 1.2

    auxiliary = ('balance_loss',)

    @nn.compact
    def __call__(self, x_MD, valid_M1=None):
        tokens, d_model = x_MD.shape
        training = is_training(self)
        router_DE = self.matrix(
            'router', ('embed', 'expert'), ('embed',), (d_model, self.n_experts)
        )
        logits_ME = x_MD.astype(jnp.float32) @ router_DE
        key = self.variable(STATS, 'key', lambda: as_int(self.make_rng('params')))
        if training:
            now, later = jax.random.split(as_key(key.value))
            logits_ME += jax.random.normal(now, logits_ME.shape) / self.n_experts
            key.value = as_int(later)
        probs_ME = jax.nn.softmax(logits_ME)
        gates_MK, chosen_MK = jax.lax.top_k(probs_ME, self.experts_per_token)
        mask_ME = jnp.sum(jax.nn.one_hot(chosen_MK, self.n_experts), 1)
        if valid_M1 is not None:
            mask_ME = mask_ME * valid_M1
        capacity = tokens
        if training:
            share = self.expert_capacity * self.experts_per_token / self.n_experts
            capacity = min(tokens, math.ceil(share * tokens))
            self.sow(AUXILIARY, 'balance_loss', self.balance(probs_ME, mask_ME, valid_M1))
        place_ME = jnp.cumsum(mask_ME, 0).astype(jnp.int32) - 1
        place_MK = jnp.take_along_axis(place_ME, chosen_MK, 1)
        taken_MK = (jnp.take_along_axis(mask_ME, chosen_MK, 1) > 0) & (place_MK < capacity)
        # One row more than there is room for: where what is not taken is written, and read as 0.
        row_MK = jnp.where(taken_MK, chosen_MK * capacity + place_MK, self.n_experts * capacity)
        sent_MKD = jnp.broadcast_to(x_MD[:, None], (*row_MK.shape, d_model))
        room = jnp.zeros((self.n_experts * capacity + 1, d_model), x_MD.dtype)
        room = room.at[row_MK.reshape(-1)].set(sent_MKD.reshape(-1, d_model))
        y_ECD = self.experts(room[:-1].reshape(self.n_experts, capacity, d_model))
        y = jnp.concatenate([y_ECD.reshape(-1, d_model), jnp.zeros((1, d_model), y_ECD.dtype)])
        weights_MK = jnp.where(taken_MK, gates_MK, 0.0).astype(self.dtype)
        return jnp.einsum('mk,mkd->md', weights_MK, y[row_MK])

    def balance(self, probs_ME, mask_ME, valid_M1):
        """E sum_e mean(p_e) share_e, over the tokens that count."""
        valid_M1 = jnp.ones_like(probs_ME[:, :1]) if valid_M1 is None else valid_M1
        count = jnp.maximum(jnp.sum(valid_M1), 1.0)
        proxy_E = jnp.sum(probs_ME * valid_M1, 0) / count
        share_E = jnp.sum(mask_ME, 0) / (count * self.experts_per_token)
        return self.n_experts * jnp.sum(proxy_E * share_E)

    def experts(self, x_ECD):
        d_model, experts = x_ECD.shape[-1], self.n_experts
        wide = (('expert', 'embed', 'mlp'), ('embed',), (experts, d_model, self.d_ff))
        up_ECF = self.product('up', x_ECD, *wide)
        if self.activation.gated:
            hidden_ECF = self.activation.fn(self.product('gate', x_ECD, *wide)) * up_ECF
        else:
            hidden_ECF = self.activation.fn(up_ECF)
        narrow = (('expert', 'mlp', 'embed'), ('mlp',), (experts, self.d_ff, d_model))
        return self.product('down', hidden_ECF, *narrow)

    def product(self, name, x_ECI, axes, fan_in, shape):
        return jnp.einsum(
            'eci,eio->eco', x_ECI, self.matrix(name, axes, fan_in, shape).astype(self.dtype)
        )

    def matrix(self, name, axes, fan_in, shape):
        gain = 1.0 if name == 'router' else self.init_gain
        init = declare(nn.initializers.normal(1.0), 'hidden', axes, fan_in, init_gain=gain)
        return self.param(name, init, shape)


def as_int(key: jax.Array) -> jax.Array:
    """A random key as int32 [2], to be stored with the other statistics."""
    return jax.lax.bitcast_convert_type(jax.random.key_data(key), jnp.int32)


def as_key(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(jax.lax.bitcast_convert_type(data, jnp.uint32))


MLPS = {'dense': MLP, 'moe': MoE}
