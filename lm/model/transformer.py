"""The decoder-only transformer, put together from the tables of `modules/`."""

import functools
import math
from typing import Any

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

ACTIVATIONS = 'activations'  # the collection of the stream at the places below, where it is asked
SHIFTS = 'shifts'  # what is added there, where it is given: its gradient is the activation's
ACTIVE = 'kept'  # whether each block is there, where it is given; one that is not leaves its input
STATE = ('params', STATS, BACKWARD_STATS, CACHE)
INPUT_COLLECTIONS = (INPUTS, INPUT_MOMENTS)
STACKED = (
    *STATE,
    AUXILIARY,
    DIAGNOSTICS,
    *INPUT_COLLECTIONS,
    ACTIVATIONS,
    SHIFTS,
    ACTIVE,
)  # along `layer`
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
    """Builds the norm `name` over `axis` with the options of `part`."""
    wiring = {'site': site, 'valid': valid, 'order': order, 'rms_norm': kernels.rms_norm}
    return part.build(axis=axis, name=name, **wiring)


def block_groups(recipe: Recipe) -> list[Blocks]:
    """Returns the blocks in order, by groups of equal ones."""
    placement = recipe.placement
    return placement.row.blocks(recipe.model.n_layers, **placement.options)


def record_stream(module: nn.Module, name: str, streams: Any) -> Any:
    """Lays the streams over devices, and records the first, [B, T, D], as the activation `name`.

    Nothing is computed where ACTIVATIONS is not mutable and no SHIFTS are given.
    """
    if module.is_initializing():
        return streams
    streams = jax.tree.map(lambda x_BTD: shard_activation(x_BTD, 'BTD'), streams)
    (x_BTD, *rest), structure = jax.tree.flatten(streams)
    if module.has_variable(SHIFTS, name):
        x_BTD = x_BTD + module.get_variable(SHIFTS, name)
    if module.is_mutable_collection(ACTIVATIONS):
        module.put_variable(ACTIVATIONS, name, x_BTD)
    return jax.tree.unflatten(structure, [x_BTD, *rest])


def identity(x: jax.Array) -> jax.Array:
    """Returns x: nothing is dropped."""
    return x


class Block(nn.Module):
    """Attention, then the MLP, each placed in the residual stream with norms of its own.

    The argument `block` is the number of this one, from 1.
    """

    recipe: Recipe
    kernels: Kernels
    group: Blocks

    @nn.compact
    def __call__(self, streams, block: jax.Array, sequence: Sequence):
        depth, entered = Depth(block, self.recipe.model.n_layers), streams
        attention, mlp = self.build_attention(sequence.valid_BT, block), self.build_mlp()
        of_attention, of_attended, of_mapped = self.make_dropouts(sequence)

        def attend(y):
            out = attention(y, sequence.replace(dropout=of_attention))
            return of_attended(self.record_moments('attention_output', out, sequence))

        def apply_mlp(y):
            return of_mapped(
                self.record_moments('mlp_output', mlp(y, sequence.valid_BT1), sequence)
            )

        # The order of removal: MLPs from the first block on, then attention (arXiv:2507.02559).
        norms = self.norm_factory('attention', sequence.valid_BT1, depth.blocks + block - 1)
        streams = record_stream(
            self, AFTER_ATTENTION, self.group.attention(streams, attend, norms, depth)
        )
        norms = self.norm_factory('mlp', sequence.valid_BT1, block - 1)
        streams = self.skip_if_inactive(self.group.mlp(streams, apply_mlp, norms, depth), entered)
        streams = record_stream(self, AFTER_MLP, streams)
        x_BTD = self.record_moments('residual', jax.tree.leaves(streams)[0], sequence)
        if is_recording(self):
            self.sow(DIAGNOSTICS, 'residual_sink', sink_share(x_BTD, sequence.valid_BT))
        return streams, None  # nn.scan carries the first and stacks the second

    def skip_if_inactive(self, streams, inputs):
        """Returns the streams behind this block; those that entered where KEPT says it is gone."""
        if not self.has_variable(ACTIVE, ACTIVE):
            return streams
        is_kept = self.get_variable(ACTIVE, ACTIVE)
        return jax.tree.map(lambda new, old: jnp.where(is_kept, new, old), streams, inputs)

    def make_dropouts(self, sequence):
        """Returns what drops probabilities of attention (None: nothing), its result, the MLP's."""
        places, found = ('attention', 'residual', 'residual'), [None, identity, identity]
        wanted = self.recipe.dropout.keys() & {*places}
        key = next_key(self, KEY_NAME) if wanted else None
        if key is None:
            return found
        for i, (place, own) in enumerate(zip(places, jax.random.split(key, 3), strict=True)):
            if place in wanted:
                found[i] = Dropout(sequence.rates[place], own)
        return found

    def record_moments(self, name, x_BTD, sequence):
        """Returns x_BTD, and sows its `moments` where diagnostics are asked for."""
        if is_recording(self):
            for moment, value in moments(x_BTD, sequence.valid_BT).items():
                self.sow(DIAGNOSTICS, f'{name}_{moment}', value)
        return x_BTD

    def build_attention(self, valid_BT, block):
        recipe, model, position = self.recipe, self.recipe.model, self.recipe.position
        positioned = position.options | {'platform': self.kernels.platform}
        valid_B1T1 = None if valid_BT is None else valid_BT[:, None, :, None]
        valid_BT1 = None if valid_BT is None else valid_BT[:, :, None]
        over = {'head': ('head_dim', valid_B1T1), 'model': ('qk_features', valid_BT1)}

        def make_qk_norm(name, scope):
            axis, valid = over[scope]
            return make_norm(recipe.qk_norm, self.kernels, axis, 'qk', name, valid)

        layer = {'block': block, 'is_full': is_full(block, **recipe.attention.options)}
        return recipe.attention.build(
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads,
            head_dim=recipe.head_dim,
            qk_norm=make_qk_norm,
            rotate=functools.partial(position.row.rotate, **layer, **positioned),
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

    def build_mlp(self):
        model, activation = self.recipe.model, self.recipe.activation
        return self.recipe.mlp.build(
            d_ff=model.d_ff,
            activation=activation.row,
            dropout=activation.row.dropout(**activation.options),
            kernels=self.kernels,
            dtype=DTYPES[model.dtype],
            bias=model.bias,
            init_gain=self.init_gain(),
            name='mlp',
        )

    def init_gain(self) -> float:
        return self.recipe.placement.row.init_gain(self.recipe.model.n_layers)

    def norm_factory(self, sublayer: str, valid, order):
        site = self.recipe.norm, self.kernels, 'embed', sublayer
        return lambda name: make_norm(*site, f'{sublayer}_{name}', valid, order)


class Transformer(nn.Module):
    """Decoder-only transformer: tokens [B, T] -> logits [B, T, V], float32 at least.

    segments_BT numbers the documents of each row, to keep attention within them; None: each row is
    one document. valid_BT is 0 for padding, which statistics of the batch leave out; None: there is
    none. Parameters of equal blocks are stacked along `layer`, scanned or not.
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
        """Returns (the last activations [B, T, D], the readout that makes logits of them).

        Losses that never hold all logits use it: `model.apply(..., method='activations')`.
        prefix_BT numbers the prefixes whose tokens see each other (`modules.sequence`). rates: of
        dropout, by the keys of `Recipe.dropout`, for a pass of training.
        """
        if valid_BT is not None:
            valid_BT = valid_BT.astype(jnp.float32)
        sequence = (
            whole_rows(tokens_BT.shape[1]) if segments_BT is None else packed_rows(segments_BT)
        )
        given = {'valid_BT': valid_BT, 'prefix_BT': prefix_BT, 'rates': rates}
        return self.forward(tokens_BT, sequence.replace(**given))

    def part(
        self, tokens_BT: jax.Array, start_B: jax.Array, count_B: jax.Array, capacity: int
    ) -> tuple[jax.Array, Readout]:
        """Returns `activations` of tokens start to start + count of each row.

        They follow those in the collection `cache`, which has room for `capacity` tokens
        (`lm.inference.decoding`).
        """
        return self.forward(tokens_BT, partial_rows(start_B, count_B, tokens_BT.shape[1], capacity))

    @nn.compact
    def forward(self, tokens_BT: jax.Array, sequence: Sequence) -> tuple[jax.Array, Readout]:
        """Returns `activations` of rows that a `Sequence` describes."""
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

    def embed(self, tokens_BT, sequence):
        """Returns (the table [V, D], embeddings [B, T, D])."""
        model, width = self.recipe.model, self.recipe.stream_width
        init = declare(nn.initializers.normal(1.0), 'embedding', ('vocab', 'embed'))
        table_VD = self.param('embedding', init, (self.vocab_size, width))
        x_BTD = look_up_rows(table_VD, tokens_BT)
        if model.embedding_scale:
            root = nn.initializers.constant(math.sqrt(width))
            x_BTD = x_BTD * self.param('embedding_scale', declare(root, 'vector', ()), ())
        if table := self.recipe.position.row.table:
            positions = table(self.recipe.data.seq_len, width, name='positions')
            x_BTD = x_BTD + jnp.broadcast_to(positions(sequence.positions_BT), x_BTD.shape)
        if 'embedding' in self.recipe.dropout:
            key = DropoutKey(name='embedding_dropout')()
            x_BTD = x_BTD if key is None else Dropout(sequence.rates['embedding'], key)(x_BTD)
        return table_VD, x_BTD

    def build_readout(self, x_BTD, table_VD) -> tuple[jax.Array, Readout]:
        """Returns (what is read out of the last activations, the readout)."""
        model, own, bias_V = self.recipe.model, self.recipe.readout.build(), None
        if model.tie_embeddings:
            weight_DV = tied_factor(self.recipe) * table_VD.T
        else:
            shape, axes = table_VD.shape[::-1], ('embed', 'vocab')
            options = {'role': 'readout', 'init': own.init, 'frozen': own.is_frozen}
            weight_DV = make_matrix(self, 'readout', shape, axes, ('embed',), **options)
        x_BTD, weight_DV = own.inputs(x_BTD, weight_DV)
        if model.readout_bias:
            zeros = declare(nn.initializers.zeros, 'vector', ('vocab',))
            bias_V = self.param('readout_bias', zeros, (self.vocab_size,))
        dtype, tied = DTYPES[model.dtype], model.tie_embeddings
        readout = Readout(
            weight_DV, bias_V, model.logit_softcap, self.kernels.matmul, dtype, is_table=tied
        )
        return x_BTD, readout

    def scan_blocks(self, length: int) -> type[nn.Module]:
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
    """Returns the factor of a readout that is the table of embeddings too.

    A reparametrisation cannot have it: where the table is looked up, it is an input.
    """
    readout = ParamSpec('readout', ('embed', 'vocab'), ('embed',))
    part, growth = recipe.scaling, Growth(fan_in=width_growth(recipe))
    return part.row(readout, growth, recipe.others.row.family, **part.options).forward


def build_model(recipe: Recipe, vocab_size: int, platform: str) -> Transformer:
    """Builds the model of a checked recipe for devices of `platform`."""
    return Transformer(recipe, vocab_size, select_kernels(recipe, platform))
