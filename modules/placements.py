"""Where the norms of a residual block sit.

`place(x, sublayer, norm) -> x`: `sublayer` maps the stream to an update, and `norm(name)` makes a
new norm with that parameter name. Each placement creates the norms it calls and no others.
"""

import dataclasses
from collections.abc import Callable

import jax

Map = Callable[[jax.Array], jax.Array]


def pre(x: jax.Array, sublayer: Map, norm: Callable[[str], Map]) -> jax.Array:
    """x + F(N(x)); the stream itself is never normalized (arXiv:2002.04745)."""
    return x + sublayer(norm('norm_in')(x))


def post(x: jax.Array, sublayer: Map, norm: Callable[[str], Map]) -> jax.Array:
    """N(x + F(x)), the original Transformer's (arXiv:1706.03762)."""
    return norm('norm_out')(x + sublayer(x))


def peri(x: jax.Array, sublayer: Map, norm: Callable[[str], Map]) -> jax.Array:
    """x + N(F(N(x))): the update is normalized too (Peri-LN, arXiv:2502.02732)."""
    return x + norm('norm_out')(sublayer(norm('norm_in')(x)))


@dataclasses.dataclass(frozen=True)
class Placement:
    """`final_norm`: whether the stream is normalized before the readout; post-norm already has."""

    place: Callable[..., jax.Array]
    final_norm: bool


PLACEMENTS = {
    'peri': Placement(peri, final_norm=True),
    'post': Placement(post, final_norm=False),
    'pre': Placement(pre, final_norm=True),
}
