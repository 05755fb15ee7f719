"""The decoder-only transformer, assembled from the tables of `modules/`."""

import math
from typing import Any, cast

import jax
import jax.numpy as jnp
from flax import linen as nn

from lm.config.recipe import Recipe
from lm.model.base_size import width_growth
from lm.model.block import (
    EMBEDDING,
    FINAL,
    STACKED,
    Block,
    build_stream,
    carries_values,
    init_carry,
    make_norm,
    record_stream,
    stream_site,
)
from lm.model.kernels import select_kernels
from lm.model.pattern import Group, block_groups, build_body
from modules.dropout import Dropout, DropoutKey
from modules.embedding import look_up_rows
from modules.kernels import Kernels
from modules.numerics import DTYPES
from modules.params import LAYER, VALUES, ParamSpec, declare
from modules.products import Readout, make_matrix
from modules.scaling import Growth
from modules.sequence import Sequence, packed_rows, partial_rows, whole_rows


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
        stream, token_values = build_stream(recipe), self.look_up_values(tokens_BT)
        streams = placement.split(x_BTD) if stream.is_plain else stream.split(x_BTD)
        streams, first = record_stream(self, EMBEDDING, streams, stream), 1
        carry = init_carry(recipe, streams, tokens_BT.shape)
        for group in block_groups(recipe):
            period = len(group.stacks)
            last = first + group.count * period
            layers: Any = jnp.arange(first, last, period, dtype=jnp.float32)
            if token_values is not None:  # without a pattern (`lm.model.check`)
                layers = layers, token_values[first - 1 : last - 1]
            carry, _ = self.scan_blocks(group)(carry, layers, sequence)
            first = last
        streams = carry[0] if carries_values(recipe) else carry
        site = recipe.final_norm, self.kernels, 'embed', 'final'
        norm = make_norm(*site, 'final_norm', valid_BT1, order=2 * model.n_layers)
        if stream.is_plain:
            x_BTD = placement.join(streams, norm)
        else:
            x_BTD = norm(stream.join(streams, stream_site(self, 'readout')))
        x_BTD = record_stream(self, FINAL, x_BTD)
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

    def look_up_values(self, tokens_BT: jax.Array) -> jax.Array | None:
        """Returns the values of each token by block [L, B, T, K H]; None without value embeddings.

        Every second block has a table, the last one included. The others get zeros.
        """
        recipe, blocks = self.recipe, self.recipe.model.n_layers
        if not recipe.attention.options.get('value_embeddings', False):
            return None
        width = recipe.head_dim * cast(int, recipe.model.n_kv_heads)
        tables = [block for block in range(blocks) if block % 2 == (blocks - 1) % 2]
        # Their deviation is that of the values, by the fan_in of their matrix (nanochat).
        spec: dict[str, Any] = {
            'part': VALUES,
            'init_gain': math.sqrt(width / recipe.stream_width),
        }
        axes = ('table', 'token', 'kv_features')
        init = declare(nn.initializers.normal(1.0), 'embedding', axes, **spec)
        shape = (len(tables), self.vocab_size, width)
        table_NVE = cast(jax.Array, self.param('value_embeddings', init, shape))
        dtype = DTYPES[recipe.model.dtype]
        zeros_BTE = jnp.zeros((*tokens_BT.shape, width), dtype)
        looked_up = {
            block: look_up_rows(table_VE, tokens_BT, axes[1:]).astype(dtype)
            for block, table_VE in zip(tables, table_NVE, strict=True)
        }
        return jnp.stack([looked_up.get(block, zeros_BTE) for block in range(blocks)])

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
            self.kernels.matmul_for('readout'),
            dtype,
            is_table=model.tie_embeddings,
        )
        return x_BTD, readout

    def scan_blocks(self, group: Group) -> nn.Module:
        """Returns a module that applies the blocks of a group, scanned or unrolled."""
        model, policy = self.recipe.model, self.recipe.remat.row
        block = nn.remat(Block, policy=policy, prevent_cse=False) if policy else Block
        body, fields = build_body(group, self.recipe, self.kernels, block)
        scanned = nn.scan(
            body,
            variable_axes=dict.fromkeys(STACKED, 0),
            split_rngs={'params': True},
            in_axes=(0, nn.broadcast),
            length=group.count,
            unroll=1 if model.scan_layers else group.count,
            metadata_params={nn.meta.PARTITION_NAME: LAYER},
        )
        return scanned(*fields, name=group.name)


def tied_factor(recipe: Recipe) -> float:
    """Returns the factor of a readout that shares its table with the embedding.

    A reparametrisation cannot have this factor, because the same table is also an input layer.
    """
    readout = ParamSpec('readout', ('embed', 'vocab'), ('embed',))
    part, growth = recipe.scaling, Growth(fan_in=width_growth(recipe))
    family = recipe.find_family(ParamSpec('embedding', ('vocab', 'embed')))
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
