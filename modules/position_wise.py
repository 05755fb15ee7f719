"""Base of position-wise networks (`modules.mlp`, `modules.experts`)."""

from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax.ad_checkpoint import checkpoint_name

from modules.activations import Activation, DropoutFn
from modules.facts import accept_any
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

    # Rows of AUXILIARIES (`modules.losses`) whose inputs the network sows.
    auxiliary: ClassVar[tuple[str, ...]] = ()

    check = staticmethod(accept_any)

    def up_options(self) -> dict[str, Any]:
        """Returns the options of `product` that apply only to the first matrix."""
        return {}

    def feed_forward(
        self, x: jax.Array, batch: tuple[str, ...] = (), bias: bool = False
    ) -> jax.Array:
        """Maps x [..., D] to [..., D].

        Args:
          x: [batch axes, ..., D].
          batch: names of the batch axes; each of their indices has separate matrices.
          bias: whether each matmul has a bias.

        Returns:
          An array of the shape of x.
        """
        matmul: dict[str, Any] = {'matmul': self.kernels.matmul, 'dtype': self.dtype}

        def project(name, x, axes, features, **overrides):
            options: dict[str, Any] = (
                matmul | {'bias': bias, 'init_gain': self.init_gain} | overrides
            )
            y = product(self, name, x, (*batch, *axes), axes[:1], features, **options)
            return checkpoint_name(y, MLP_PRODUCTS)

        d_model = x.shape[-1]
        inputs = prepare_input(self, 'input', x, n_batch=len(batch), **matmul)
        up = project('up', inputs, ('embed', 'mlp'), self.d_ff, **self.up_options())
        if self.activation.gated:
            gate = project('gate', inputs, ('embed', 'mlp'), self.d_ff)
            hidden = self.activation.fn(gate) * self.activation.up_fn(up)
        else:
            hidden = self.activation.fn(up)
        if self.dropout is not None:  # without dropout no key is stored
            key = next_key(self, 'dropout_key')
            hidden = hidden if key is None else self.dropout(hidden, key)
        return project('down', hidden, ('mlp', 'embed'), d_model)
