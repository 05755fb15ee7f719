"""What attention scores need besides queries and keys, and what its kernels share."""

import dataclasses
from typing import Any

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
    slopes: whether slopes_N is passed, by which the logits of a head fall with each token back.
    key_bias: whether key_bias_BKS is passed, which is added to all logits of a key.
    prefix: whether prefix_BT is passed: tokens of one number that is not 0 see each other, later
    ones too.
    """

    scale: float | None = None
    softcap: float = 0.0
    window: int | None = None
    sinks: bool = False
    slopes: bool = False
    key_bias: bool = False
    prefix: bool = False

    def __post_init__(self):
        if self.window is not None and self.window < 1:
            raise ValueError(f'a window holds the token itself, so at least 1; got {self.window}')

    def scale_of(self, head_dim: int) -> float:
        return head_dim**-0.5 if self.scale is None else self.scale

    def asked(self) -> dict[str, object]:
        """The fields that are not at their defaults."""
        given = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        return {name: value for name, value in given.items() if value != getattr(Scores, name)}

    def check_arrays(self, arrays: dict[str, Any]) -> dict[str, Any]:
        """Those of `arrays` (sinks_N, slopes_N, key_bias_BKS, prefix_BT) that are not None;
        ValueError where one comes without its field, or does not come with it.
        """
        for argument, array in arrays.items():
            announced = getattr(self, argument.rpartition('_')[0])
            if announced != (array is not None):
                came = 'is missing' if announced else 'came all the same'
                raise ValueError(f'{argument} {came} with {self}')
        return {argument: array for argument, array in arrays.items() if array is not None}


def exact(x: jax.Array) -> jnp.dtype:
    """float32, or float64 where x is: what products are summed in."""
    return jnp.promote_types(x.dtype, jnp.float32)


def share_heads(x_BKTH: jax.Array, n_heads: int) -> jax.Array:
    """Each of K key or value heads serves n_heads / K consecutive query heads."""
    if x_BKTH.shape[1] == n_heads:
        return x_BKTH
    return jnp.repeat(x_BKTH, n_heads // x_BKTH.shape[1], axis=1)
