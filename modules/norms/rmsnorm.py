"""Root-mean-square normalization (arXiv:1910.07467) and its variants."""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from modules.kernels.rms_norm import inverse_rms, reference
from modules.norms.base import Eps, HasScale, Norm, broadcast_like, reshape_groups
from modules.options import Option
from modules.params import NORM, declare
from modules.statistics import at_least_float32


def rms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """Returns x / sqrt(mean(x^2) + eps) over the last axis, in float32 at least.

    Source: arXiv:1910.07467, equation 4.
    """
    return reference(at_least_float32(x), None, eps)


class RMSNormBase(Norm):
    """A norm that divides by the root mean square, with a kernel that the model fills in."""

    eps: Eps = 1e-6
    rms_norm: Callable[..., jax.Array] = reference

    divides_by_rms = True

    def normalize(self, x: jax.Array, scale_D: jax.Array | None = None) -> jax.Array:
        """Returns rms_normalize(x) * scale, in float32 at least."""
        return self.rms_norm(x, scale_D, self.eps, at_least_float32(x).dtype)

    def scale_parameter(self, x: jax.Array) -> jax.Array:
        """Creates the parameter `scale` [D], 1 at the start."""
        return self.vector('scale', x.shape[-1], 1.0)


class RMSNorm(RMSNormBase):
    """RMSNorm (arXiv:1910.07467): `y = g x / sqrt(mean(x^2) + eps)`.

    The mean is over the features of a token. The gain `g` [D] starts at 1; `scale=False` leaves it
    out.
    """

    scale: HasScale = True

    @nn.compact
    def __call__(self, x):
        return self.rms_norm(x, self.scale_parameter(x) if self.scale else None, self.eps)


def crms_normalize(x: jax.Array, eps: float) -> jax.Array:
    """Returns x / sqrt((sum(x^2) + sum(x)^2) / (D + 1) + eps) over the D entries of the last axis.

    They stand for D + 1 entries that sum to zero and are normalized together; in float32 at least.
    Source: arXiv:2305.14858.
    """
    x = at_least_float32(x)
    squares = jnp.sum(x**2, -1, keepdims=True) + jnp.sum(x, -1, keepdims=True) ** 2
    return x * jax.lax.rsqrt(squares / (x.shape[-1] + 1) + eps)


class CRMSNorm(Norm):
    """CRMSNorm (arXiv:2305.14858): `y = x / sqrt((sum_i x_i^2 + (sum_i x_i)^2) / (D + 1) + eps)`.

    It replaces LayerNorm on a stream with one coordinate less: the `D` coordinates of `x` stand for
    `D + 1` coordinates that sum to zero, and `D + 1` is `model.d_model`. The model equals a Pre-LN
    model of width `D + 1` whose stream has mean zero. There is no gain and no bias, since the next
    matrix contains them.
    """

    eps: Eps = 1e-6

    dropped_coordinates = 1

    @nn.compact
    def __call__(self, x):
        return crms_normalize(x, self.eps).astype(x.dtype)


class PreAffineRMSNorm(RMSNormBase):
    """RMSNorm with two gains (arXiv:2601.22966): `y = g h x / sqrt(mean((h x)^2) + eps)`.

    Both gains, `h` before the norm (`pre_scale`) and `g` after it (`scale`), are [D] and start at
    1. The paper does not give the initial `h`; the re-implementations known to us use 1.
    """

    @nn.compact
    def __call__(self, x):
        scaled = at_least_float32(x) * broadcast_like(self.vector('pre_scale', x.shape[-1], 1.0), x)
        return self.rms_norm(scaled, self.scale_parameter(x), self.eps, x.dtype)


class GatedRMSNorm(RMSNormBase):
    """GatedNorm (arXiv:2601.22966), RMSNorm with a gate: `y = n sigmoid(swish(n W_down) W_up)`.

    `n = g x / sqrt(mean(x^2) + eps)`

    `W_down` [D, r] and `W_up` [r, D], with `r` the option `rank`, are initialised, scaled and
    decayed like other matrices, so that the gate starts near 1/2. The paper gives no
    initialisation. Computed in float32.
    """

    rank: Annotated[int, Option('inner width of the gate', 1)] = 16

    @nn.compact
    def __call__(self, x):
        y = self.normalize(x, self.scale_parameter(x))
        hidden = nn.swish(y @ self.matrix('down', (self.axis, 'rank'), (x.shape[-1], self.rank)))
        gate = hidden @ self.matrix('up', ('rank', self.axis), (self.rank, x.shape[-1]))
        return (y * nn.sigmoid(gate)).astype(x.dtype)

    def matrix(self, name: str, axes: tuple[str, ...], shape: tuple[int, ...]) -> jax.Array:
        """Creates a matrix parameter.

        Args:
          name: of the parameter.
          axes: its logical axes; the first is summed over.
          shape: the sizes of the axes.
        """
        init = declare(nn.initializers.normal(1.0), 'hidden', axes, fan_in=axes[:1], part=NORM)
        param: Any = self.param(name, init, shape)  # unboxed by Flax
        return param


class SeeDNorm(RMSNormBase):
    """SeeDNorm (arXiv:2510.22777): `y = (g + alpha tanh(x^T beta)) x / sqrt(mean(x^2) + eps)`.

    The gain depends on the token itself. `x` is split into `heads` slices, each with a separate
    inner product `x^T beta`. All three parameters are [D]. The start, `g = 1`, `alpha = 1` and
    `beta = 0`, is RMSNorm. Weight decay applies to `alpha` and `beta`, but not to `g`.
    """

    heads: Annotated[
        int, Option('slices of the features, each with a separate inner product', 1)
    ] = 1

    divide_width = ('heads',)

    @nn.compact
    def __call__(self, x):
        features = x.shape[-1]
        x32 = at_least_float32(x)
        beta = self.vector('beta', features, 0.0, decayed=True)
        alpha = self.vector('alpha', features, 1.0, decayed=True)
        inner = jnp.sum(
            reshape_groups(x32 * broadcast_like(beta, x), self.heads), -1, keepdims=True
        )
        dynamic = (reshape_groups(broadcast_like(alpha, x), self.heads) * jnp.tanh(inner)).reshape(
            x.shape
        )
        gain = broadcast_like(self.scale_parameter(x), x) + dynamic
        return (self.normalize(x32) * gain).astype(x.dtype)


class AdaRMSNorm(RMSNormBase):
    """AdaRMSN of PPGT (arXiv:2504.12588): `y = x rms(alpha x + beta) / rms(x)`.

    `rms(u) = sqrt(mean(u^2) + eps)`

    The factor `rms(alpha x + beta)`, one number per token, can restore the size of the token. The
    parameters start at `alpha = 0` and `beta = 1`, which is RMSNorm without a gain. With
    `alpha = 1` and `beta = 0` the norm would be the identity. Source: the authors' code.
    """

    @nn.compact
    def __call__(self, x):
        alpha, beta = (self.vector(n, x.shape[-1], v) for n, v in (('alpha', 0.0), ('beta', 1.0)))
        x32 = at_least_float32(x)
        mapped = x32 * broadcast_like(alpha, x) + broadcast_like(beta, x)
        return (self.normalize(x32) / inverse_rms(mapped, self.eps)).astype(x.dtype)
