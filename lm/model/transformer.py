"""The decoder-only transformer, assembled from the tables of `modules/`."""

import functools
import math
from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from lm.config.recipe import Part, Recipe
from lm.model.base_size import base_head_dim, width_growth
from lm.model.kernels import select_kernels
from modules.attention.base import CACHE
from modules.attention.softmax import is_full
from modules.dropout import KEY_NAME, Dropout, DropoutKey
from modules.embedding import look_up_rows
from modules.kernels import Kernels
from modules.numerics import DTYPES
from modules.parallel.axes import shard_activation
from modules.params import LAYER, ParamSpec, declare
from modules.placements import Blocks, Depth
from modules.products import Readout, make_matrix
from modules.scaling import Growth
from modules.sequence import Sequence, packed_rows, partial_rows, whole_rows
from modules.statistics import (
    AUXILIARY,
    BACKWARD_STATS,
    DIAGNOSTICS,
    INPUT_MOMENTS,
    INPUTS,
    STATS,
    is_recording,
    next_key,
)
from modules.stream import moments, sink_share

# Optional collections. The stream at the sites below, recorded if the collection is mutable.
ACTIVATIONS = 'activations'
SHIFTS = 'shifts'  # added to the stream there, so that their gradient is the activation's
ACTIVE = 'kept'  # whether each block is applied; the others return their input
STATE = ('params', STATS, BACKWARD_STATS, CACHE)
INPUT_COLLECTIONS = (INPUTS, INPUT_MOMENTS)
# Collections that the scan stacks along `layer`.
STACKED = (*STATE, AUXILIARY, DIAGNOSTICS, *INPUT_COLLECTIONS, ACTIVATIONS, SHIFTS, ACTIVE)
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


def block_groups(recipe: Recipe) -> list[Blocks]:
    """Returns the blocks in order, grouped by equal structure."""
    placement = recipe.placement
    return placement.row.blocks(recipe.model.n_layers, **placement.options)


def record_stream(module: nn.Module, name: str, streams: Any) -> Any:
    """Shards the streams, and records the first, [B, T, D], as an activation.

    Neither adds operations unless ACTIVATIONS is mutable or SHIFTS has the name.

    Args:
      module: the module whose collections hold the activation.
      name: name of the activation.
      streams: the residual stream, or a tree of several.

    Returns:
      The streams, with the shift of this name added to the first.
    """
    if module.is_initializing():
        return streams
    streams = jax.tree.map(lambda x_BTD: shard_activation(x_BTD, 'BTD'), streams)
    (x_BTD, *later_streams), structure = jax.tree.flatten(streams)
    if module.has_variable(SHIFTS, name):
        x_BTD = x_BTD + module.get_variable(SHIFTS, name)
    if module.is_mutable_collection(ACTIVATIONS):
        module.put_variable(ACTIVATIONS, name, x_BTD)
    return jax.tree.unflatten(structure, [x_BTD, *later_streams])


def identity(x: jax.Array) -> jax.Array:
    """Returns x."""
    return x


class Block(nn.Module):
    """Attention, then the MLP, each placed in the residual stream with its own norms.

    The argument `block` is the number of this block, from 1.
    """

    recipe: Recipe
    kernels: Kernels
    group: Blocks

    @nn.compact
    def __call__(self, streams: Any, block: jax.Array, sequence: Sequence) -> tuple[Any, None]:
        depth, inputs = Depth(block, self.recipe.model.n_layers), streams
        attention, mlp = self.build_attention(sequence.valid_BT, block), self.build_mlp()
        drop_probs, drop_attended, drop_mapped = self.make_dropouts(sequence)

        def attend(x):
            y_BTD = attention(x, sequence.replace(dropout=drop_probs))
            return drop_attended(self.record_moments('attention_output', y_BTD, sequence))

        def apply_mlp(x):
            return drop_mapped(
                self.record_moments('mlp_output', mlp(x, sequence.valid_BT1), sequence)
            )

        # Norms are removed from the MLPs first, block by block, then from attention
        # (arXiv:2507.02559).
        norms = self.norm_factory('attention', sequence.valid_BT1, depth.blocks + block - 1)
        streams = record_stream(
            self, AFTER_ATTENTION, self.group.attention(streams, attend, norms, depth)
        )
        norms = self.norm_factory('mlp', sequence.valid_BT1, block - 1)
        streams = self.skip_if_inactive(self.group.mlp(streams, apply_mlp, norms, depth), inputs)
        streams = record_stream(self, AFTER_MLP, streams)
        x_BTD = self.record_moments('residual', jax.tree.leaves(streams)[0], sequence)
        if is_recording(self):
            self.sow(DIAGNOSTICS, 'residual_sink', sink_share(x_BTD, sequence.valid_BT))
        return streams, None  # nn.scan carries the first and stacks the second

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


class Transformer(nn.Module):
    """Decoder-only transformer: tokens [B, T] -> logits [B, T, V], at least float32.

    segments_BT numbers the documents of each row, and attention stays within them; None if each row
    is one document. valid_BT is 0 for padding, which batch statistics ignore; None if there is no
    padding. Parameters of equal blocks are stacked along `layer`, scanned or not.
    """

    recipe: Recipe
    vocab_size: int
    kernels: Kernels

    def __call__(
        self,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None = None,
        valid_BT: jax.Array | None = None,
    ) -> jax.Array:
        x_BTD, readout = self.activations(tokens_BT, segments_BT, valid_BT)
        return readout(x_BTD)

    def activations(
        self,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None = None,
        valid_BT: jax.Array | None = None,
        prefix_BT: jax.Array | None = None,
        rates: dict[str, jax.Array] | None = None,
    ) -> tuple[jax.Array, Readout]:
        """Computes the last activations and the readout that maps them to logits.

        Losses that never hold all logits use it: `model.apply(..., method='activations')`.

        Args:
          tokens_BT: token ids.
          segments_BT: numbers of documents; None if each row is one document.
          valid_BT: 0 for padding; None if there is none.
          prefix_BT: numbers of prefixes, whose tokens see each other (`modules.sequence`).
          rates: dropout rates by the keys of `Recipe.dropout`, in training.

        Returns:
          (activations [B, T, D], readout).
        """
        if valid_BT is not None:
            valid_BT = valid_BT.astype(jnp.float32)
        sequence = (
            whole_rows(tokens_BT.shape[1]) if segments_BT is None else packed_rows(segments_BT)
        )
        fields = {'valid_BT': valid_BT, 'prefix_BT': prefix_BT, 'rates': rates}
        return self.forward(tokens_BT, sequence.replace(**fields))

    def extend(
        self, tokens_BT: jax.Array, start_B: jax.Array, count_B: jax.Array, capacity: int
    ) -> tuple[jax.Array, Readout]:
        """Computes `activations` of tokens start to start + count of each row.

        They follow the tokens in the collection `cache` (`lm.inference.decoding`).

        Args:
          tokens_BT: token ids, padded to T.
          start_B: number of cached tokens of each row.
          count_B: number of new tokens of each row.
          capacity: the most tokens that a row may have.

        Returns:
          (activations [B, T, D], readout).
        """
        return self.forward(tokens_BT, partial_rows(start_B, count_B, tokens_BT.shape[1], capacity))

    @nn.compact
    def forward(self, tokens_BT: jax.Array, sequence: Sequence) -> tuple[jax.Array, Readout]:
        """Computes `activations` of rows that a `Sequence` describes."""
        recipe, model, placement = self.recipe, self.recipe.model, self.recipe.placement.row
        table_VD, x_BTD = self.embed(tokens_BT, sequence)
        valid_BT1 = sequence.valid_BT1
        site = recipe.embedding_norm, self.kernels, 'embed', 'embedding'
        x_BTD = make_norm(*site, 'embedding_norm', valid_BT1)(x_BTD.astype(DTYPES[model.dtype]))
        streams = placement.split(x_BTD)
        streams, first = record_stream(self, EMBEDDING, streams), 1
        for group in block_groups(recipe):
            blocks = self.scan_blocks(group.count)(recipe, self.kernels, group, name=group.name)
            numbers_L = jnp.arange(first, first + group.count, dtype=jnp.float32)
            streams, _ = blocks(streams, numbers_L, sequence)
            first += group.count
        site = recipe.final_norm, self.kernels, 'embed', 'final'
        norm = make_norm(*site, 'final_norm', valid_BT1, order=2 * model.n_layers)
        x_BTD = record_stream(self, FINAL, placement.join(streams, norm))
        return self.build_readout(x_BTD, table_VD)

    def embed(self, tokens_BT: jax.Array, sequence: Sequence) -> tuple[jax.Array, jax.Array]:
        """Returns (table [V, D], embeddings [B, T, D])."""
        model, width = self.recipe.model, self.recipe.stream_width
        init = declare(nn.initializers.normal(1.0), 'embedding', ('vocab', 'embed'))
        # `self.param` returns the array in the box that the initializer declares.
        table_VD = cast(jax.Array, self.param('embedding', init, (self.vocab_size, width)))
        x_BTD = look_up_rows(table_VD, tokens_BT)
        if model.embedding_scale:
            root = nn.initializers.constant(math.sqrt(width))
            scale = cast(jax.Array, self.param('embedding_scale', declare(root, 'vector', ()), ()))
            x_BTD = x_BTD * scale
        if table := self.recipe.position.row.table:
            positions = table(self.recipe.data.seq_len, width, name='positions')
            x_BTD = x_BTD + jnp.broadcast_to(positions(sequence.positions_BT), x_BTD.shape)
        if 'embedding' in self.recipe.dropout:
            key = DropoutKey(name='embedding_dropout')()
            if key is not None:
                assert sequence.rates is not None  # a training pass that drops has rates
                x_BTD = Dropout(sequence.rates['embedding'], key)(x_BTD)
        return table_VD, x_BTD

    def build_readout(self, x_BTD: jax.Array, table_VD: jax.Array) -> tuple[jax.Array, Readout]:
        """Returns (activations as the readout takes them, readout)."""
        model, layer, bias_V = self.recipe.model, self.recipe.readout.build(), None
        if model.tie_embeddings:
            weight_DV = tied_factor(self.recipe) * table_VD.T
        else:
            shape, axes = table_VD.shape[::-1], ('embed', 'vocab')
            options = {'role': 'readout', 'init': layer.init, 'frozen': layer.is_frozen}
            weight_DV = make_matrix(self, 'readout', shape, axes, ('embed',), **options)
        x_BTD, weight_DV = layer.inputs(x_BTD, weight_DV)
        if model.readout_bias:
            zeros = declare(nn.initializers.zeros, 'vector', ('vocab',))
            bias_V = cast(jax.Array, self.param('readout_bias', zeros, (self.vocab_size,)))
        dtype: Any = DTYPES[model.dtype]
        readout = Readout(
            weight_DV,
            bias_V,
            model.logit_softcap,
            self.kernels.matmul,
            dtype,
            is_table=model.tie_embeddings,
        )
        return x_BTD, readout

    def scan_blocks(self, length: int) -> type[nn.Module]:
        """Returns a module class that applies `length` blocks, scanned or unrolled."""
        model, policy = self.recipe.model, self.recipe.remat.row
        return nn.scan(
            nn.remat(Block, policy=policy, prevent_cse=False) if policy else Block,
            variable_axes=dict.fromkeys(STACKED, 0),
            split_rngs={'params': True},
            in_axes=(0, nn.broadcast),
            length=length,
            unroll=1 if model.scan_layers else length,
            metadata_params={nn.meta.PARTITION_NAME: LAYER},
        )


def tied_factor(recipe: Recipe) -> float:
    """Returns the factor of a readout that shares its table with the embedding.

    A reparametrisation cannot have this factor, because the same table is also an input layer.
    """
    readout = ParamSpec('readout', ('embed', 'vocab'), ('embed',))
    part, growth = recipe.scaling, Growth(fan_in=width_growth(recipe))
    family = recipe.group_optimizers['embedding'].row.family
    return part.row(readout, growth, family, **part.options).forward


def build_model(recipe: Recipe, vocab_size: int, platform: str) -> Transformer:
    """Builds the model of a checked recipe.

    Args:
      recipe: the checked recipe.
      vocab_size: tokens of the vocabulary, V.
      platform: 'cpu', 'gpu' or 'tpu'.

    Returns:
      The Linen module, with the platform's kernels.
    """
    return Transformer(recipe, vocab_size, select_kernels(recipe, platform))
