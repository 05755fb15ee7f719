"""The residual stream over depth in untrained models."""

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from eval.claims.measures.starts import BOS, LENGTH, ROWS, VOCAB, replace_row
from lm.inference.probes import observe
from lm.model.block import AFTER_MLP, EMBEDDING
from lm.training.state import build_learner, init_state, make_hyper
from modules.params import ParamSpec, named_leaves
from modules.placements import PLACEMENTS, Depth, peri, pre, repeat_block
from modules.scaling.parametrization import writes_to_stream

DEPTHS, SEEDS = (4, 12, 36), 5
BEHIND = np.array(DEPTHS) - 1  # places of these blocks
CHANGES = {
    'model.scan_layers': True,
    'kernels.attention': 'reference',  # cheap to compile
    'scaling.embedding_std': 1.0,
}
DEPTH_MUP = {'scaling.name': 'depth_mup', 'scaling.base_width': 64, 'scaling.base_depth': 1}
GROWN = 4.0  # as training may make hidden matrices
GAIN = 1.1
# Factors of a parameter, from its name, its description and the number of blocks.
FACTORS: dict[str, Callable[[str, ParamSpec, int], float]] = {
    'unchanged': lambda name, spec, depth: 1.0,
    'grown': lambda name, spec, depth: GROWN if spec.role == 'hidden' else 1.0,
    'larger_gains': lambda name, spec, depth: GAIN if 'norm_out' in name else 1.0,
    'divided_again': lambda name, spec, depth: depth**-0.5 if writes_to_stream(spec) else 1.0,
}


def scale_by_depth(x: Any, sublayer: Any, norm: Any, depth: Depth) -> Any:
    """Places a sublayer as LayerNorm Scaling, but with the depth for the number of the block."""
    return x + sublayer(norm('norm_in')(x) * depth.blocks**-0.5)


# Placements and the functions that place attention and MLPs; None: the placement's own.
BLOCKS: dict[str, tuple[str, Any]] = {
    'pre': ('pre', None),
    'layernorm_scaling': ('layernorm_scaling', None),
    'peri': ('peri', None),
    'scaling_by_depth': ('layernorm_scaling', (scale_by_depth, scale_by_depth)),
    'peri_of_attention_only': ('peri', (peri, pre)),
}


@measure(
    *(f'slope_of_{name}' for name in BLOCKS),
    *(f'added_by_grown_of_{name}' for name in ('pre', 'peri', 'peri_of_attention_only')),
    'added_by_larger_gains_of_peri',
    *(f'slope_of_size_of_{name}' for name in ('standard', 'peri')),
    *(
        f'slope_of_{quantity}_of_{name}'
        for name in ('depth_mup', 'depth_mup_divided_again')
        for quantity in ('size', 'added_size')
    ),
    trains=False,
)
def stream_over_depth() -> Iterator[np.ndarray | Estimate]:
    """Yields slopes over depth: of the blocks' contributions to the stream, and of its size.

    slope_of_PLACEMENT: slope of the log mean square that is added up to blocks DEPTHS, for random
    tokens; 1 if each block adds the same (arXiv:2502.02732), less if norms are divided by the root
    of their depth (arXiv:2502.05795). With two broken placements: norms divided by the root of the
    number of blocks, and Peri-LN whose MLPs have no norm behind them.
    added_by_grown: the mean square added in the deepest model with hidden matrices GROWN times as
    large, over the mean square without growth. added_by_larger_gains: the same for gains of the
    norms behind sublayers that are GAIN times as large; GAIN^2, as these outputs are then.
    slope_of_size: slope of the log root mean square of the stream after the last block of models
    of DEPTHS, if blocks add F(x), N(F(N(x))) or F(x) / sqrt(L) (`depth_mup`, arXiv:2310.02244).
    slope_of_added_size: the same for the sum that blocks add to the stream. divided_again: with the
    broken factor 1 / L. Over SEEDS.
    """
    deep = {
        name: stream_squares(DEPTHS[-1], {'model.placement': placement}, placed)
        for name, (placement, placed) in BLOCKS.items()
    }
    for squares in deep.values():
        yield log_slope(added_squares(squares['unchanged'])[:, BEHIND])
    for factor, names in (
        ('grown', ('pre', 'peri', 'peri_of_attention_only')),
        ('larger_gains', ('peri',)),
    ):
        for name in names:
            after_S, before_S = (
                added_squares(deep[name][key])[:, -1] for key in (factor, 'unchanged')
            )
            yield mean_over_seeds(after_S / before_S, 'log')
    for name in ('pre', 'peri'):
        yield log_slope(deep[name]['unchanged'][:, 1:][:, BEHIND] ** 0.5)
    by_depth = [stream_squares(depth, DEPTH_MUP) for depth in DEPTHS]
    for factor in ('unchanged', 'divided_again'):
        squares_D = [squares[factor] for squares in by_depth]
        yield log_slope(np.stack([x_SL[:, -1] for x_SL in squares_D], 1) ** 0.5)
        yield log_slope(np.stack([added_squares(x_SL)[:, -1] for x_SL in squares_D], 1) ** 0.5)


def added_squares(squares_SL: np.ndarray) -> np.ndarray:
    """Returns the mean square after each block minus the mean square of the embeddings.

    The embeddings come first.
    """
    return squares_SL[:, 1:] - squares_SL[:, :1]


def log_slope(values_SD: np.ndarray) -> np.ndarray:
    """Returns the slope of log value over log DEPTHS for each seed."""
    return np.polyfit(np.log(DEPTHS), np.log(values_SD).T, 1)[0]


def stream_squares(
    depth: int, changes: dict, placed: Any = None, seeds: Sequence[int] = range(SEEDS)
) -> dict[str, np.ndarray]:
    """Returns the mean square of the embeddings and of the stream after each block, [S, 1 + L].

    They are returned by the name of the FACTORS that multiply the parameters.

    Args:
      depth: L, number of blocks.
      changes: changes of the config, by path.
      placed: the functions that place attention and MLPs, if not those of the placement.
      seeds: S seeds of initial weights and text.
    """
    recipe = lab.read_recipe(CHANGES | {'model.n_layers': depth} | changes)
    if placed:
        row = dataclasses.replace(PLACEMENTS[recipe.placement.name], blocks=repeat_block(*placed))
        recipe = replace_row(recipe, 'placement', row)
    learner = build_learner(recipe, VOCAB, BOS, jax.default_backend())
    hyper, specs = make_hyper(recipe), learner.description.specs
    factors_FP = jnp.array(
        [
            [factor(name, spec, depth) for name, spec in named_leaves(specs).items()]
            for factor in FACTORS.values()
        ]
    )

    def run_seed(seed):
        key, text_key = jax.random.split(jax.random.key(seed))
        weights = init_state(learner, hyper, key).weights
        leaves, tree = jax.tree.flatten(weights.params)
        tokens_BT = jax.random.randint(text_key, (ROWS, LENGTH), 1, VOCAB)

        def mean_squares(factors_P):
            params = tree.unflatten([w * factors_P[i] for i, w in enumerate(leaves)])
            _, activations = observe(learner, weights.replace(params=params), tokens_BT)
            behind_L = jnp.mean(activations[AFTER_MLP] ** 2, (1, 2, 3))
            return jnp.concatenate([jnp.mean(activations[EMBEDDING] ** 2)[None], behind_L])

        return jax.lax.map(mean_squares, factors_FP)

    squares_SFL = np.asarray(lab.map_seeds(run_seed, jnp.array(seeds)), np.float64)
    return {name: squares_SFL[:, i] for i, name in enumerate(FACTORS)}
