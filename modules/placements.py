"""Where the norms of a residual block sit. A new placement is functions here and a row below.

`place(x, sublayer, norm, depth) -> x`: `sublayer` maps the stream to an update, `norm(name)` makes
a new norm with that parameter name, and `depth` says which block this is. Each placement creates
the norms it calls and no others.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Map = Callable[[jax.Array], jax.Array]
Norms = Callable[[str], Map]


class Depth(NamedTuple):
    """block: the number of this block, from 1, a float32 scalar that may be traced (blocks are
    scanned); blocks: how many there are.
    """

    block: jax.Array
    blocks: int


def pre(x: jax.Array, sublayer: Map, norm: Norms, depth: Depth) -> jax.Array:
    """x + F(N(x)); the stream itself is never normalized (arXiv:2002.04745)."""
    return x + sublayer(norm('norm_in')(x))


def post(x: jax.Array, sublayer: Map, norm: Norms, depth: Depth) -> jax.Array:
    """N(x + F(x)), the original Transformer's (arXiv:1706.03762)."""
    return norm('norm_out')(x + sublayer(x))


def peri(x: jax.Array, sublayer: Map, norm: Norms, depth: Depth) -> jax.Array:
    """x + N(F(N(x))): the update is normalized too.

    Peri-LN (arXiv:2502.02732), which adds norms of the embeddings (model.embedding_norm) and of the
    last stream; as Sandwich-LN (arXiv:2105.13290) it is the same equation.
    """
    return x + norm('norm_out')(sublayer(norm('norm_in')(x)))


def output(x: jax.Array, sublayer: Map, norm: Norms, depth: Depth) -> jax.Array:
    """x + N(F(x)): the update alone is normalized, as in OLMo 2 (arXiv:2501.00656).

    There queries and keys are normalized too, over all heads together; here model.qk_norm is a
    head's.
    """
    return x + norm('norm_out')(sublayer(x))


def layernorm_scaling(x: jax.Array, sublayer: Map, norm: Norms, depth: Depth) -> jax.Array:
    """x + F(N(x) / sqrt(l)) in block l (arXiv:2502.05795)."""
    scale = jax.lax.rsqrt(depth.block).astype(x.dtype)
    return x + sublayer(norm('norm_in')(x) * scale)


def deepnorm(x: jax.Array, sublayer: Map, norm: Norms, depth: Depth) -> jax.Array:
    """N(alpha x + F(x)) with alpha = (2 L)^(1/4) (arXiv:2203.00555, of a decoder alone)."""
    return norm('norm_out')((2 * depth.blocks) ** 0.25 * x + sublayer(x))


def deepnorm_gain(blocks: int) -> float:
    """(8 L)^(-1/4), on the deviation of value, output and MLP matrices (arXiv:2203.00555).

    The published base is Xavier's; here it is what the parametrisation gives.
    """
    return (8 * blocks) ** -0.25


def resi_dual(streams: Any, sublayer: Map, norm: Norms, depth: Depth) -> Any:
    """x <- N(x + F(x)) and r <- r + F(x): two streams (ResiDual, arXiv:2304.14802)."""
    x, r = streams
    update = sublayer(x)
    return norm('norm_out')(x + update), r + update


def bare(x: jax.Array, sublayer: Map, norm: Norms, depth: Depth) -> jax.Array:
    """x + F(x), without a norm of its own."""
    return x + sublayer(x)


def normed_residual(x: jax.Array, sublayer: Map, norm: Norms, depth: Depth) -> jax.Array:
    """z + F(z) with z = N(x): the residual takes the normalized value too."""
    z = norm('norm_in')(x)
    return z + sublayer(z)


class Blocks(NamedTuple):
    """Equal blocks, scanned together. `name` is that of their parameters."""

    name: str
    count: int
    attention: Callable[..., Any]
    mlp: Callable[..., Any]


def all_alike(attention: Callable, mlp: Callable) -> Callable[[int, float], list[Blocks]]:
    return lambda blocks, fraction: [Blocks('layers', blocks, attention, mlp)]


def post_then_pre(blocks: int, fraction: float) -> list[Blocks]:
    """Post-norm in the first floor(fraction * L) blocks, pre-norm in the rest (Mix-LN,
    arXiv:2412.13795).
    """
    first = math.floor(fraction * blocks + 1e-9)  # 0.3 * 10 is 2.9999999999999996 in some order
    parts = [
        Blocks('layers_post', first, post, post),
        Blocks('layers_pre', blocks - first, pre, pre),
    ]
    return [part for part in parts if part.count]


def first_differs(blocks: int, fraction: float) -> list[Blocks]:
    """HybridNorm*: the first block is a pre-norm one (arXiv:2503.04598)."""
    parts = [
        Blocks('layers_first', 1, pre, pre),
        Blocks('layers', blocks - 1, bare, normed_residual),
    ]
    return [part for part in parts if part.count]


@dataclasses.dataclass(frozen=True)
class Placement:
    """blocks(L, fraction): the blocks, in order, by groups of equal ones.

    final_norm: whether the stream is normalized before the readout; post-norm already has.
    split, join: from the embeddings to what the blocks carry, and, with the final norm, from there
      to what is read out.
    init_gain: of L blocks, on the deviation of the matrices that `deepnorm_gain` names.
    takes_fraction: whether model.mix_fraction, `fraction` above, is read.
    normed_values: whether attention normalizes values too, as it does queries and keys
      (model.qk_norm, which then must not be none).
    shared: whether all blocks have the same matrices, each with norms of its own.
    mlp: what stands for model.mlp=auto.
    """

    blocks: Callable[[int, float], list[Blocks]]
    final_norm: bool = True
    split: Callable[[jax.Array], Any] = lambda x: x
    join: Callable[[Any, Map], jax.Array] = lambda x, final_norm: final_norm(x)
    init_gain: Callable[[int], float] = lambda blocks: 1.0
    takes_fraction: bool = False
    normed_values: bool = False
    shared: bool = False
    mlp: str = 'dense'


PLACEMENTS = {
    'deepnorm': Placement(all_alike(deepnorm, deepnorm), False, init_gain=deepnorm_gain),
    # Queries, keys and values are normalized in attention, the MLP's residual with its input.
    'hybrid': Placement(all_alike(bare, normed_residual), normed_values=True),
    'hybrid_star': Placement(first_differs, normed_values=True),
    'layernorm_scaling': Placement(all_alike(layernorm_scaling, layernorm_scaling)),
    'mix': Placement(post_then_pre, takes_fraction=True),
    'output': Placement(all_alike(output, output)),
    'peri': Placement(all_alike(peri, peri)),
    'post': Placement(all_alike(post, post), False),
    'pre': Placement(all_alike(pre, pre)),
    'resi_dual': Placement(
        all_alike(resi_dual, resi_dual),
        split=lambda x: (x, x),
        join=lambda streams, final_norm: streams[0] + final_norm(streams[1]),
    ),
    # WideNet (arXiv:2107.11817): pre-norm, one attention and one mixture of experts for all blocks.
    'wide': Placement(all_alike(pre, pre), shared=True, mlp='moe'),
}


def stream_rms(streams: Any) -> jax.Array:
    """sqrt(mean(x^2)) over all of the stream that the next block reads, in float32."""
    x = jax.tree.leaves(streams)[0]
    return jnp.sqrt(jnp.mean(jnp.square(x.astype(jnp.float32))))
