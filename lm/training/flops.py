"""Counts the floating-point operations of a training step."""

import math

from lm.config.recipe import Recipe
from lm.model.pattern import block_stacks
from lm.training.state import Learner
from modules.params import LOOKUP, MATMUL, USES, VECTOR, named_leaves


def count_matmul_params(learner: Learner) -> int:
    """Counts the weights that multiply a token's activations: matrices and the readout.

    Only the experts that a token passes through count, and the router. Shared matrices count once
    for each block that uses them. A matrix has a fan_in; a matrix in a norm of queries or keys,
    which multiplies each head, counts once.
    """
    count, recipe = 0, learner.recipe
    shapes = named_leaves(learner.description.used_shapes)
    for path, spec in named_leaves(learner.description.used_specs).items():
        shape = dict(zip(spec.axes, shapes[path].shape, strict=True))
        if 'expert' in shape:
            shape['expert'] = experts_per_token(recipe, path)
        # Looking up an embedding multiplies nothing; a tied table counts, because it is the
        # readout.
        is_table = spec.role == 'embedding' and 'vocab' in shape
        if spec.fan_in or (is_table and recipe.model.tie_embeddings):
            count += math.prod(shape.values())
    return count


def experts_per_token(recipe: Recipe, path: str) -> int:
    """Returns the experts of a token in the blocks whose parameter has this path."""
    (stack,) = [stack for stack in block_stacks(recipe) if path.startswith(f'{stack.path}/')]
    return stack.recipe.mlp.options['experts_per_token']


def count_by_use(learner: Learner) -> dict[str, int]:
    """Counts the stored parameters by what a token does with them.

    `lookup`: rows of tables that are read, without products. `matmul`: matrices, all experts
    included, and a table that is also the readout. `vector`: gains, biases and scalars.
    """
    counts = dict.fromkeys(USES, 0)
    shapes = named_leaves(learner.description.shapes)
    for path, spec in named_leaves(learner.description.specs).items():
        use = MATMUL if spec.fan_in else VECTOR
        if spec.role == 'embedding':
            is_readout = 'vocab' in spec.axes and learner.recipe.model.tie_embeddings
            use = MATMUL if is_readout else LOOKUP
        counts[use] += math.prod(shapes[path].shape)
    return counts


def stream_products(recipe: Recipe) -> int:
    """Returns the products that the residual stream computes for a token (`modules.residual`)."""
    part, model = recipe.stream, recipe.model
    return part.row.products(model.d_model, model.n_layers, **part.options)


def flops_per_token(learner: Learner) -> float:
    """Returns 6 (N + S) + `attention_flops`: forward and backward, per token of a sequence.

    N = `count_matmul_params`, with 2 operations forward and 4 backward (arXiv:2001.08361, section
    2.1), and S = `stream_products`. Recomputation under remat is not counted.
    """
    products = count_matmul_params(learner) + stream_products(learner.recipe)
    return 6 * products + attention_flops(learner.recipe)


def flops_by_stage(learner: Learner) -> tuple[float, ...]:
    """Returns `flops_per_token` in each stage of the run, whose rows may have other lengths."""
    products = count_matmul_params(learner) + stream_products(learner.recipe)
    return tuple(6 * products + attention_flops(r) for r in learner.recipe.stage_recipes)


def mean_flops_per_token(learner: Learner) -> float:
    """Returns `flops_per_token`, on average over the tokens of all stages of the run."""
    stages = learner.recipe.stages
    flops = flops_by_stage(learner)
    if len({*flops}) == 1:
        return flops[0]
    tokens = [stage.stop_tokens - stage.start_tokens for stage in stages]
    return math.fsum(f * n for f, n in zip(flops, tokens, strict=True)) / sum(tokens)


def flops_in_full(learner: Learner) -> float:
    """Returns `flops_per_token` with all pairs of tokens counted (arXiv:2204.02311, app. B).

    This convention includes pairs that a causal mask or a window leaves out.
    """
    products = count_matmul_params(learner) + stream_products(learner.recipe)
    return 6 * products + attention_flops(learner.recipe, in_full=True)


def attention_flops(recipe: Recipe, in_full: bool = False) -> float:
    """Returns 12 N H for each pair of tokens, per token and all layers (arXiv:2204.02311, app. B).

    N is the number of heads and H their width. Each form of attention counts the pairs in its
    definition (`attended_tokens`), whether or not a kernel computes others too. With in_full all
    pairs of a row count (`attended_tokens_unmasked`).
    """
    flops = 0.0
    for block, kind in enumerate(recipe.layers, 1):
        layer = kind.attention
        count = layer.row.attended_tokens_unmasked if in_full else layer.row.attended_tokens
        heads, width = layer.row.mixed_sizes(recipe.model.n_heads, recipe.head_dim, **layer.options)
        pairs = count(recipe.data.seq_len, width, block, **layer.options)
        flops += 12 * heads * width * pairs
    return flops
