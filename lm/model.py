"""The decoder-only transformer, put together from the tables of `modules/`."""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from flax import linen as nn

from lm.config import Config, ModelConfig
from modules.activations import ACTIVATIONS
from modules.attention import ATTENTIONS
from modules.kernels import IMPLEMENTATIONS, Kernels
from modules.mlp import MLP
from modules.norms import NORMS
from modules.params import LAYER, declare
from modules.placements import PLACEMENTS
from modules.positions import POSITIONS
from modules.sequence import Sequence, documents, whole_rows

# What a block keeps for its backward pass; a block under a policy is computed again from the rest.
REMAT_POLICIES = {
    'dots': jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    'full': jax.checkpoint_policies.nothing_saveable,
    'none': None,
}
DTYPES = {'bfloat16': jnp.bfloat16, 'float32': jnp.float32}


DIAGNOSTICS = 'diagnostics'  # what layers record of themselves where somebody asks


def rms(x: jax.Array) -> jax.Array:
    """sqrt(mean(x^2)) over all of x, in float32."""
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))


def norm_maker(config: ModelConfig, kind: str, axis: str) -> Callable[[str], nn.Module]:
    """name -> a new norm of that kind over `axis`."""
    return lambda name: NORMS[kind](eps=config.norm_eps, axis=axis, name=name)


class Block(nn.Module):
    """Attention, then the MLP, each placed in the residual stream with norms of its own."""

    config: ModelConfig
    kernels: Kernels

    @nn.compact
    def __call__(self, x_MD: jax.Array, sequence: Sequence):
        config = self.config
        place = PLACEMENTS[config.placement].place
        attention = ATTENTIONS[config.attention](
            n_heads=config.n_heads,
            n_kv_heads=config.n_kv_heads,
            qk_norm=norm_maker(config, config.qk_norm, 'head_dim'),
            rotate=POSITIONS[config.position].rotate,
            kernels=self.kernels,
            dtype=DTYPES[config.dtype],
            name='attention',
        )
        activation = ACTIVATIONS[config.activation]
        mlp = MLP(config.d_ff, activation, self.kernels, DTYPES[config.dtype], name='mlp')
        x_MD = place(x_MD, lambda y_MD: attention(y_MD, sequence), self.norms('attention'))
        x_MD = place(x_MD, mlp, self.norms('mlp'))
        if self.is_mutable_collection(DIAGNOSTICS):
            self.sow(DIAGNOSTICS, 'residual_rms', rms(x_MD))
        return x_MD, None  # nn.scan carries the first and stacks the second

    def norms(self, sublayer: str):
        make = norm_maker(self.config, self.config.norm, 'embed')
        return lambda name: make(f'{sublayer}_{name}')


class Transformer(nn.Module):
    """tokens [B, T] -> logits [B * T, V] float32.

    segments_BT numbers the documents of each row, to keep attention within them; None: rows are
    read as one document. Parameters of the layers are stacked along `layer`, scanned or not.
    """

    config: ModelConfig
    vocab_size: int
    max_length: int
    kernels: Kernels

    @nn.compact
    def __call__(self, tokens_BT: jax.Array, segments_BT: jax.Array | None = None) -> jax.Array:
        config, dtype = self.config, DTYPES[self.config.dtype]
        shape = (self.vocab_size, config.d_model)
        normal = nn.initializers.normal(1.0)
        table_VD = self.param('embedding', declare(normal, 'embedding', ('vocab', 'embed')), shape)
        x_MD = table_VD[tokens_BT.reshape(-1)]
        sequence = whole_rows(tokens_BT.shape[1]) if segments_BT is None else documents(segments_BT)
        if table := POSITIONS[config.position].table:
            added_BTD = table(self.max_length, config.d_model, name='positions')(
                sequence.positions_BT
            )
            shape_BTD = (*tokens_BT.shape, config.d_model)
            x_MD = x_MD + jnp.broadcast_to(added_BTD, shape_BTD).reshape(x_MD.shape)
        x_MD, _ = self.layers()(config, self.kernels, name='layers')(x_MD.astype(dtype), sequence)
        if PLACEMENTS[config.placement].final_norm:
            x_MD = norm_maker(config, config.norm, 'embed')('final_norm')(x_MD)
        if config.tie_embeddings:
            readout_DV = table_VD.T
        else:
            init = declare(normal, 'readout', ('embed', 'vocab'), fan_in=('embed',))
            readout_DV = self.param('readout', init, shape[::-1])
        logits_MV = jnp.matmul(x_MD, readout_DV.astype(dtype), preferred_element_type=jnp.float32)
        if config.logit_softcap:
            logits_MV = config.logit_softcap * jnp.tanh(logits_MV / config.logit_softcap)
        return logits_MV

    def layers(self) -> type[nn.Module]:
        config = self.config
        block = Block
        if config.remat != 'none':
            block = nn.remat(Block, policy=REMAT_POLICIES[config.remat], prevent_cse=False)
        return nn.scan(
            block,
            variable_axes={'params': 0, DIAGNOSTICS: 0},
            split_rngs={'params': True},
            in_axes=nn.broadcast,
            length=config.n_layers,
            unroll=1 if config.scan_layers else config.n_layers,
            metadata_params={nn.meta.PARTITION_NAME: LAYER},
        )


def build_model(config: Config, vocab_size: int, platform: str) -> Transformer:
    """The configured model for devices of `platform`. `lm.check` has checked its names."""
    implementation = kernel_implementation(config.kernels.implementation, platform)
    kernels = IMPLEMENTATIONS[implementation]
    return Transformer(config.model, vocab_size, config.data.seq_len, kernels)


def kernel_implementation(name: str, platform: str) -> str:
    """`auto` is what suits the platform; any other name is itself."""
    if name != 'auto':
        return name
    return 'xla_cpu' if platform == 'cpu' else 'xla'
