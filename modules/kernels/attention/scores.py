"""What attention scores need besides queries and keys, and what its kernels share."""

import dataclasses

import jax
import jax.numpy as jnp

MASKED = -1e30  # finite, so that a fully masked row gives no NaN


@dataclasses.dataclass(frozen=True)
class Scores:
    """Static: what an attention layer asks of its kernel. `reference` has the equations.

    scale: of q k; None: 1 / sqrt(H).
    softcap: the bound c in c tanh(s / c); 0: none.
    window: how many tokens one attends to, itself included; None: all earlier ones.
    sinks: whether sinks_N is passed, a logit of each head that stands for no token.
    bias: whether a bias [1 or B, N, T, S] is passed, which is added to the scores.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    sinks: bool = False
    bias: bool = False

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f'a window holds the token itself, so at least 1; got {self.window}')

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def asked(self) -> dict[str, object]:
        """The fields that are not at their defaults."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in given.items() if value != getattr(Scores, name)}


def exact(x: jax.Array) -> jnp.dtype:
    """float32, or float64 where x is: what products are summed in."""
    return jnp.promote_types(x.dtype, jnp.float32)


def share_heads(x_BKTH: jax.Array, n_heads: int) -> jax.Array:
    """Each of K key or value heads serves n_heads / K consecutive query heads."""
    if x_BKTH.shape[1] == n_heads:
        return x_BKTH
    return jnp.repeat(x_BKTH, n_heads // x_BKTH.shape[1], axis=1)
