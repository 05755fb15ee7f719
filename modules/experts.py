"""Mixtures of experts: a row of `modules.mlp.MLPS`."""

import functools
import math
import sys
from collections.abc import Callable, Mapping
from typing import Annotated, Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.sharding import PartitionSpec

from modules.choices import check_divides
from modules.grouped_product import grouped_product
from modules.options import Option
from modules.parallel.axes import ACTIVATIONS, map_devices, partition, shard_activation, spec_axes
from modules.params import declare
from modules.position_wise import PositionWise
from modules.products import make_matrix, product
from modules.statistics import (
    AUXILIARY,
    DIAGNOSTICS,
    INPUT_MOMENTS,
    INPUTS,
    STATS,
    is_recording,
    is_training,
    next_key,
)

BIAS, COUNTS = 'expert_bias', 'expert_counts'  # in STATS, [E]; counts are sums over a step
SUM_EPS = 1e-20  # in the sum of the chosen scores, as in torchtitan
GROUP_SCORES = 2  # the largest scores of a group of experts, whose sum rates it, as in DeepSeek-V3


class MoE(PositionWise):
    """Mixture of experts (arXiv:2107.11817): `y = sum_(e in S) p_e F_e(x) with p = softmax(x
    W_router)`.

    `F_e` is the MLP of expert `e`, and `S` are the `k` (`experts_per_token`) of `E` experts with
    the largest `p_e`. With `gates=renormalised`, `p_e` is divided by the sum over `S`, which is a
    softmax over the logits of `S` (Mixtral, arXiv:2401.04088; norm_topk_prob of Qwen3,
    arXiv:2505.09388; gpt-oss, arXiv:2508.10925). With `gates=sigmoid`, `p_e` is the sigmoid of its
    logit, likewise divided by the sum over `S` (DeepSeek-V3, arXiv:2412.19437). `route_scale`
    multiplies the weights of the chosen experts; DeepSeek-V3 has 2.5.

    In training, an expert accepts only its first `C` tokens of the `M = B T` tokens of a batch;
    later tokens are dropped. Training adds normal noise of standard deviation `r / E` to the logits
    of the router, with `r` the option `router_noise`; the layer stores the key of the noise. With
    `balance=loss` it also adds an auxiliary loss `A`, which is 1 if all experts get equally many
    tokens. `c` is `expert_capacity`, `P_e` the mean of `p_e` over tokens, and `h_e` the share of
    expert `e` in all `k M` choices; sigmoids are divided by their sum over all experts here:

    `C = ceil(c k M / E)`
    `A = E^2 mean_e(P_e h_e)`

    With `balance=bias`, `S` are instead the `k` experts with the largest `p_e + b_e`
    (arXiv:2408.15664). The weights of the chosen experts remain those of `p_e`, so that `b` has no
    gradient. Once per step, with `n_e` the tokens that chose expert `e` in all microbatches and on
    all devices, and `u` the option `bias_rate`:

    `b_e <- b_e + d_e - mean_e(d_e) with d_e = u sign(mean_e(n_e) - n_e)`

    The mean of `d` is subtracted as in torchtitan; it changes no choice. `router_z_loss` adds the
    mean square of `log(sum_e exp(z_e))` to the loss, `z` the logits without noise
    (arXiv:2202.08906).

    With `expert_groups`, experts form that many groups of neighbours, and `S` is chosen among those
    of the `groups_per_token` groups whose two largest `p_e + b_e` have the largest sum, as in
    DeepSeek-V3.

    The hidden width of an expert is `F / G` (arXiv:2402.07871), with `F` the field `model.d_ff` and
    `G` the option `granularity`; `expert_width` sets any other width, as in models whose other
    blocks have a dense MLP. `shared_experts` more experts of this width see every token; they are
    stored as one MLP, as in DeepSeek-V3. Their output is added without a weight or, with
    `shared_gate`, times `sigmoid(x w)` (Qwen2, arXiv:2407.10671). With `granularity` equal to
    `experts_per_token + shared_experts`, a token passes through as many weights as in a dense MLP,
    besides the router.

    The output for a token depends on earlier tokens of the batch, or only on those of its row with
    `capacity_over=row` (as in MaxText; then `M = T`). In that case rows stay on their devices, and
    an all-to-all sends their tokens to the devices of their experts. Evaluation drops no tokens and
    adds no noise. With `dispatch=ragged`, training drops none either: tokens are sorted by expert,
    and one ragged product computes all experts, each for its own tokens. Router and gates are
    float32. Padding takes no slot. `bias` adds a bias to the matmul of the router, as in gpt-oss,
    and to the matmuls of each expert.

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
            'weights of the chosen experts: softmax over all, or normalised to sum to 1',
            choices=('softmax', 'renormalised', 'sigmoid'),
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
    route_scale: Annotated[
        float, Option('factor of the weights of the chosen experts', 1e-37, sys.float_info.max)
    ] = 1.0
    balance: Annotated[
        str,
        Option(
            'keep experts equally busy by a loss, by a bias of the choice, or not',
            choices=('loss', 'bias', 'none'),
        ),
    ] = 'loss'
    bias_rate: Annotated[
        float,
        Option('change of the bias in a step, with mlp.balance=bias', 0, 1, traced=True),
    ] = 1e-3
    router_z_loss: Annotated[
        bool, Option('whether to add the loss on router logits, with its weight in loss')
    ] = False
    shared_experts: Annotated[int, Option('experts that see every token', 0)] = 0
    shared_gate: Annotated[
        bool, Option('multiply the output of mlp.shared_experts by a sigmoid of the token')
    ] = False
    granularity: Annotated[
        int, Option('model.d_ff divided by the hidden width of an expert', 1)
    ] = 1
    expert_width: Annotated[
        int | None,
        Option('hidden width of an expert; None: model.d_ff / mlp.granularity', 1),
    ] = None
    expert_groups: Annotated[int, Option('groups of experts that a token chooses among', 1)] = 1
    groups_per_token: Annotated[
        int, Option('groups of experts that a token may use, with mlp.expert_groups', 1)
    ] = 1
    dispatch: Annotated[
        str,
        Option(
            'buffers with a capacity, or tokens sorted by expert, of which none is dropped',
            choices=('capacity', 'ragged'),
        ),
    ] = 'capacity'

    auxiliary: ClassVar[Mapping[str, tuple[str, Any]]] = {
        'balance_loss': ('balance', 'loss'),
        'router_z_loss': ('router_z_loss', True),
    }

    @classmethod
    def check(cls, recipe: Any, part: Any) -> None:  # ty: ignore[incompatible-attribute-override]
        """Raises ValueError for more experts per token than there are experts, for an uneven width
        or groups of experts, for options that do nothing, and for options without ragged products.
        """
        n_experts, top_k = part.options['n_experts'], part.options['experts_per_token']
        if top_k > n_experts:
            raise ValueError(
                f'mlp.experts_per_token must be at most mlp.n_experts; got {top_k} and {n_experts}'
            )
        for sizes in (recipe, recipe.base):  # the base of a parametrisation has the same experts
            granularity = part.options['granularity']
            check_divides('mlp.granularity', granularity, 'model.d_ff', sizes.model.d_ff)
        check_widths(recipe, part)
        check_groups(part)
        balance, rate = part.options['balance'], part.options['bias_rate']
        if balance != 'bias' and rate != cls.bias_rate:
            raise ValueError(
                f'mlp.bias_rate={rate:g} has no effect with mlp.balance={balance}. Leave it out, '
                'or set mlp.balance=bias'
            )
        if part.options['dispatch'] == 'ragged':
            check_ragged(recipe, part)

    @staticmethod
    def finish_step(stats: Any, options: Mapping[str, Any]) -> Any:
        """Returns STATS with the biases of the next step, and counts of 0."""
        return update_biases(stats, options['bias_rate']) if options['balance'] == 'bias' else stats

    @nn.compact
    def __call__(self, x_BTD: jax.Array, valid_BT1: jax.Array | None = None) -> jax.Array:
        x_MD = x_BTD.reshape(-1, x_BTD.shape[-1])
        valid_M1 = None if valid_BT1 is None else valid_BT1.reshape(-1, 1)
        gates_MK, expert_MK, mask_ME = self.route(x_MD, valid_M1)
        groups = x_BTD.shape[0] if self.capacity_over == 'row' else 1
        capacity = self.find_capacity(len(x_MD) // groups)
        if is_recording(self):
            self.record_load(mask_ME.reshape(groups, -1, self.n_experts), capacity)
        if self.is_ragged():
            y_BTD = self.compute_ragged(x_BTD, gates_MK, expert_MK, valid_M1)
        else:
            capacity = capacity if is_training(self) else len(x_MD) // groups
            y_GMD = self.compute_buffers(x_MD, gates_MK, expert_MK, mask_ME, groups, capacity)
            y_BTD = y_GMD.reshape(x_BTD.shape)
        if self.shared_experts:
            width = self.shared_experts * self.width
            shared_BTD = self.feed_forward(x_BTD, (), self.bias, width, 'shared_')
            if self.shared_gate:
                axes = ('embed', 'router')
                options: dict[str, Any] = {
                    'matmul': self.kernels.matmul_for('router'),
                    'dtype': self.dtype,
                }
                logits_BT1 = product(self, 'shared_weight', x_BTD, axes, axes[:1], 1, **options)
                weight_BT1 = jax.nn.sigmoid(logits_BT1.astype(jnp.float32)).astype(self.dtype)
                shared_BTD = shared_BTD * jnp.broadcast_to(weight_BT1, shared_BTD.shape)
            y_BTD = y_BTD + shared_BTD
        return y_BTD

    @property
    def width(self) -> int:
        """The hidden width of an expert."""
        return expert_width(self.d_ff, self.granularity, self.expert_width)

    def route(
        self, x_MD: jax.Array, valid_M1: jax.Array | None
    ) -> tuple[jax.Array, jax.Array, jax.Array]:
        """Chooses the experts of each token, sows auxiliary losses and counts choices.

        Args:
          x_MD: tokens.
          valid_M1: 0 for padding; None: no padding.

        Returns:
          (gates_MK, expert_MK, mask_ME): weights and numbers of the chosen experts, and 1 where a
          token that is not padding chose an expert.
        """
        axes = ('embed', 'router')
        options: dict[str, Any] = {
            'matmul': self.kernels.matmul_for('router'),
            'dtype': jnp.float32,
        }
        options |= {'bias': self.bias}
        logits_ME = product(self, 'router', x_MD, axes, axes[:1], self.n_experts, **options)
        if self.router_z_loss and is_training(self):
            self.sow(AUXILIARY, 'router_z_loss', mean_square_log_z(logits_ME, valid_M1))
        key = next_key(self) if self.router_noise else None  # without noise no key is stored
        if key is not None:
            noise_ME = jax.random.normal(key, logits_ME.shape)
            logits_ME += self.router_noise * noise_ME / self.n_experts
        is_sigmoid = self.gates == 'sigmoid'
        scores_ME = jax.nn.sigmoid(logits_ME) if is_sigmoid else self.kernels.softmax(logits_ME)
        if self.balance == 'bias':
            bias_E = self.variable(STATS, BIAS, jnp.zeros, (self.n_experts,)).value
            chosen_by_ME = self.limit_groups(scores_ME + bias_E[None])
            expert_MK = jax.lax.top_k(chosen_by_ME, self.experts_per_token)[1]
            gates_MK = jnp.take_along_axis(scores_ME, expert_MK, 1)
        elif self.expert_groups > 1:
            expert_MK = jax.lax.top_k(self.limit_groups(scores_ME), self.experts_per_token)[1]
            gates_MK = jnp.take_along_axis(scores_ME, expert_MK, 1)
        else:
            gates_MK, expert_MK = jax.lax.top_k(scores_ME, self.experts_per_token)
        if self.gates == 'renormalised':
            gates_MK = gates_MK / jnp.sum(gates_MK, -1, keepdims=True)
        elif is_sigmoid:
            gates_MK = gates_MK / (jnp.sum(gates_MK, -1, keepdims=True) + SUM_EPS)
        if self.route_scale != 1:
            gates_MK = self.route_scale * gates_MK
        mask_ME = jnp.sum(jax.nn.one_hot(expert_MK, self.n_experts), 1)
        if valid_M1 is not None:
            mask_ME = mask_ME * valid_M1
        if self.balance == 'bias':
            counts = self.variable(STATS, COUNTS, jnp.zeros, (self.n_experts,))
            if is_training(self):
                counts.value = counts.value + jnp.sum(mask_ME, 0)
        if self.balance == 'loss' and is_training(self):
            probs_ME = scores_ME
            if is_sigmoid:
                probs_ME = scores_ME / (jnp.sum(scores_ME, -1, keepdims=True) + SUM_EPS)
            self.sow(AUXILIARY, 'balance_loss', self.compute_balance(probs_ME, mask_ME, valid_M1))
        return gates_MK, expert_MK, mask_ME

    def limit_groups(self, scores_ME: jax.Array) -> jax.Array:
        """Returns the scores, with -inf for the experts outside of a token's groups."""
        if self.expert_groups == 1:
            return scores_ME
        grouped_MGE = scores_ME.reshape(len(scores_ME), self.expert_groups, -1)
        best_MG2 = jax.lax.top_k(grouped_MGE, GROUP_SCORES)[0]
        group_MK = jax.lax.top_k(jnp.sum(best_MG2, -1), self.groups_per_token)[1]
        is_chosen_MG = jnp.sum(jax.nn.one_hot(group_MK, self.expert_groups), 1) > 0
        is_chosen_MGE = jnp.broadcast_to(is_chosen_MG[..., None], grouped_MGE.shape)
        return jnp.where(is_chosen_MGE, grouped_MGE, -jnp.inf).reshape(scores_ME.shape)

    def compute_balance(
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

    def find_capacity(self, tokens: int) -> int:
        """Returns the slots of an expert in training, for a number of tokens."""
        share = self.expert_capacity * self.experts_per_token / self.n_experts
        return min(tokens, math.ceil(share * tokens))

    def record_load(self, mask_GME: jax.Array, capacity: int) -> None:
        """Sows how evenly experts are chosen, and the share of choices that training would drop.

        Args:
          mask_GME: 1 where a token chose an expert, by group of tokens with a capacity of its own.
          capacity: slots of an expert in training.
        """
        counts_GE = jnp.sum(mask_GME, 1)
        total, load_E = jnp.maximum(jnp.sum(counts_GE), 1.0), jnp.sum(counts_GE, 0)
        self.sow(DIAGNOSTICS, 'expert_largest_load', self.n_experts * jnp.max(load_E) / total)
        if self.dispatch == 'capacity':
            excess = jnp.sum(jnp.maximum(counts_GE - capacity, 0.0))
            self.sow(DIAGNOSTICS, 'expert_dropped_share', excess / total)
        if self.balance == 'bias':
            bias_E = self.get_variable(STATS, BIAS)
            self.sow(DIAGNOSTICS, 'expert_bias_range', jnp.max(bias_E) - jnp.min(bias_E))

    def compute_buffers(
        self,
        x_MD: jax.Array,
        gates_MK: jax.Array,
        expert_MK: jax.Array,
        mask_ME: jax.Array,
        groups: int,
        capacity: int,
    ) -> jax.Array:
        """Computes the experts on buffers of `capacity` tokens; choices without a slot are dropped.

        Args:
          x_MD: tokens.
          gates_MK: weights of the chosen experts.
          expert_MK: their numbers.
          mask_ME: 1 where a token that is not padding chose an expert.
          groups: G; each group of tokens has slots of its own.
          capacity: C, slots per expert and group.

        Returns:
          The weighted outputs, [G, M / G, D].
        """
        d_model = x_MD.shape[-1]

        def group_rows(array_M_):
            return array_M_.reshape(groups, -1, *array_M_.shape[1:])

        dispatch_group = functools.partial(dispatch, capacity=capacity)
        buffer_GECD, slot_GMK = jax.vmap(dispatch_group)(
            *map(group_rows, (x_MD, expert_MK, mask_ME))
        )
        # An all-to-all sends the tokens of a row to the devices of their experts, another back.
        buffer_GECD = shard_activation(shard_activation(buffer_GECD, 'B_CD'), 'GECD')
        buffer_ECD = jnp.swapaxes(buffer_GECD, 0, 1).reshape(self.n_experts, -1, d_model)
        y_EGCD = self.feed_forward(buffer_ECD, ('expert',), self.bias, self.width)
        y_EGCD = y_EGCD.reshape(self.n_experts, groups, capacity, d_model)
        y_GECD = shard_activation(shard_activation(jnp.swapaxes(y_EGCD, 0, 1), 'GECD'), 'B_CD')
        return jax.vmap(combine)(y_GECD, slot_GMK, group_rows(gates_MK.astype(self.dtype)))

    def is_ragged(self) -> bool:
        """Whether this pass uses ragged products.

        Passes that initialise parameters or record the inputs of matmuls use buffers, which hold
        the inputs of each expert apart; without drops both give the same.
        """
        is_observed = any(self.is_mutable_collection(name) for name in (INPUTS, INPUT_MOMENTS))
        return self.dispatch == 'ragged' and not is_observed and not self.is_initializing()

    def compute_ragged(
        self,
        x_BTD: jax.Array,
        gates_MK: jax.Array,
        expert_MK: jax.Array,
        valid_M1: jax.Array | None,
    ) -> jax.Array:
        """Computes the experts on tokens that are sorted by expert, each device for its own tokens.

        Args:
          x_BTD: tokens.
          gates_MK: weights of the chosen experts.
          expert_MK: their numbers.
          valid_M1: 0 for padding; None: no padding.

        Returns:
          The weighted outputs, [B, T, D].
        """
        gates_MK = gates_MK if valid_M1 is None else gates_MK * valid_M1
        choices = (
            array_MK.reshape(*x_BTD.shape[:-1], -1)
            for array_MK in (gates_MK.astype(self.dtype), expert_MK)
        )
        weights = self.read_weights(x_BTD.shape[-1])
        return map_tokens(self.sum_experts, weights, x_BTD.astype(self.dtype), *choices)

    def read_weights(self, d_model: int) -> dict[str, jax.Array]:
        """Returns the matrices and biases of the experts, as `feed_forward` declares them."""
        width, weights = self.width, {}
        shapes = {'up': (d_model, width), 'gate': (d_model, width), 'down': (width, d_model)}
        for name, shape in shapes.items():
            if name == 'gate' and not self.activation.gated:
                continue
            axes = ('mlp', 'embed') if name == 'down' else ('embed', 'mlp')
            weights[name] = make_matrix(
                self,
                name,
                (self.n_experts, *shape),
                ('expert', *axes),
                axes[:1],
                init_gain=self.init_gain,
            )
            if self.bias:
                zeros = declare(nn.initializers.zeros, 'vector', ('expert', axes[1]))
                biases = self.param(f'{name}_bias', zeros, (self.n_experts, shape[1]))
                weights[f'{name}_bias'] = biases
        return {name: weight.astype(self.dtype) for name, weight in weights.items()}

    def sum_experts(
        self,
        weights: Mapping[str, jax.Array],
        x_BTD: jax.Array,
        gates_BTK: jax.Array,
        expert_BTK: jax.Array,
    ) -> jax.Array:
        """Returns sum_k gate_k F_k(x) [B, T, D], with ragged products over the sorted choices.

        Args:
          weights: of the experts, by name.
          x_BTD: tokens.
          gates_BTK: weights of the chosen experts.
          expert_BTK: their numbers.
        """
        top_k, d_model = self.experts_per_token, x_BTD.shape[-1]
        expert_N = expert_BTK.reshape(-1)  # N = B T K choices
        order_N = jnp.argsort(expert_N)
        sizes_E = jnp.bincount(expert_N, length=self.n_experts).astype(jnp.int32)

        def project(name, x_NI):
            y_NO = grouped_product(x_NI, weights[name], sizes_E)
            if self.bias:
                y_NO = y_NO + weights[f'{name}_bias'][expert_N[order_N]]
            return y_NO

        inputs_ND = x_BTD.reshape(-1, d_model)[order_N // top_k]
        up_NF = project('up', inputs_ND)
        if self.activation.gated:
            gate_NF = project('gate', inputs_ND)
            hidden_NF = self.activation.fn(gate_NF) * self.activation.up_fn(up_NF)
        else:
            hidden_NF = self.activation.fn(up_NF)
        y_ND = project('down', hidden_NF)[jnp.argsort(order_N)]
        y_BTKD = y_ND.reshape(*expert_BTK.shape, d_model)
        return jnp.einsum('btk,btkd->btd', gates_BTK, y_BTKD)


def expert_width(d_ff: int, granularity: int, width: int | None) -> int:
    """Returns the hidden width of an expert.

    Args:
      d_ff: hidden width of the dense MLP.
      granularity: its quotient by the width of an expert.
      width: the option `expert_width`, or None.
    """
    return d_ff // granularity if width is None else width


def check_widths(recipe: Any, part: Any) -> None:
    """Raises ValueError for a width that is given twice or does not grow, or a gate of nothing."""
    width, granularity = part.options['expert_width'], part.options['granularity']
    if width is not None and granularity != 1:
        raise ValueError(
            f'mlp.expert_width={width} sets the width that mlp.granularity={granularity} would '
            'set too. Leave one of them out.'
        )
    if width is not None and recipe.base.model.d_ff != recipe.model.d_ff:
        raise ValueError(
            f'mlp.expert_width={width} is the same in the base model of {recipe.scaling}, so that '
            'experts would not grow with the model. Set mlp.granularity instead, which divides '
            'model.d_ff.'
        )
    if part.options['shared_gate'] and not part.options['shared_experts']:
        raise ValueError(
            'mlp.shared_gate=True weighs the output of shared experts, but mlp.shared_experts=0. '
            'Set mlp.shared_experts, or leave mlp.shared_gate out.'
        )


def check_groups(part: Any) -> None:
    """Raises ValueError for groups of experts that cannot be chosen, or that change nothing."""
    groups, chosen = part.options['expert_groups'], part.options['groups_per_token']
    n_experts, top_k = part.options['n_experts'], part.options['experts_per_token']
    check_divides('mlp.expert_groups', groups, 'mlp.n_experts', n_experts)
    if chosen > groups:
        raise ValueError(
            f'mlp.groups_per_token must be at most mlp.expert_groups; got {chosen} and {groups}'
        )
    if groups == 1:
        return
    if n_experts // groups < GROUP_SCORES:
        raise ValueError(
            f'mlp.expert_groups={groups} of mlp.n_experts={n_experts} have fewer than the '
            f'{GROUP_SCORES} experts whose scores rate a group. Use fewer groups.'
        )
    if top_k > chosen * (n_experts // groups):
        raise ValueError(
            f'mlp.experts_per_token={top_k}, but mlp.groups_per_token={chosen} groups have only '
            f'{chosen * (n_experts // groups)} experts. Use more groups or fewer experts.'
        )


def check_ragged(recipe: Any, part: Any) -> None:
    """Raises ValueError for options that ragged products have no counterpart of."""
    reasons = []
    if part.options['capacity_over'] != 'batch':
        reasons.append(
            f'it has no capacity, so that mlp.capacity_over={part.options["capacity_over"]} would '
            'have no effect. Leave it out'
        )
    kernel = recipe.kernels.get('matmul')
    if kernel is not None and kernel.name != 'direct':
        reasons.append(f'it does not use {kernel}. Choose kernels.matmul=direct')
    if recipe.activation.options.get('alpha_dropout'):
        reasons.append(
            'it has no dropout of hidden activations; got mlp.alpha_dropout='
            f'{recipe.activation.options["alpha_dropout"]}. Set it to 0'
        )
    reasons += [
        f'it has no forward-mode derivative, which {chooser} needs. Choose another'
        for chooser in recipe.forward_mode_targets
    ]
    if reasons:
        raise ValueError(f'mlp.dispatch=ragged: {reasons[0]}, or choose mlp.dispatch=capacity.')


def update_biases(stats: Any, rate: jax.Array | float) -> Any:
    """Moves each bias towards experts with fewer tokens, and sets the counts to 0.

    Args:
      stats: nested dicts; a dict with BIAS and COUNTS [..., E] belongs to a layer or a stack of
        them.
      rate: the size of the change.

    Returns:
      The new `stats`.
    """
    if not isinstance(stats, Mapping):
        return stats
    if BIAS not in stats:
        return {name: update_biases(value, rate) for name, value in stats.items()}
    counts = stats[COUNTS]
    change = rate * jnp.sign(jnp.mean(counts, -1, keepdims=True) - counts)
    # As in torchtitan. A common shift changes no choice, but would let biases grow in float32.
    change = change - jnp.mean(change, -1, keepdims=True)
    return {**stats, BIAS: stats[BIAS] + change, COUNTS: jnp.zeros_like(counts)}


def mean_square_log_z(logits_ME: jax.Array, valid_M1: jax.Array | None) -> jax.Array:
    """Returns the mean of (log sum_e exp(z_e))^2 over the tokens that are not padding.

    Args:
      logits_ME: z, the logits of the router.
      valid_M1: 0 for padding; None: no padding.
    """
    squares_M = jax.nn.logsumexp(logits_ME, -1) ** 2
    if valid_M1 is None:
        return jnp.mean(squares_M)
    return jnp.sum(squares_M * valid_M1[:, 0]) / jnp.maximum(jnp.sum(valid_M1), 1.0)


def map_tokens(
    compute: Callable[..., jax.Array], weights: Any, x_BTD: jax.Array, *choices: Any
) -> jax.Array:
    """Computes compute(weights, x_BTD, *choices), on each device for its own tokens.

    A sort over the tokens of all devices would send them to each other. Each device has all
    experts; the dimensions that `tensor` shards are left to XLA.

    Args:
      compute: maps [B, T, ...] to [B, T, D].
      weights: whole on each device.
      x_BTD: tokens.
      *choices: arrays [B, T, K].
    """
    spec = partition(jax.sharding.get_abstract_mesh(), ACTIVATIONS, 'BT', x_BTD.shape[:2])
    if not spec_axes(spec):
        return compute(weights, x_BTD, *choices)
    in_specs = (PartitionSpec(), *[spec] * (1 + len(choices)))
    return map_devices(compute, in_specs, spec, 'tensor')(weights, x_BTD, *choices)


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
