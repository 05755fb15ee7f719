"""Placements of the norms in a residual block. A new placement is some functions and a row below.

`place(x, sublayer, norm, depth) -> x`: `sublayer` maps the stream to an update, `norm(name)` makes
a new norm with that parameter name, and `depth` is the position of the block. Each placement
creates only the norms that it calls. The rows have the equations with their sources.
"""

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Annotated, Any, NamedTuple

import jax

from modules.options import Option

Layer = Callable[[jax.Array], jax.Array]
Norms = Callable[[str], Layer]


class Depth(NamedTuple):
    """The number of a block, and the number of blocks."""

    block: jax.Array  # from 1, float32; traced where blocks are scanned
    blocks: int


def pre_branch(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    return sublayer(norm('norm_in')(x))


def pre(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    return x + pre_branch(x, sublayer, norm, depth)


def post(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    return norm('norm_out')(x + sublayer(x))


def peri_branch(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    return norm('norm_out')(sublayer(norm('norm_in')(x)))


def peri(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """x + N(F(N(x))); Peri-LN also normalizes the embeddings (model.embedding_norm)."""
    return x + peri_branch(x, sublayer, norm, depth)


def output_branch(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    return norm('norm_out')(sublayer(x))


def output(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """x + N(F(x)); OLMo 2 also normalizes queries and keys, over all heads together."""
    return x + output_branch(x, sublayer, norm, depth)


def scaled_branch(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    scale = jax.lax.rsqrt(depth.block).astype(x.dtype)
    return sublayer(norm('norm_in')(x) * scale)


def layernorm_scaling(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    return x + scaled_branch(x, sublayer, norm, depth)


def deepnorm(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    """N(alpha x + F(x)) with alpha = (2 L)^(1/4), as published for decoders without encoders."""
    return norm('norm_out')((2 * depth.blocks) ** 0.25 * x + sublayer(x))


def deepnorm_gain(blocks: int) -> float:
    """(8 L)^(-1/4), a factor of the deviation of value, output and MLP matrices.

    The published deviation is Xavier's; here the parametrisation determines it.
    """
    return (8 * blocks) ** -0.25


def resi_dual(streams: Any, sublayer: Layer, norm: Norms, depth: Depth) -> Any:
    """x <- N(x + F(x)) and r <- r + F(x)."""
    x, r = streams
    update = sublayer(x)
    return norm('norm_out')(x + update), r + update


def bare(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    return x + sublayer(x)


def normed_residual(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    z = norm('norm_in')(x)
    return z + sublayer(z)


def parallel_attention(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> Any:
    """(x + A(N1(x)), x): the MLP reads the same x as attention."""
    return x + sublayer(norm('norm_in')(x)), x


def parallel_mlp(streams: Any, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    attended, x = streams
    return attended + sublayer(norm('norm_in')(x))


def shared_attention(x: jax.Array, sublayer: Layer, norm: Norms, depth: Depth) -> Any:
    """(x + A(N(x)), N(x)): the MLP reads the same N(x)."""
    y = norm('norm_in')(x)
    return x + sublayer(y), y


def shared_mlp(streams: Any, sublayer: Layer, norm: Norms, depth: Depth) -> jax.Array:
    attended, y = streams
    return attended + sublayer(y)


class Blocks(NamedTuple):
    """Equal blocks, which are scanned together.

    `name` names their parameters. `mlp` takes the return value of `attention`, and returns the
    input of the next block.
    """

    name: str
    count: int
    attention: Callable[..., Any]
    mlp: Callable[..., Any]


def repeat_block(attention: Callable, mlp: Callable) -> Callable[[int], list[Blocks]]:
    return lambda blocks: [Blocks('layers', blocks, attention, mlp)]


def post_then_pre(
    blocks: int,
    mix_fraction: Annotated[float, Option('share of the blocks with post-norm', 0, 1)] = 0.25,
) -> list[Blocks]:
    """Post-norm in the first floor(mix_fraction * L) blocks, pre-norm in the rest."""
    first = math.floor(mix_fraction * blocks + 1e-9)  # 0.3 * 10 may be 2.9999999999999996
    return _drop_empty(
        Blocks('layers_post', first, post, post), Blocks('layers_pre', blocks - first, pre, pre)
    )


def pre_norm_first(blocks: int) -> list[Blocks]:
    return _drop_empty(
        Blocks('layers_first', 1, pre, pre), Blocks('layers', blocks - 1, bare, normed_residual)
    )


def _drop_empty(*groups: Blocks) -> list[Blocks]:
    return [group for group in groups if group.count]


def check_needs(recipe: Any, part: Any) -> None:
    """Raises ValueError if another part is not the one that the placement needs."""
    chosen = {
        'model.mlp': [recipe.mlp.name],
        'model.reparam': [row.name for row in recipe.reparam],
        'attention.norm_values': [recipe.attention.options['norm_values']],
    }
    for path, names in chosen.items():
        needed = part.row.needs.get(path.split('.')[1])
        if needed is not None and needed not in names:
            raise ValueError(
                f'{part} needs {path}={needed}; got {"+".join(map(str, names))}. Leave {path} at '
                'its default, or choose another placement.'
            )


@dataclasses.dataclass(frozen=True, eq=False)  # rows are compared by identity
class Placement:
    """A row of `PLACEMENTS`.

    summary: a sentence with source and equation; more paragraphs may follow.

    blocks: blocks(L, **options) returns groups of equal blocks, in order.

    norms_updates: whether the output of a sublayer is normalized before it is added, so that
    factors have no effect.

    split, join: split maps the embeddings to the carry of the blocks; join maps that carry, with
    the final norm, to the input of the readout.

    init_gain: L -> a factor of the deviation of the matrices that `deepnorm_gain` names.

    norms_before: {sublayer: the norm that alone feeds its first matrices}, if the output of the
    sublayer is added unchanged.

    needs: other choices that belong to the method, by the name of their option or table.

    branch: branch(x, sublayer, norm, depth), if every sublayer is placed as `x + branch(x)`. Such a
    placement works with every residual stream (`modules.residual`), and another with plain alone.
    """

    summary: str
    blocks: Callable[..., list[Blocks]]
    final_norm: bool = True  # whether the stream is normalized before the readout
    norms_updates: bool = False
    split: Callable[[jax.Array], Any] = lambda x: x
    join: Callable[[Any, Layer], jax.Array] = lambda x, final_norm: final_norm(x)
    init_gain: Callable[[int], float] = lambda blocks: 1.0
    norms_before: Mapping[str, str] | None = None
    needs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    branch: Callable[..., jax.Array] | None = None
    check: Callable[[Any, Any], None] = check_needs  # of the rest of a config (`modules.facts`)


NORMED_VALUES = {'norm_values': True}
SEPARATE_NORMS = {'attention': 'attention_norm_in', 'mlp': 'mlp_norm_in'}
SHARED_NORM = {'attention': 'attention_norm_in', 'mlp': 'attention_norm_in'}

PLACEMENTS = {
    'deepnorm': Placement(
        'DeepNorm of DeepNet (arXiv:2203.00555): `x <- N(a x + F(x))`.\n\n'
        '`a = (2 L)^(1/4)` for `L` blocks. The matrices of values, attention outputs and MLPs '
        'start smaller, by a factor `(8 L)^(-1/4)`.',
        repeat_block(deepnorm, deepnorm),
        final_norm=False,
        init_gain=deepnorm_gain,
    ),
    'hybrid': Placement(
        'HybridNorm (arXiv:2503.04598): queries, keys and values are normalized.\n\n'
        'Attention: `x <- x + A(x)`.\n\nMLP: `x <- N(x) + M(N(x))`.',
        repeat_block(bare, normed_residual),
        needs=NORMED_VALUES,
    ),
    'hybrid_star': Placement(
        'HybridNorm* (arXiv:2503.04598): `hybrid` with a pre-norm first block',
        pre_norm_first,
        needs=NORMED_VALUES,
    ),
    'layernorm_scaling': Placement(
        'LayerNorm scaling, in block l (arXiv:2502.05795): `x <- x + F(N(x) / sqrt(l))`',
        repeat_block(layernorm_scaling, layernorm_scaling),
        branch=scaled_branch,
    ),
    'mix': Placement(
        'Mix-LN (arXiv:2412.13795): post-norm in the first blocks, pre-norm above', post_then_pre
    ),
    'output': Placement(
        'Norm after the sublayer, as in OLMo 2 (arXiv:2501.00656): `x <- x + N(F(x))`',
        repeat_block(output, output),
        branch=output_branch,
        norms_updates=True,
    ),
    'parallel': Placement(
        'Parallel sublayers of GPT-NeoX (arXiv:2204.06745): `x <- x + A(N_1(x)) + M(N_2(x))`.\n\n'
        'Attention `A` and the MLP `M` have separate norms. Pythia has the same blocks.',
        repeat_block(parallel_attention, parallel_mlp),
        norms_before=SEPARATE_NORMS,
    ),
    'parallel_shared': Placement(
        'Parallel sublayers of PaLM (arXiv:2204.02311): `x <- x + A(y) + M(y) with y = N(x)`.\n\n'
        'Attention `A` and the MLP `M` share a norm. GPT-J and Phi-2 have the same blocks.',
        repeat_block(shared_attention, shared_mlp),
        norms_before=SHARED_NORM,
    ),
    'peri': Placement(
        'Peri-LN (arXiv:2502.02732): `x <- x + N(F(N(x)))`.\n\n'
        'The equation is that of Sandwich-LN (arXiv:2105.13290).',
        repeat_block(peri, peri),
        branch=peri_branch,
        norms_updates=True,
    ),
    'post': Placement(
        'Post-norm of the original Transformer (arXiv:1706.03762): `x <- N(x + F(x))`',
        repeat_block(post, post),
        final_norm=False,
    ),
    'pre': Placement(
        'Pre-norm (arXiv:2002.04745): `x <- x + F(N(x))`',
        repeat_block(pre, pre),
        norms_before=SEPARATE_NORMS,
        branch=pre_branch,
    ),
    'resi_dual': Placement(
        'ResiDual, a post-norm and a pre-norm stream (arXiv:2304.14802):'
        ' `x <- N(x + F(x)), r <- r + F(x)`.\n\n'
        'Both streams start as the embeddings. The readout gets `x + N(r)`.',
        repeat_block(resi_dual, resi_dual),
        split=lambda x: (x, x),
        join=lambda streams, final_norm: streams[0] + final_norm(streams[1]),
    ),
    'wide': Placement(
        'WideNet (arXiv:2107.11817): pre-norm, with one attention and one MoE shared by all blocks',
        repeat_block(pre, pre),
        branch=pre_branch,
        needs={'mlp': 'moe', 'reparam': 'shared'},
    ),
}
