"""Untrained models: gradients over depth, sizes over width."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims import lab
from eval.claims.lab import measure
from eval.coordinates import CHANGE, measure_sizes, resize_recipe
from lm.config.recipe import Recipe
from lm.training.state import init_state
from lm.training.step import token_sums
from modules.params import ParamSpec, named_leaves
from modules.scaling.parametrization import Factors, Growth, growth_kind, mup, parametrization

VOCAB, BOS, ROWS, LENGTH = 64, 0, 4, 32
DEPTHS, WIDTHS, STEPS, SEEDS = (2, 4, 8, 16), (32, 64, 128, 256), 5, 5
COORDINATES = {'model.n_layers': 2, 'model.scan_layers': True, 'optim.lr': 3e-3}
ARMS = {
    'pre_norm': {'model.placement': 'pre'},
    'post_norm': {'model.placement': 'post'},
    'peri_norm': {'model.placement': 'peri'},
    'pre_norm_without_final_norm': {'model.placement': 'pre', 'model.final_norm': 'none'},
    'post_norm_of_sublayer': {'model.placement': 'output'},
}


def replace_row(recipe: Recipe, part: str, row: Any) -> Recipe:
    """Returns the recipe with another row in a part, such as one with a broken equation.

    Args:
      recipe: the recipe.
      part: the field of the recipe, such as 'placement'.
      row: as in the table of the part.
    """
    part_with_row = dataclasses.replace(getattr(recipe, part), row=row)
    return dataclasses.replace(recipe, **{part: part_with_row})


@measure(*(f'slope_of_{name}' for name in ARMS), trains=False)
def gradients_at_the_start() -> Iterator[np.ndarray]:
    """Yields the slope of log |gradient of the last block's MLP| over log depth, by placement.

    Expected: -1/2 in pre-norm, as the stream grows with the root of the depth, and 0 in post-norm
    (arXiv:2002.04745, theorem 1). In Peri-LN the stream grows alike, since each sublayer adds a
    mean square of 1. The last two are broken: pre-norm without the final norm, which divides the
    gradient by the size of the stream, and post-norm with the norm of the sublayer in place of the
    sum. Random tokens, initial weights as in configs/studies/small.py with embeddings of deviation
    1, DEPTHS, over SEEDS.
    """
    for changes in ARMS.values():
        logs_DS = np.log([_last_gradient_norms(changes, depth) for depth in DEPTHS])
        yield np.polyfit(np.log(DEPTHS), logs_DS, 1)[0]


def _last_gradient_norms(changes: dict, depth: int) -> np.ndarray:
    fixed = {'model.scan_layers': True, 'scaling.embedding_std': 1.0, 'model.n_layers': depth}
    cheap = {'kernels.attention': 'reference'}  # to compile
    learner, hyper = lab.build_small_learner(changes | fixed | cheap, VOCAB, BOS)

    def run(seed):
        key, text_key = jax.random.split(jax.random.key(seed))
        state = init_state(learner, hyper, key)
        tokens = jax.random.randint(text_key, (ROWS, LENGTH + 1), 1, VOCAB)
        batch = {'tokens': tokens, 'segments': jnp.ones_like(tokens)}

        def loss(params):
            variables = learner.variables(state.weights.replace(params=params))
            sums = token_sums(learner, variables, batch, hyper)
            return sums['objective'] / sums['tokens']

        grads = named_leaves(jax.grad(loss)(state.weights.params))
        return jnp.linalg.norm(grads['layers/mlp/down'][-1])

    return np.asarray(lab.map_seeds(run, jnp.arange(SEEDS)), np.float64)


@parametrization(('adam',), logits_per_width=True)
def scale_hidden_rates_by_root(spec: ParamSpec, growth: Growth, family: str) -> Factors:
    """Returns the factors of muP, but the learning rate of hidden matrices falls as 1 / sqrt(m).

    Args:
      spec: the parameter.
      growth: the growth of its axes.
      family: of its updates.
    """
    factors = mup(spec, growth, family)
    if growth_kind(growth) != 'hidden':
        return factors
    return dataclasses.replace(factors, lr=growth.fan_in**-0.5, decay=growth.fan_in**0.5)


@measure(*(f'largest_slope_of_{rule}' for rule in ('standard', 'mup', 'mup_with_root_of_width')))
def sizes_over_width() -> Iterator[np.ndarray]:
    """Yields the largest slope of log size of changes over log width in the first steps, by rule.

    It is 0 if a single learning rate suits all widths (arXiv:2203.03466, appendix D.1): `standard`
    against `mup`, Adam at its peak rate, as in `python -m eval.coordinates`. The last value is for
    `mup` with a broken rate of hidden matrices, 1 / sqrt(width).
    """
    yield largest_slope({'scaling.name': 'standard'})
    for row in (mup, scale_hidden_rates_by_root):
        yield largest_slope({'scaling.name': 'mup', 'scaling.base_width': WIDTHS[0]}, row)


def largest_slope(scaling: dict, row: Any = None) -> np.ndarray:
    """Returns the slope of each seed, for the activation with the largest mean slope of changes.

    Args:
      scaling: changes of the config, by path.
      row: the parametrisation, if not that of the config.
    """
    recipe, sizes = lab.read_recipe(COORDINATES | scaling), []
    for width in WIDTHS:
        resized = resize_recipe(recipe, 'width', width)
        if row:
            resized = replace_row(resized, 'scaling', row)
        sizes.append(measure_sizes(resized, SEEDS, STEPS, recipe.model.n_layers))
    names = [name for name in sizes[0] if name[1] == CHANGE]
    logs_AWS = np.log([[sizes_S[name] for sizes_S in sizes] for name in names])
    return max((np.polyfit(np.log(WIDTHS), logs_WS, 1)[0] for logs_WS in logs_AWS), key=np.mean)
