"""A block of the transformer: attention and the MLP, placed in the residual stream."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from lm.config.recipe import Part, Recipe
from lm.model.base_size import base_head_dim, width_growth
from modules.attention.base import CACHE, ValueSources
from modules.attention.softmax import is_full
from modules.dropout import KEY_NAME, Dropout
from modules.interventions import COLLECTIONS, INNER, intervene
from modules.kernels import Kernels
from modules.numerics import DTYPES
from modules.parallel.axes import shard_activation
from modules.params import STREAM, declare
from modules.placements import Blocks, Depth
from modules.residual import Plain, Site
from modules.sequence import Sequence
from modules.statistics import (
    AUXILIARY,
    BACKWARD_STATS,
    DIAGNOSTICS,
    GRADIENT_ERRORS,
    INPUT_MOMENTS,
    INPUTS,
    STATS,
    is_recording,
    next_key,
)
from modules.stream import moments, sink_share

# Optional collections. The stream at the sites below, recorded if the collection is mutable.
ACTIVATIONS = 'activations'
ACTIVE = 'kept'  # whether each block is applied; the others return their input
STATE = ('params', STATS, BACKWARD_STATS, CACHE)
INPUT_COLLECTIONS = (INPUTS, INPUT_MOMENTS)
# Collections that the scan stacks along `layer`.
STACKED = (
    *STATE,
    AUXILIARY,
    DIAGNOSTICS,
    GRADIENT_ERRORS,
    *INPUT_COLLECTIONS,
    ACTIVATIONS,
    ACTIVE,
    INNER,
    *COLLECTIONS,
)
EMBEDDING, AFTER_ATTENTION, AFTER_MLP, FINAL = 'embedding', 'after_attention', 'after_mlp', 'final'
BLOCK_ACTIVATIONS = (AFTER_ATTENTION, AFTER_MLP)


def make_norm(
    part: Part,
    kernels: Kernels,
    axis: str,
    site: str,
    name: str,
    valid: jax.Array | None = None,
    order: jax.Array | int = 0,
) -> nn.Module:
    """Builds a norm layer.

    Args:
      part: the norm and its options.
      kernels: give the kernel for rms_norm.
      axis: the parameter's axis name, such as 'embed' or 'head_dim'.
      site: where the norm stands: 'attention', 'mlp', 'qk', 'embedding' or 'final'.
      name: name of the module.
      valid: 0 for padding, broadcast over the features; None if there is none.
      order: the norm's place in the order of removal.

    Returns:
      The Linen module.
    """
    wiring = {'site': site, 'valid': valid, 'order': order, 'rms_norm': kernels.rms_norm}
    return part.build(axis=axis, name=name, **wiring)


def build_stream(recipe: Recipe) -> Any:
    """Builds the residual stream, which has no parameters itself (`modules.residual`).

    A vector that is summed over with the width acts as the readout does under muP: its product
    falls as the width grows, and its learning rate stays.
    """
    return recipe.stream.build(blocks=recipe.model.n_layers, width_factor=1 / width_growth(recipe))


def stream_site(module: nn.Module, name: str, block: jax.Array | float = 0.0) -> Site:
    """Makes a `Site` whose vectors are parameters of a module, named 'NAME_stream_VECTOR'.

    Args:
      module: the block, or the model for the readout.
      name: 'attention', 'mlp', 'block' or 'readout'.
      block: number of the block, from 1.
    """

    def vector(vector_name, init, axes, shape, part=STREAM):
        declared = declare(init, 'vector', axes, part=part)
        return module.param(f'{name}_stream_{vector_name}', declared, shape)

    return Site(name, block, vector)


def carries_values(recipe: Recipe) -> bool:
    """Returns whether blocks pass on the values of the first attention layer."""
    return recipe.attention.options.get('value_residual', 'none') != 'none'


def init_carry(recipe: Recipe, streams: Any, tokens_shape: tuple[int, ...]) -> Any:
    """Returns the carry of the blocks.

    Args:
      recipe: of the model.
      streams: the residual stream, or a tree of several.
      tokens_shape: (B, T).

    Returns:
      The streams, or (streams, values of the first attention layer [B, T, K, H]).
    """
    if not carries_values(recipe):
        return streams
    shape = (*tokens_shape, recipe.model.n_kv_heads, recipe.head_dim)
    return streams, jnp.zeros(shape, DTYPES[recipe.model.dtype])


def record_stream(module: nn.Module, name: str, streams: Any, observed: Any = None) -> Any:
    """Shards the streams, and records the first, [B, T, D], as an activation.

    Neither adds operations unless ACTIVATIONS is mutable or an intervention has the name
    (`modules.interventions`).

    Args:
      module: the module whose collections hold the activation.
      name: name of the activation.
      streams: the residual stream, or a tree of several.
      observed: a row of `modules.residual`, which records another function of the streams, such as
        their sum; None: the first.

    Returns:
      The streams, with the interventions of this name on the recorded one.
    """
    if module.is_initializing():
        return streams
    streams = jax.tree.map(shard_stream, streams)
    stream = observed or Plain()
    if any(module.has_variable(collection, name) for collection in COLLECTIONS):
        streams = stream.replace(streams, intervene(module, name, stream.observe(streams)))
    if module.is_mutable_collection(ACTIVATIONS):
        module.put_variable(ACTIVATIONS, name, stream.observe(streams))
    return streams


def shard_stream(x: jax.Array) -> jax.Array:
    """Shards a stream [B, T, D], or several [S, B, T, D]."""
    return shard_activation(x, 'SBTD'[-x.ndim :]) if x.ndim > 2 else x


def identity(x: jax.Array) -> jax.Array:
    """Returns x."""
    return x


class Block(nn.Module):
    """Attention, then the MLP, each placed in the residual stream with its own norms.

    The argument `block` is the number of this block, from 1. With value embeddings it is a pair of
    this number and the values of the block's tokens [B, T, K H]. The carry is that of `init_carry`.
    """

    recipe: Recipe
    kernels: Kernels
    group: Blocks

    @nn.compact
    def __call__(self, carry: Any, block: Any, sequence: Sequence) -> tuple[Any, None]:
        streams, first_BTKH = carry if carries_values(self.recipe) else (carry, None)
        block, token_values = block if isinstance(block, tuple) else (block, None)
        depth, inputs = Depth(block, self.recipe.model.n_layers), streams
        values = ValueSources(block, first_BTKH, token_values)
        attention, mlp = self.build_attention(sequence.valid_BT, block), self.build_mlp()
        drop_probs, drop_attended, drop_mapped = self.make_dropouts(sequence)

        def attend(x):
            nonlocal first_BTKH
            y_BTD = attention(x, sequence.replace(dropout=drop_probs), values)
            if first_BTKH is not None:
                y_BTD, first_BTKH = y_BTD
            return drop_attended(self.record_moments('attention_output', y_BTD, sequence))

        def apply_mlp(x):
            return drop_mapped(
                self.record_moments('mlp_output', mlp(x, sequence.valid_BT1), sequence)
            )

        stream = build_stream(self.recipe)
        streams = stream.enter(streams, stream_site(self, 'block', block))
        # Norms are removed from the MLPs first, block by block, then from attention
        # (arXiv:2507.02559).
        norms = self.norm_factory('attention', sequence.valid_BT1, depth.blocks + block - 1)
        streams = self.place('attention', self.group.attention, streams, attend, norms, depth)
        streams = record_stream(self, AFTER_ATTENTION, streams, stream)
        norms = self.norm_factory('mlp', sequence.valid_BT1, block - 1)
        streams = self.place('mlp', self.group.mlp, streams, apply_mlp, norms, depth)
        streams = stream.leave(streams, stream_site(self, 'block', block))
        streams = record_stream(self, AFTER_MLP, self.skip_if_inactive(streams, inputs), stream)
        x_BTD = self.record_moments('residual', stream.observe(streams), sequence)
        if is_recording(self):
            self.sow(DIAGNOSTICS, 'residual_sink', sink_share(x_BTD, sequence.valid_BT))
        carry = streams if first_BTKH is None else (streams, first_BTKH)
        return carry, None  # nn.scan carries the first and stacks the second

    def place(
        self,
        name: str,
        place: Callable[..., Any],
        streams: Any,
        layer: Callable[[jax.Array], jax.Array],
        norms: Callable[[str], nn.Module],
        depth: Depth,
    ) -> Any:
        """Places a sublayer in the residual stream.

        Args:
          name: 'attention' or 'mlp'.
          place: the function of the placement.
          streams: the residual stream, or a tree of several.
          layer: the sublayer.
          norms: makes its norms.
          depth: of the block.
        """
        stream, placement = build_stream(self.recipe), self.recipe.placement.row
        if stream.is_plain:
            return place(streams, layer, norms, depth)

        def branch(x_BTD):
            return placement.branch(x_BTD, layer, norms, depth)

        site = stream_site(self, name, depth.block)
        return stream.connect(streams, site._replace(branch=branch))

    def skip_if_inactive(self, streams: Any, inputs: Any) -> Any:
        """Returns `inputs` instead of the streams if ACTIVE switches this block off."""
        if not self.has_variable(ACTIVE, ACTIVE):
            return streams
        is_active = self.get_variable(ACTIVE, ACTIVE)
        return jax.tree.map(
            lambda after, before: jnp.where(is_active, after, before), streams, inputs
        )

    def make_dropouts(self, sequence: Sequence) -> list[Any]:
        """Returns dropout functions for attention probabilities (None: no dropout), attention and
        MLP.
        """
        sites = ('attention', 'residual', 'residual')
        drops: list[Any] = [None, identity, identity]
        active_sites = self.recipe.dropout.keys() & {*sites}
        key = next_key(self, KEY_NAME) if active_sites else None
        if key is None:
            return drops
        for i, (site, site_key) in enumerate(zip(sites, jax.random.split(key, 3), strict=True)):
            if site in active_sites:
                assert sequence.rates is not None  # a training pass that drops has rates
                drops[i] = Dropout(sequence.rates[site], site_key)
        return drops

    def record_moments(self, name: str, x_BTD: jax.Array, sequence: Sequence) -> jax.Array:
        """Sows the `moments` of x_BTD if diagnostics are recorded, and returns it.

        Args:
          name: prefix of the diagnostics.
          x_BTD: activations.
          sequence: gives the tokens that are not padding.
        """
        if is_recording(self):
            for moment, value in moments(x_BTD, sequence.valid_BT).items():
                self.sow(DIAGNOSTICS, f'{name}_{moment}', value)
        return x_BTD

    def build_attention(self, valid_BT: jax.Array | None, block: jax.Array) -> nn.Module:
        """Builds the attention layer, with its norms of queries and keys and its positions."""
        recipe, model, position = self.recipe, self.recipe.model, self.recipe.position
        position_options = {**position.options, 'platform': self.kernels.platform}
        valid_B1T1 = None if valid_BT is None else valid_BT[:, None, :, None]
        valid_BT1 = None if valid_BT is None else valid_BT[:, :, None]
        axes_by_scope = {'head': ('head_dim', valid_B1T1), 'model': ('qk_features', valid_BT1)}

        def make_qk_norm(name, scope):
            axis, valid = axes_by_scope[scope]
            return make_norm(recipe.qk_norm, self.kernels, axis, 'qk', name, valid)

        layer = {'block': block, 'is_full': is_full(block, **recipe.attention.options)}
        return recipe.attention.build(
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads,
            head_dim=recipe.head_dim,
            qk_norm=make_qk_norm,
            rotate=functools.partial(position.row.rotate, **layer, **position_options),
            slopes=position.row.slopes,
            base_head_dim=base_head_dim(recipe),
            block=block,
            kernels=self.kernels,
            dtype=DTYPES[model.dtype],
            bias=model.bias,
            qkv_bias=model.qkv_bias,
            init_gain=self.init_gain(),
            name='attention',
        )

    def build_mlp(self) -> nn.Module:
        """Builds the MLP."""
        model, activation = self.recipe.model, self.recipe.activation
        return self.recipe.mlp.build(
            d_ff=model.d_ff,
            activation=activation.row,
            dropout=activation.row.dropout(**activation.options),
            kernels=self.kernels,
            dtype=DTYPES[model.dtype],
            bias=model.bias or model.mlp_bias,
            init_gain=self.init_gain(),
            name='mlp',
        )

    def init_gain(self) -> float:
        """Returns the factor of the output matrices' initial scale."""
        return self.recipe.placement.row.init_gain(self.recipe.model.n_layers)

    def norm_factory(
        self, sublayer: str, valid: jax.Array | None, order: jax.Array | int
    ) -> Callable[[str], nn.Module]:
        """Returns a function that builds a norm of a sublayer by name.

        Args:
          sublayer: 'attention' or 'mlp'.
          valid: 0 for padding, [B, T, 1]; None if there is none.
          order: the norm's place in the order of removal.
        """
        site = self.recipe.norm, self.kernels, 'embed', sublayer
        return lambda name: make_norm(*site, f'{sublayer}_{name}', valid, order)
