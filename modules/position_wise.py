"""Base of position-wise networks (`modules.mlp`, `modules.experts`)."""

from collections.abc import Mapping
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from modules.activations import Activation, DropoutFn
from modules.facts import accept_any
from modules.interventions import HIDDEN, intervene_within
from modules.kernels import Kernels
from modules.numerics import MLP_PRODUCTS
from modules.products import prepare_input, product
from modules.statistics import next_key


class PositionWise(nn.Module):
    """Base of MLPs: a network of hidden width F, for each token or for the tokens of each expert.

    `dropout` changes the hidden activations in training.
    """

    d_ff: int
    activation: Activation
    kernels: Kernels
    dtype: jnp.dtype
    dropout: DropoutFn | None = None
    init_gain: float = 1.0

    # {row of AUXILIARIES (`modules.losses`): (option, value)}: the network sows the input of the
    # auxiliary loss if its option has the value.
    auxiliary: ClassVar[Mapping[str, tuple[str, Any]]] = {}

    check = staticmethod(accept_any)

    @staticmethod
    def finish_step(stats: Any, options: Mapping[str, Any]) -> Any:
        """Returns the STATS of the model after the last microbatch of a step: here unchanged.

        stats: of all layers. options: of the row; traced options may be tracers.
        """
        return stats

    def up_options(self) -> dict[str, Any]:
        """Returns the options of `product` that apply only to the first matrix."""
        return {}

    def feed_forward(
        self,
        x: jax.Array,
        batch: tuple[str, ...] = (),
        bias: bool = False,
        width: int | None = None,
        prefix: str = '',
    ) -> jax.Array:
        """Maps x [..., D] to [..., D].

        Args:
          x: [batch axes, ..., D].
          batch: names of the batch axes; each of their indices has separate matrices.
          bias: whether each matmul has a bias.
          width: the hidden width, F; None: `d_ff`.
          prefix: of the names of the parameters, for a second network in the same module.

        Returns:
          An array of the shape of x.
        """
        matmul: dict[str, Any] = {'matmul': self.kernels.matmul_for('mlp'), 'dtype': self.dtype}

        def project(name, x, axes, features, **overrides):
            options: dict[str, Any] = (
                matmul | {'bias': bias, 'init_gain': self.init_gain} | overrides
            )
            y = product(self, prefix + name, x, (*batch, *axes), axes[:1], features, **options)
            return checkpoint_name(y, MLP_PRODUCTS)

        d_model, width = x.shape[-1], width or self.d_ff
        inputs = prepare_input(self, f'{prefix}input', x, n_batch=len(batch), **matmul)
        up = project('up', inputs, ('embed', 'mlp'), width, **self.up_options())
        if self.activation.gated:
            gate = project('gate', inputs, ('embed', 'mlp'), width)
            hidden = self.activation.fn(gate) * self.activation.up_fn(up)
        else:
            hidden = self.activation.fn(up)
        if self.dropout is not None:  # without dropout no key is stored
            key = next_key(self, f'{prefix}dropout_key')
            hidden = hidden if key is None else self.dropout(hidden, key)
        if not batch and not prefix:  # hidden units of experts belong to changing tokens
            hidden = intervene_within(self, HIDDEN, hidden)
        return project('down', hidden, ('mlp', 'embed'), d_model)
