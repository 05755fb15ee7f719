"""The decoder-only transformer, put together from the tables of `modules/`."""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from lm.config import Config, ModelConfig
from modules.activations import ACTIVATIONS
from modules.attention import ATTENTIONS
from modules.kernels import Kernels, kernels_for
from modules.mlp import MLPS
from modules.norms import NORMS
from modules.params import LAYER, declare
from modules.placements import PLACEMENTS, Blocks, Depth, stream_rms
from modules.positions import POSITIONS
from modules.products import Readout, matrix
from modules.sequence import Sequence, documents, whole_rows
from modules.statistics import AUXILIARY, BACKWARD_STATS, STATS

# What a block keeps for its backward pass; a block under a policy is computed again from the rest.
REMAT_POLICIES = {
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    'full': jax.checkpoint_policies.nothing_saveable,
    'none': None,
}
# float64 is for exact comparisons, as eval.convert.commands makes them; nothing trains in it.
DTYPES = {'bfloat16': jnp.bfloat16, 'float32': jnp.float32, 'float64': jnp.float64}

DIAGNOSTICS = 'diagnostics'  # what layers record of themselves where somebody asks
STACKED = ('params', STATS, BACKWARD_STATS, AUXILIARY, DIAGNOSTICS)  # along `layer`
MIX_FRACTION = 0.25  # of arXiv:2412.13795


def norm_maker(
    config: Config,
    kind: str,
    axis: str,
    site: str,
    valid: jax.Array | None = None,
    order: jax.Array | int = 0,
) -> Callable[[str], nn.Module]:
    """name -> a new norm of that kind over `axis`, with what it has a field for of the rest and of
    the options that the config sets.
    """
    options = {**dataclasses.asdict(config.norm), 'eps': config.model.norm_eps}
    given = {name: value for name, value in options.items() if value is not None}
    given |= {'site': site, 'valid': valid, 'order': order}
    norm = NORMS[kind]
    given = _fields_of(norm, given)
    return lambda name: norm(axis=axis, name=name, **given)


def _fields_of(layer: type[nn.Module], given: dict[str, Any]) -> dict[str, Any]:
    """Those of the given values that a layer has a field for."""
    return {name: value for name, value in given.items() if name in layer.__dataclass_fields__}


def stream_width(model: ModelConfig) -> int:
    """Coordinates of the residual stream: d_model, less what the norm does without."""
    return model.d_model - NORMS[model.norm].drops


def mlp_kind(model: ModelConfig) -> str:
    """`auto` is what suits the placement; any other name is itself."""
    return PLACEMENTS[model.placement].mlp if model.mlp == 'auto' else model.mlp


def final_norm_kind(model: ModelConfig) -> str:
    """`auto` is model.norm where the placement has a final norm; any other name is itself."""
    if model.final_norm != 'auto':
        return model.final_norm
    return model.norm if PLACEMENTS[model.placement].final_norm else 'none'


def norm_kinds(model: ModelConfig) -> set[str]:
    """All norms that a model has."""
    return {model.norm, model.qk_norm, model.embedding_norm, final_norm_kind(model)}


def scales_embedding(model: ModelConfig) -> bool:
    chosen = model.embedding_scale
    return NORMS[model.norm].scales_embedding if chosen is None else chosen


def groups_of_blocks(model: ModelConfig) -> list[Blocks]:
    """The blocks in order, by groups of equal ones."""
    fraction = MIX_FRACTION if model.mix_fraction is None else model.mix_fraction
    return PLACEMENTS[model.placement].blocks(model.n_layers, fraction)


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
        attention, mlp = self.attention(sequence.valid_BT), self.mlp()
        # The order of removal: MLPs from the first block on, then attention (arXiv:2507.02559).
        norms = self.norms('attention', sequence.valid_BT1, depth.blocks + block - 1)
        streams = self.group.attention(streams, lambda y: attention(y, sequence), norms, depth)
        norms = self.norms('mlp', sequence.valid_BT1, block - 1)
        streams = self.group.mlp(streams, lambda y: mlp(y, sequence.valid_BT1), norms, depth)
        if self.is_mutable_collection(DIAGNOSTICS):
            self.sow(DIAGNOSTICS, 'residual_rms', stream_rms(streams))
        return streams, None  # nn.scan carries the first and stacks the second

    def attention(self, valid_BT):
        model = self.config.model
        placement, layer = PLACEMENTS[model.placement], ATTENTIONS[model.attention]
        valid_B1T1 = None if valid_BT is None else valid_BT[:, None, :, None]
        given = {
            'n_heads': model.n_heads,
            'n_kv_heads': model.n_kv_heads,
            'head_dim': model.d_model // model.n_heads,
            'qk_norm': norm_maker(self.config, model.qk_norm, 'head_dim', 'qk', valid_B1T1),
            'rotate': POSITIONS[model.position].rotate,
            'kernels': self.kernels,
            'dtype': DTYPES[model.dtype],
            'norm_values': placement.normed_values,
            'bias': model.bias,
            'init_gain': placement.init_gain(model.n_layers),
        }
        return layer(name='attention', **_fields_of(layer, given))

    def mlp(self):
        model = self.config.model
        layer = MLPS[mlp_kind(model)]
        given = {
            'd_ff': model.d_ff,
            'activation': ACTIVATIONS[model.activation],
            'kernels': self.kernels,
            'dtype': DTYPES[model.dtype],
            'bias': model.bias,
            'init_gain': PLACEMENTS[model.placement].init_gain(model.n_layers),
            'n_experts': model.n_experts,
            'experts_per_token': model.experts_per_token,
            'capacity_factor': model.expert_capacity,
        }
        return layer(name='mlp', **_fields_of(layer, given))

    def norms(self, sublayer: str, valid, order):
        make = norm_maker(self.config, self.config.model.norm, 'embed', sublayer, valid, order)
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

    @nn.compact
    def activations(
        self,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None = None,
        valid_BT: jax.Array | None = None,
    ) -> tuple[jax.Array, Readout]:
        """(the last activations [B, T, D], what makes logits of them).

        For losses that never hold all logits: `model.apply(..., method='activations')`.
        """
        config, model = self.config, self.config.model
        placement = PLACEMENTS[model.placement]
        if valid_BT is not None:
            valid_BT = valid_BT.astype(jnp.float32)
        sequence = whole_rows(tokens_BT.shape[1]) if segments_BT is None else documents(segments_BT)
        sequence = sequence.replace(valid_BT=valid_BT)
        table_VD, x_BTD = self.embed(tokens_BT, sequence)
        norm = norm_maker(config, model.embedding_norm, 'embed', 'embedding', sequence.valid_BT1)
        streams = placement.split(norm('embedding_norm')(x_BTD.astype(DTYPES[model.dtype])))
        first = 1
        for group in groups_of_blocks(model):
            blocks = self.scanned(group.count)(config, self.kernels, group, name=group.name)
            numbers_L = jnp.arange(first, first + group.count, dtype=jnp.float32)
            streams, _ = blocks(streams, numbers_L, sequence)
            first += group.count
        kind, order = final_norm_kind(model), 2 * model.n_layers
        norm = norm_maker(config, kind, 'embed', 'final', sequence.valid_BT1, order)
        return placement.join(streams, norm('final_norm')), self.readout_of(table_VD)

    def embed(self, tokens_BT, sequence):
        """(the table [V, D], embeddings [B, T, D])."""
        model, width = self.config.model, stream_width(self.config.model)
        init = declare(nn.initializers.normal(1.0), 'embedding', ('vocab', 'embed'))
        table_VD = self.param('embedding', init, (self.vocab_size, width))
        x_BTD = table_VD[tokens_BT]
        if scales_embedding(model):
            root = nn.initializers.constant(math.sqrt(width))
            x_BTD = x_BTD * self.param('embedding_scale', declare(root, 'vector', ()), ())
        if table := POSITIONS[model.position].table:
            positions = table(self.config.data.seq_len, width, name='positions')
            x_BTD = x_BTD + jnp.broadcast_to(positions(sequence.positions_BT), x_BTD.shape)
        return table_VD, x_BTD

    def readout_of(self, table_VD) -> Readout:
        model, bias_V = self.config.model, None
        if model.tie_embeddings:
            weight_DV = table_VD.T
        else:
            shape, axes = table_VD.shape[::-1], ('embed', 'vocab')
            weight_DV = matrix(self, 'readout', shape, axes, ('embed',), role='readout')
        if model.readout_bias:
            zeros = declare(nn.initializers.zeros, 'vector', ('vocab',))
            bias_V = self.param('readout_bias', zeros, (self.vocab_size,))
        dtype, softcap = DTYPES[model.dtype], model.logit_softcap
        return Readout(weight_DV, bias_V, softcap, self.kernels.matmul, dtype)

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


def build_model(config: Config, vocab_size: int, platform: str) -> Transformer:
    """The configured model for devices of `platform`. `lm.check` has checked its names."""
    kernels = config.kernels
    chosen = kernels_for(platform, kernels.implementation, kernels.attention, kernels.matmul)
    return Transformer(config, vocab_size, chosen)
