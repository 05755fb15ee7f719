"""The decoder-only transformer, put together from the tables of `modules/`."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from lm.base_model import base_head_dim, width_growth
from lm.check_model import stream_width
from lm.config import given, part_at
from lm.sections import Config
from modules.attention.cache import CACHE
from modules.devices import sharded
from modules.embedding import looked_up
from modules.kernels import OPERATIONS, Kernels, kernels_for
from modules.numerics import DTYPES, REMAT_POLICIES
from modules.options import build
from modules.params import LAYER, ParamSpec, declare
from modules.placements import Blocks, Depth
from modules.products import Readout, matrix
from modules.scaling import Growth
from modules.sequence import Sequence, documents, part_of_rows, whole_rows
from modules.statistics import AUXILIARY, BACKWARD_STATS, DIAGNOSTICS, STATS, is_recording
from modules.stream import moments, sink

ACTIVATIONS = 'activations'  # what the model computes on the way, where somebody asks
SHIFTS = 'shifts'  # what is added there, where it is given: its gradient is the activation's
STACKED = (  # along `layer`
    'params',
    STATS,
    BACKWARD_STATS,
    AUXILIARY,
    DIAGNOSTICS,
    ACTIVATIONS,
    SHIFTS,
    CACHE,
)


# The activations, by name: of the stream at these places.
EMBEDDING, AFTER_ATTENTION, AFTER_MLP, FINAL = 'embedding', 'after_attention', 'after_mlp', 'final'
OF_BLOCKS = (AFTER_ATTENTION, AFTER_MLP)


def norm_maker(
    config: Config,
    kernels: Kernels,
    path: str,
    axis: str,
    site: str,
    valid: jax.Array | None = None,
    order: jax.Array | int = 0,
) -> Callable[[str], nn.Module]:
    """name -> a new norm over `axis`, of the kind and with the options that the field `path` of
    the config has, and with what it has a field for of the rest.
    """
    part = part_at(config, path)
    options, wiring = given(config, part), {'site': site, 'valid': valid, 'order': order}
    wiring['rms_norm'] = kernels.rms_norm
    return lambda name: build(part.row, options, axis=axis, name=name, **wiring)


def groups_of_blocks(config: Config) -> list[Blocks]:
    """The blocks in order, by groups of equal ones."""
    placement = part_at(config, 'model.placement')
    return placement.row.blocks(config.model.n_layers, **given(config, placement))


def observed(module: nn.Module, name: str, streams: Any) -> Any:
    """The streams, laid over the devices, of which the first, [B, T, D], is recorded as the
    activation `name`.

    Nothing is computed where ACTIVATIONS is not mutable and no SHIFTS are given.
    """
    streams = jax.tree.map(lambda x_BTD: sharded(x_BTD, 'BTD'), streams)
    (x_BTD, *rest), structure = jax.tree.flatten(streams)
    if module.has_variable(SHIFTS, name):
        x_BTD = x_BTD + module.get_variable(SHIFTS, name)
    if module.is_mutable_collection(ACTIVATIONS) and not module.is_initializing():
        module.put_variable(ACTIVATIONS, name, x_BTD)
    return jax.tree.unflatten(structure, [x_BTD, *rest])


class Block(nn.Module):
    """Attention, then the MLP, each placed in the residual stream with norms of its own.

    block: this one's number, from 1.
    """

    config: Config
    kernels: Kernels
    group: Blocks

    @nn.compact
    def __call__(self, streams, block: jax.Array, sequence: Sequence):
        depth = Depth(block, self.config.model.n_layers)
        attention, mlp = self.attention(sequence.valid_BT, block), self.mlp()
        # The order of removal: MLPs from the first block on, then attention (arXiv:2507.02559).
        norms = self.norms('attention', sequence.valid_BT1, depth.blocks + block - 1)
        streams = self.group.attention(
            streams,
            lambda y: self.recorded('attention_output', attention(y, sequence), sequence),
            norms,
            depth,
        )
        streams = observed(self, AFTER_ATTENTION, streams)
        norms = self.norms('mlp', sequence.valid_BT1, block - 1)
        streams = self.group.mlp(
            streams,
            lambda y: self.recorded('mlp_output', mlp(y, sequence.valid_BT1), sequence),
            norms,
            depth,
        )
        streams = observed(self, AFTER_MLP, streams)
        x_BTD = self.recorded('residual', jax.tree.leaves(streams)[0], sequence)
        if is_recording(self):
            self.sow(DIAGNOSTICS, 'residual_sink', sink(x_BTD, sequence.valid_BT))
        return streams, None  # nn.scan carries the first and stacks the second

    def recorded(self, name, x_BTD, sequence):
        """x_BTD, whose `moments` are among the diagnostics where these are asked for."""
        if is_recording(self):
            for moment, value in moments(x_BTD, sequence.valid_BT).items():
                self.sow(DIAGNOSTICS, f'{name}_{moment}', value)
        return x_BTD

    def attention(self, valid_BT, block):
        config, model = self.config, self.config.model
        layer, position = part_at(config, 'model.attention'), part_at(config, 'model.position')
        valid_B1T1 = None if valid_BT is None else valid_BT[:, None, :, None]
        valid_BT1 = None if valid_BT is None else valid_BT[:, :, None]
        over = {'head': ('head_dim', valid_B1T1), 'model': ('qk_features', valid_BT1)}

        def qk_norm(name, over_what):
            axis, valid = over[over_what]
            return norm_maker(config, self.kernels, 'model.qk_norm', axis, 'qk', valid)(name)

        return build(
            layer.row,
            given(config, layer),
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads,
            head_dim=model.d_model // model.n_heads,
            qk_norm=qk_norm,
            rotate=functools.partial(position.row.rotate, **given(config, position)),
            slopes=position.row.slopes,
            base_head_dim=base_head_dim(config),
            block=block,
            kernels=self.kernels,
            dtype=DTYPES[model.dtype],
            bias=model.bias,
            init_gain=self.init_gain(),
            name='attention',
        )

    def mlp(self):
        config, model = self.config, self.config.model
        layer, activation = part_at(config, 'model.mlp'), part_at(config, 'model.activation')
        return build(
            layer.row,
            given(config, layer),
            d_ff=model.d_ff,
            activation=activation.row,
            dropout=activation.row.dropout(**given(config, activation)),
            kernels=self.kernels,
            dtype=DTYPES[model.dtype],
            bias=model.bias,
            init_gain=self.init_gain(),
            name='mlp',
        )

    def init_gain(self) -> float:
        placement = part_at(self.config, 'model.placement').row
        return placement.init_gain(self.config.model.n_layers)

    def norms(self, sublayer: str, valid, order):
        make = norm_maker(self.config, self.kernels, 'model.norm', 'embed', sublayer, valid, order)
        return lambda name: make(f'{sublayer}_{name}')


class Transformer(nn.Module):
    """tokens [B, T] -> logits [B, T, V], float32 at least.

    segments_BT numbers the documents of each row, to keep attention within them; None: rows are
    read as one document. valid_BT is 0 for padding, which statistics of the batch leave out; None:
    there is none. Parameters of equal blocks are stacked along `layer`, scanned or not.
    """

    config: Config
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
    ) -> tuple[jax.Array, Readout]:
        """(the last activations [B, T, D], what makes logits of them).

        For losses that never hold all logits: `model.apply(..., method='activations')`. prefix_BT
        numbers the prefixes whose tokens see each other (`modules.sequence`).
        """
        if valid_BT is not None:
            valid_BT = valid_BT.astype(jnp.float32)
        sequence = whole_rows(tokens_BT.shape[1]) if segments_BT is None else documents(segments_BT)
        return self.read(tokens_BT, sequence.replace(valid_BT=valid_BT, prefix_BT=prefix_BT))

    def part(
        self, tokens_BT: jax.Array, start_B: jax.Array, count_B: jax.Array, capacity: int
    ) -> tuple[jax.Array, Readout]:
        """`activations` of tokens start to start + count of each row, behind those that the
        collection `cache` holds, which has room for `capacity` (`lm.cached`).
        """
        return self.read(tokens_BT, part_of_rows(start_B, count_B, tokens_BT.shape[1], capacity))

    @nn.compact
    def read(self, tokens_BT: jax.Array, sequence: Sequence) -> tuple[jax.Array, Readout]:
        """`activations` of rows that a `Sequence` describes."""
        config, model = self.config, self.config.model
        placement = part_at(config, 'model.placement').row
        table_VD, x_BTD = self.embed(tokens_BT, sequence)
        norm = functools.partial(norm_maker, config, self.kernels)
        valid_BT1 = sequence.valid_BT1
        first_norm = norm('model.embedding_norm', 'embed', 'embedding', valid_BT1)('embedding_norm')
        streams = placement.split(first_norm(x_BTD.astype(DTYPES[model.dtype])))
        streams, first = observed(self, EMBEDDING, streams), 1
        for group in groups_of_blocks(config):
            blocks = self.scanned(group.count)(config, self.kernels, group, name=group.name)
            numbers_L = jnp.arange(first, first + group.count, dtype=jnp.float32)
            streams, _ = blocks(streams, numbers_L, sequence)
            first += group.count
        final_norm = norm('model.final_norm', 'embed', 'final', valid_BT1, 2 * model.n_layers)
        x_BTD = observed(self, FINAL, placement.join(streams, final_norm('final_norm')))
        return x_BTD, self.readout_of(table_VD)

    def embed(self, tokens_BT, sequence):
        """(the table [V, D], embeddings [B, T, D])."""
        model, width = self.config.model, stream_width(self.config)
        init = declare(nn.initializers.normal(1.0), 'embedding', ('vocab', 'embed'))
        table_VD = self.param('embedding', init, (self.vocab_size, width))
        x_BTD = looked_up(table_VD, tokens_BT)
        if model.embedding_scale:
            root = nn.initializers.constant(math.sqrt(width))
            x_BTD = x_BTD * self.param('embedding_scale', declare(root, 'vector', ()), ())
        if table := part_at(self.config, 'model.position').row.table:
            positions = table(self.config.data.seq_len, width, name='positions')
            x_BTD = x_BTD + jnp.broadcast_to(positions(sequence.positions_BT), x_BTD.shape)
        return table_VD, x_BTD

    def readout_of(self, table_VD) -> Readout:
        model, bias_V = self.config.model, None
        if model.tie_embeddings:
            weight_DV = tied_factor(self.config) * table_VD.T
        else:
            shape, axes = table_VD.shape[::-1], ('embed', 'vocab')
            weight_DV = matrix(self, 'readout', shape, axes, ('embed',), role='readout')
        if model.readout_bias:
            zeros = declare(nn.initializers.zeros, 'vector', ('vocab',))
            bias_V = self.param('readout_bias', zeros, (self.vocab_size,))
        dtype, softcap = DTYPES[model.dtype], model.logit_softcap
        tied = model.tie_embeddings
        return Readout(weight_DV, bias_V, softcap, self.kernels.matmul, dtype, is_table=tied)

    def scanned(self, length: int) -> type[nn.Module]:
        model = self.config.model
        block = Block
        if model.remat != 'none':
            block = nn.remat(Block, policy=REMAT_POLICIES[model.remat], prevent_cse=False)
        return nn.scan(
            block,
            variable_axes=dict.fromkeys(STACKED, 0),
            split_rngs={'params': True},
            in_axes=(0, nn.broadcast),
            length=length,
            unroll=1 if model.scan_layers else length,
            metadata_params={nn.meta.PARTITION_NAME: LAYER},
        )


def tied_factor(config: Config) -> float:
    """What the parametrisation multiplies a readout by that is the table of embeddings: where it is
    looked up in, it is an input, and a reparametrisation cannot tell.
    """
    readout = ParamSpec('readout', ('embed', 'vocab'), ('embed',))
    part, growth = part_at(config, 'scaling.name'), Growth(fan_in=width_growth(config))
    family = part_at(config, 'optim.others').row.family
    return part.row(readout, growth, family, **given(config, part)).forward


def build_model(config: Config, vocab_size: int, platform: str) -> Transformer:
    """The configured model for devices of `platform`. `lm.check` has checked its names."""
    return Transformer(config, vocab_size, chosen_kernels(config, platform))


def chosen_kernels(config: Config, platform: str) -> Kernels:
    """ValueError for one that does not run there."""
    named = {operation: getattr(config.kernels, operation) for operation in OPERATIONS}
    options = given(config, part_at(config, 'kernels.matmul'))
    return kernels_for(platform, config.kernels.implementation, matmul_options=options, **named)
