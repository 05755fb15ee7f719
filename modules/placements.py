"""Where the norms of a residual block sit. A new placement is functions here and a row below.

`place(x, sublayer, norm, depth) -> x`: `sublayer` maps the stream to an update, `norm(name)` makes
a new norm with that parameter name, and `depth` says which block this is. Each placement creates
the norms it calls and no others.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax

from modules.facts import demands_nothing
from modules.options import Option

Layer = Callable[[jax.Array], jax.Array]
Norms = Callable[[str], Layer]


class Depth(NamedTuple):
    """block: the number of this block, from 1, a float32 scalar that may be traced (blocks are
    scanned); blocks: how many there are.
    """

    block: jax.Array
    blocks: int


def pre(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """x + F(N(x)); the stream itself is never normalized (arXiv:2002.04745)."""
    return x + sublayer(norm('norm_in')(x))


def post(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """N(x + F(x)), the original Transformer's (arXiv:1706.03762)."""
    return norm('norm_out')(x + sublayer(x))


def peri(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """x + N(F(N(x))): the update is normalized too.

    Peri-LN (arXiv:2502.02732), which adds norms of the embeddings (model.embedding_norm) and of the
    last stream; as Sandwich-LN (arXiv:2105.13290) it is the same equation.
    """
    return x + norm('norm_out')(sublayer(norm('norm_in')(x)))


def output(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """x + N(F(x)): the update alone is normalized, as in OLMo 2 (arXiv:2501.00656).

    There queries and keys are normalized too, over all heads together; here model.qk_norm is a
    head's.
    """
    return x + norm('norm_out')(sublayer(x))


def layernorm_scaling(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """x + F(N(x) / sqrt(l)) in block l (arXiv:2502.05795)."""
    scale = jax.lax.rsqrt(depth.block).astype(x.dtype)
    return x + sublayer(norm('norm_in')(x) * scale)


def deepnorm(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """N(alpha x + F(x)) with alpha = (2 L)^(1/4) (arXiv:2203.00555, of a decoder alone)."""
    return norm('norm_out')((2 * depth.blocks) ** 0.25 * x + sublayer(x))


def deepnorm_gain(blocks: int) -> float:
    """(8 L)^(-1/4), on the deviation of value, output and MLP matrices (arXiv:2203.00555).

    The published base is Xavier's; here it is what the parametrisation gives.
    """
    return (8 * blocks) ** -0.25


def resi_dual(streams: Any, sublayer: Layer, norm: Norms, depth: Depth) -> Any:
    """x <- N(x + F(x)) and r <- r + F(x): two streams (ResiDual, arXiv:2304.14802)."""
    x, r = streams
    update = sublayer(x)
    return norm('norm_out')(x + update), r + update


def bare(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """x + F(x), without a norm of its own."""
    return x + sublayer(x)


def normed_residual(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """z + F(z) with z = N(x): the residual takes the normalized value too."""
    z = norm('norm_in')(x)
    return z + sublayer(z)


class Blocks(NamedTuple):
    """Equal blocks, scanned together. `name` is that of their parameters."""

    name: str
    count: int
    attention: Callable[..., Any]
    mlp: Callable[..., Any]


def all_alike(attention: Callable, mlp: Callable) -> Callable[[int], list[Blocks]]:
    """All blocks are equal."""
    return lambda blocks: [Blocks('layers', blocks, attention, mlp)]


def post_then_pre(
    blocks: int,
    mix_fraction: Annotated[float, Option('of the blocks, the first ones, are post-norm', 0, 1)] = (
        0.25
    ),
) -> list[Blocks]:
    """Post-norm in the first floor(mix_fraction * L) blocks, pre-norm in the rest (Mix-LN,
    arXiv:2412.13795).
    """
    first = math.floor(mix_fraction * blocks + 1e-9)  # 0.3 * 10 is 2.9999999999999996 in some order
    parts = [
        Blocks('layers_post', first, post, post),
        Blocks('layers_pre', blocks - first, pre, pre),
    ]
    return [part for part in parts if part.count]


def first_differs(blocks: int) -> list[Blocks]:
    """HybridNorm*: the first block is a pre-norm one (arXiv:2503.04598)."""
    parts = [
        Blocks('layers_first', 1, pre, pre),
        Blocks('layers', blocks - 1, bare, normed_residual),
    ]
    return [part for part in parts if part.count]


@dataclasses.dataclass(frozen=True, eq=False)  # a row is itself
class Placement:
    """One line of what it is with its source, then blocks(L, **options): the blocks, in order, by
    groups of equal ones.

    final_norm: whether the stream is normalized before the readout; post-norm already has.
    split, join: from the embeddings to what the blocks carry, and, with the final norm, from there
      to what is read out.
    norms_updates: whether what a sublayer adds is normalized first, so that factors do nothing.
    init_gain: of L blocks, on the deviation of the matrices that `deepnorm_gain` names.
    needs: other choices that are a part of the method, by the name of their option or table.
    check: its own rule (`modules.facts`).
    """

    summary: str
    blocks: Callable[..., list[Blocks]]
    final_norm: bool = True
    norms_updates: bool = False
    split: Callable[[jax.Array], Any] = lambda x: x
    join: Callable[[Any, Layer], jax.Array] = lambda x, final_norm: final_norm(x)
    init_gain: Callable[[int], float] = lambda blocks: 1.0
    needs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    check: Callable[[Any, Any], None] = demands_nothing


NORMED_VALUES = {'norm_values': True}

PLACEMENTS = {
    'deepnorm': Placement(
        'N(a x + F(x)), smaller initial matrices: DeepNet (arXiv:2203.00555)',
        all_alike(deepnorm, deepnorm),
        final_norm=False,
        init_gain=deepnorm_gain,
    ),
    'hybrid': Placement(
        "queries, keys and values normalized, the MLP's residual too: HybridNorm "
        '(arXiv:2503.04598)',
        all_alike(bare, normed_residual),
        needs=NORMED_VALUES,
    ),
    'hybrid_star': Placement(
        'hybrid with a pre-norm first block: HybridNorm* (arXiv:2503.04598)',
        first_differs,
        needs=NORMED_VALUES,
    ),
    'layernorm_scaling': Placement(
        'x + F(N(x) / sqrt(l)) in block l: the curse of depth (arXiv:2502.05795)',
        all_alike(layernorm_scaling, layernorm_scaling),
    ),
    'mix': Placement(
        'post-norm in the first blocks, pre-norm above: Mix-LN (arXiv:2412.13795)', post_then_pre
    ),
    'output': Placement(
        'x + N(F(x)): OLMo 2 (arXiv:2501.00656)', all_alike(output, output), norms_updates=True
    ),
    'peri': Placement(
        'x + N(F(N(x))): Peri-LN (arXiv:2502.02732), as an equation Sandwich-LN (arXiv:2105.13290)',
        all_alike(peri, peri),
        norms_updates=True,
    ),
    'post': Placement(
        'N(x + F(x)): the original Transformer (arXiv:1706.03762)',
        all_alike(post, post),
        final_norm=False,
    ),
    'pre': Placement('x + F(N(x)) (arXiv:2002.04745)', all_alike(pre, pre)),
    'resi_dual': Placement(
        'two streams, post- and pre-norm: ResiDual (arXiv:2304.14802)',
        all_alike(resi_dual, resi_dual),
        split=lambda x: (x, x),
        join=lambda streams, final_norm: streams[0] + final_norm(streams[1]),
    ),
    'wide': Placement(
        'pre-norm, one attention and one mixture of experts for all blocks: WideNet '
        '(arXiv:2107.11817)',
        all_alike(pre, pre),
        needs={'mlp': 'moe', 'reparam': 'shared'},
    ),
}
