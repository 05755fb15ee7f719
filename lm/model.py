"""The decoder-only transformer, put together from the tables of `modules/`."""

import dataclasses
import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from lm.config import Config, ModelConfig
from modules.activations import ACTIVATIONS
from modules.attention import ATTENTIONS
from modules.kernels import IMPLEMENTATIONS, Kernels
from modules.mlp import MLPS
from modules.norms import NORMS
from modules.params import LAYER, declare
from modules.placements import PLACEMENTS, Blocks, Depth, stream_rms
from modules.positions import POSITIONS
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
    given = {name: value for name, value in given.items() if name in norm.__dataclass_fields__}
    return lambda name: norm(axis=axis, name=name, **given)


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
    like: Blocks

    @nn.compact
    def __call__(self, streams, block: jax.Array, sequence: Sequence):
        depth = Depth(block, self.config.model.n_layers)
        valid_BT = sequence.valid_BT
        valid_M1 = None if valid_BT is None else valid_BT.reshape(-1, 1)
        attention, mlp = self.attention(valid_BT), self.mlp()
        # The order of removal: MLPs from the first block on, then attention (arXiv:2507.02559).
        norms = self.norms('attention', valid_M1, depth.blocks + block - 1)
        streams = self.like.attention(streams, lambda y: attention(y, sequence), norms, depth)
        norms = self.norms('mlp', valid_M1, block - 1)
        streams = self.like.mlp(streams, lambda y: mlp(y, valid_M1), norms, depth)
        if self.is_mutable_collection(DIAGNOSTICS):
            self.sow(DIAGNOSTICS, 'residual_rms', stream_rms(streams))
        return streams, None  # nn.scan carries the first and stacks the second

    def attention(self, valid_BT):
        model = self.config.model
        placement = PLACEMENTS[model.placement]
        valid = None if valid_BT is None else valid_BT[:, None, :, None]
        return ATTENTIONS[model.attention](
            n_heads=model.n_heads,
            n_kv_heads=model.n_kv_heads,
            head_dim=model.d_model // model.n_heads,
            qk_norm=norm_maker(self.config, model.qk_norm, 'head_dim', 'qk', valid),
            rotate=POSITIONS[model.position].rotate,
            kernels=self.kernels,
            dtype=DTYPES[model.dtype],
            norm_values=placement.normed_values,
            bias=model.bias,
            init_gain=placement.init_gain(model.n_layers),
            name='attention',
        )

    def mlp(self):
        model = self.config.model
        kind, options = mlp_kind(model), {}
        if kind == 'moe':
            options = {
                'n_experts': model.n_experts,
                'experts_per_token': model.experts_per_token,
                'capacity_factor': model.expert_capacity,
            }
        return MLPS[kind](
            model.d_ff,
            ACTIVATIONS[model.activation],
            self.kernels,
            DTYPES[model.dtype],
            bias=model.bias,
            init_gain=PLACEMENTS[model.placement].init_gain(model.n_layers),
            name='mlp',
            **options,
        )

    def norms(self, sublayer: str, valid, order):
        make = norm_maker(self.config, self.config.model.norm, 'embed', sublayer, valid, order)
        return lambda name: make(f'{sublayer}_{name}')


class Transformer(nn.Module):
    """tokens [B, T] -> logits [B * T, V], float32 at least.

    segments_BT numbers the documents of each row, to keep attention within them; None: rows are
    read as one document. valid_BT is 0 for padding, which statistics of the batch leave out; None:
    there is none. Parameters of equal blocks are stacked along `layer`, scanned or not.
    """

    config: Config
    vocab_size: int
    kernels: Kernels

    @nn.compact
    def __call__(
        self,
        tokens_BT: jax.Array,
        segments_BT: jax.Array | None = None,
        valid_BT: jax.Array | None = None,
    ) -> jax.Array:
        config, model = self.config, self.config.model
        dtype, placement = DTYPES[model.dtype], PLACEMENTS[model.placement]
        if valid_BT is not None:
            valid_BT = valid_BT.astype(jnp.float32)
        sequence = whole_rows(tokens_BT.shape[1]) if segments_BT is None else documents(segments_BT)
        sequence = sequence.replace(valid_BT=valid_BT)
        valid_M1 = None if valid_BT is None else valid_BT.reshape(-1, 1)
        table_VD, x_MD = self.embed(tokens_BT, sequence)
        norm = norm_maker(config, model.embedding_norm, 'embed', 'embedding', valid_M1)
        streams = placement.split(norm('embedding_norm')(x_MD.astype(dtype)))
        first = 1
        for like in groups_of_blocks(model):
            blocks = self.scanned(like.count)(config, self.kernels, like, name=like.name)
            numbers_L = jnp.arange(first, first + like.count, dtype=jnp.float32)
            streams, _ = blocks(streams, numbers_L, sequence)
            first += like.count
        kind, order = final_norm_kind(model), 2 * model.n_layers
        norm = norm_maker(config, kind, 'embed', 'final', valid_M1, order)
        x_MD = placement.join(streams, norm('final_norm'))
        return self.read_out(x_MD, table_VD)

    def embed(self, tokens_BT, sequence):
        """(the table [V, D], embeddings [M, D])."""
        model, width = self.config.model, stream_width(self.config.model)
        init = declare(nn.initializers.normal(1.0), 'embedding', ('vocab', 'embed'))
        table_VD = self.param('embedding', init, (self.vocab_size, width))
        x_MD = table_VD[tokens_BT.reshape(-1)]
        if scales_embedding(model):
            root = nn.initializers.constant(math.sqrt(width))
            x_MD = x_MD * self.param('embedding_scale', declare(root, 'vector', ()), ())
        if table := POSITIONS[model.position].table:
            positions = table(self.config.data.seq_len, width, name='positions')
            shape_BTD = (*tokens_BT.shape, width)
            added_BTD = jnp.broadcast_to(positions(sequence.positions_BT), shape_BTD)
            x_MD = x_MD + added_BTD.reshape(x_MD.shape)
        return table_VD, x_MD

    def read_out(self, x_MD, table_VD):
        model, dtype = self.config.model, DTYPES[self.config.model.dtype]
        if model.tie_embeddings:
            readout_DV = table_VD.T
        else:
            normal = nn.initializers.normal(1.0)
            init = declare(normal, 'readout', ('embed', 'vocab'), fan_in=('embed',))
            readout_DV = self.param('readout', init, (x_MD.shape[-1], self.vocab_size))
        exact = jnp.promote_types(dtype, jnp.float32)
        logits_MV = jnp.matmul(x_MD, readout_DV.astype(dtype), preferred_element_type=exact)
        if model.readout_bias:
            zeros = declare(nn.initializers.zeros, 'vector', ('vocab',))
            bias_V = self.param('readout_bias', zeros, (self.vocab_size,))
            logits_MV = logits_MV + jnp.broadcast_to(bias_V, logits_MV.shape)
        if model.logit_softcap:
            logits_MV = model.logit_softcap * jnp.tanh(logits_MV / model.logit_softcap)
        return logits_MV

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
    implementation = kernel_implementation(config.kernels.implementation, platform)
    return Transformer(config, vocab_size, IMPLEMENTATIONS[implementation])


def kernel_implementation(name: str, platform: str) -> str:
    """`auto` is what suits the platform; any other name is itself."""
    if name != 'auto':
        return name
    return 'xla_cpu' if platform == 'cpu' else 'xla'
