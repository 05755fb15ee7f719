"""The position-wise two-layer network."""

import jax.numpy as jnp
from flax import linen as nn

from modules.activations import Activation
from modules.kernels import Kernels
from modules.params import declare


class MLP(nn.Module):
    """act(x W_up) W_down, or, with a gated activation, (act(x W_gate) * x W_up) W_down.

    x_MD [M, D], hidden width F. Sources: arXiv:1706.03762, equation 2; gated arXiv:2002.05202.
    """

    d_ff: int
    activation: Activation
    kernels: Kernels
    dtype: jnp.dtype

    @nn.compact
    def __call__(self, x_MD):
        d_model = x_MD.shape[-1]
        up_MF = self.project('up', x_MD, ('embed', 'mlp'), self.d_ff)
        if self.activation.gated:
            gate_MF = self.project('gate', x_MD, ('embed', 'mlp'), self.d_ff)
            hidden_MF = self.activation.fn(gate_MF) * up_MF
        else:
            hidden_MF = self.activation.fn(up_MF)
        return self.project('down', hidden_MF, ('mlp', 'embed'), d_model)

    def project(self, name, x_MI, axes, features):
        init = declare(nn.initializers.normal(1.0), role='hidden', axes=axes, fan_in=axes[:1])
        w_IO = self.param(name, init, (x_MI.shape[-1], features))
        return self.kernels.matmul(x_MI, w_IO.astype(self.dtype))
