"""Sharpness: curvature of the loss in weights and logits, and Lipschitz bounds of blocks."""

import functools
import math
from collections.abc import Callable, Iterator
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.load import Checkpoint, open_data
from eval.suites.base import SuiteResult, Table
from lm import data
from lm.config.recipe import Recipe
from lm.config.resolve import AUTO, drop_unread_options, update_recipe
from lm.devices.shardings import abstract_state
from lm.inference.blocks import iterate_blocks, make_sequence
from lm.inference.scoring import score_batch
from lm.model.block import ACTIVATIONS, EMBEDDING
from lm.model.kernels import rounds_products, widen_products
from lm.record.checkpoint import read_state
from lm.training.state import Hyper, Learner, State, Weights, build_learner, widen_weights
from lm.training.step import Batch, compute_activations, target_weights, token_sums
from lm.training.update import bind_rows, peak_lrs
from modules.curvature import (
    jacobian_gains,
    lanczos,
    logit_curvature,
    logit_sharpness,
    ritz_values,
)
from modules.kernels import OPERATIONS
from modules.optim.base import jvp_along
from modules.optim.groups import HIDDEN, find_group
from modules.options import Option

# Kernels with a gradient that supports forward-mode differentiation, and kernels that support it.
GRADIENT_KERNELS, VALUE_KERNELS = 'xla', 'reference'


def sharpness(
    checkpoint: Checkpoint,
    *,
    rows: Annotated[int, Option('rows of the validation split over which to average', 1)] = 4,
    eigenvalues: Annotated[int, Option('number of largest eigenvalues to record', 1)] = 3,
    iterations: Annotated[
        int, Option('products with the Hessian; each stores a vector as large as the weights', 2)
    ] = 15,
    rounds: Annotated[int, Option('rounds of power iteration through each block', 1)] = 10,
    box: Annotated[
        float, Option('logit_sharpness moves each logit z by at most box (|z| + 1)', 0, 1)
    ] = 5e-4,
) -> SuiteResult:
    """Measures curvature of the loss and Lipschitz constants of blocks.

    All are computed on some rows of the validation split, in float32, with kernels that have the
    derivatives. sharpness is the largest eigenvalue of the Hessian H of the mean loss in the
    trained weights as stored; sharpness_2, ... are the next ones, and sharpness_least is the
    smallest. preconditioned_sharpness is the largest eigenvalue of D^-1/2 H D^-1/2, with D =
    sqrt(v_hat) + eps from AdamW's stored state; _times_lr is multiplied by the last learning rate.
    logit_curvature is the largest eigenvalue of the Hessian of a token's loss in its logits.
    logit_sharpness is the increase of that loss within a small box of logits. lipschitz_ are lower
    bounds on each block's local Lipschitz constant.

    Args:
      checkpoint: a loaded checkpoint.
      rows: of the validation split.
      eigenvalues: number of the largest eigenvalues.
      iterations: products with the Hessian; each stores a vector as large as the weights.
      rounds: of the power iteration through each block.
      box: half width of the box around a logit z, relative to |z| + 1.
    """
    split = open_data(checkpoint).validation
    batch = next(data.evaluation_batches(split, batch_size=min(rows, len(split)), limit=1))
    batch = jax.tree.map(jnp.asarray, batch)
    weight_numbers, hessian_tables = measure_curvature(checkpoint, batch, eigenvalues, iterations)
    logit_numbers = measure_logits(checkpoint, batch, box)
    block_numbers, block_tables = measure_lipschitz(checkpoint, batch, rounds)
    return SuiteResult(
        weight_numbers | logit_numbers | block_numbers, {}, hessian_tables | block_tables
    )


def measure_curvature(
    checkpoint: Checkpoint, batch: Batch, eigenvalues: int, iterations: int
) -> tuple[dict[str, float], dict[str, Table]]:
    """Returns numbers and a table of the Hessian, plain and preconditioned.

    Args:
      checkpoint: a loaded checkpoint.
      batch: of the loss.
      eigenvalues: number of the largest eigenvalues.
      iterations: of Lanczos.
    """
    c, numbers, table_rows = checkpoint, {}, []
    learner = build_float32_learner(c, GRADIENT_KERNELS)
    spectrum = build_spectrum(learner, iterations)

    def measure(name, scales):
        values, bounds = spectrum(c.weights, batch, c.hyper, scales)
        n_recorded = min(eigenvalues, len(values))
        names = [name, *(f'{name}_{i}' for i in range(2, n_recorded + 1))]
        numbers.update(zip(names, values[:n_recorded].tolist(), strict=True))
        numbers[f'{name}_least'] = float(values[-1])
        for i, label in enumerate(names):
            table_rows.append((label, float(values[i]), f'within {bounds[i]:.2g} of an eigenvalue'))

    trained_leaves = [
        w for w, t in leaves_with(c.weights.params, learner.description.trainable) if t
    ]
    measure('sharpness', [jnp.ones_like(w, jnp.float32) for w in trained_leaves])
    scales, why_not = preconditioner(c)
    if scales is None:
        table_rows.append(('preconditioned_sharpness', None, why_not))
    else:
        measure('preconditioned_sharpness', scales)
        # The rate of the last update; the next may be 0 at the end of a schedule.
        lr = learning_rate(c.recipe, c.hyper, c.step - 1)
        numbers['preconditioned_sharpness_times_lr'] = lr * numbers['preconditioned_sharpness']
    table = Table.from_rows(('what', 'value', 'how'), table_rows)
    return numbers, {'Eigenvalues of the Hessian': table}


def measure_lipschitz(
    checkpoint: Checkpoint, batch: Batch, rounds: int
) -> tuple[dict[str, float], dict[str, Table]]:
    """Returns numbers and a table of the factors by which blocks stretch a change of their input.

    Args:
      checkpoint: a loaded checkpoint.
      batch: gives the streams.
      rounds: of the power iteration.
    """
    c = checkpoint
    stretch_LB = np.array(
        measure_stretches(
            build_float32_learner(c, VALUE_KERNELS), c.weights, batch, c.hyper, rounds
        )
    )
    max_L = stretch_LB.max(1)
    numbers = {
        'lipschitz_max': float(max_L.max()),
        'lipschitz_mean': float(stretch_LB.mean()),
        'lipschitz_last': float(max_L[-1]),
    }
    largest = 'largest of the rows'
    columns = {
        'layer': list(range(1, len(max_L) + 1)),
        largest: max_L.tolist(),
        'mean of the rows': stretch_LB.mean(1).tolist(),
    }
    return numbers, {'Local Lipschitz constants, at least': Table(columns, x='layer', y=largest)}


def build_float32_learner(checkpoint: Checkpoint, implementation: str) -> Learner:
    """Returns the learner of a checkpoint in float32, with the kernels of an implementation."""
    c = checkpoint
    kernel_changes = {f'kernels.{operation}': AUTO for operation in OPERATIONS}
    kernel_changes |= {'kernels.implementation': implementation, 'model.dtype': 'float32'}
    if rounds_products(c.recipe):  # its matmul keeps the stacks of blocks, and becomes wide
        del kernel_changes['kernels.matmul']
    recipe = drop_unread_options(update_recipe(widen_products(c.recipe), kernel_changes))
    return build_learner(recipe, c.model.vocab_size, c.learner.bos_id, c.model.kernels.platform)


def mean_loss(learner: Learner, weights: Weights, batch: Batch, hyper: Hyper) -> jax.Array:
    """Returns the objective of a batch per target token, as in evaluation.

    Args:
      learner: of the model.
      weights: of the model.
      batch: of tokens.
      hyper: of the learner.
    """
    sums = token_sums(learner, learner.variables(weights), batch, hyper)
    return sums['objective'] / jnp.maximum(sums['tokens'], 1.0)


def build_spectrum(
    learner: Learner, iterations: int, loss: Callable[..., jax.Array] = mean_loss
) -> Callable[..., Any]:
    """Returns spectrum(weights, batch, hyper, scales) -> `ritz` of S H S, compiled once.

    H is the Hessian of the loss in the leaves of weights.params that are trained, and `scales` has
    the diagonal of S for each such leaf, in its shape.

    Args:
      learner: its kernels have gradients that support forward-mode differentiation.
      iterations: of Lanczos; fewer if there are fewer weights.
      loss: (learner, weights, batch, hyper) -> a scalar.
    """
    described = learner.description
    trained = jax.tree.leaves(described.trainable)
    sizes = [math.prod(shape.shape) for shape in jax.tree.leaves(described.shapes)]
    steps = min(iterations, sum(size for size, t in zip(sizes, trained, strict=True) if t))

    @jax.jit
    def run(weights, batch, hyper, scales):
        leaves, structure = jax.tree.flatten(weights.params)
        trained_leaves = [w.astype(jnp.float32) for w, t in zip(leaves, trained, strict=True) if t]

        def trained_loss(trained_leaves):
            # Only trained leaves vary; all others are constants.
            remaining = iter(trained_leaves)
            full = [next(remaining) if t else w for w, t in zip(leaves, trained, strict=True)]
            params = jax.tree.unflatten(structure, full)
            return loss(learner, weights.replace(params=params), batch, hyper)

        def scale(v):
            return [s * x for s, x in zip(scales, v, strict=True)]

        def product(v):
            # Forward over reverse: the derivative of the gradient along S v.
            name = 'gradient of this model'
            return scale(
                jvp_along(jax.grad(trained_loss), trained_leaves, scale(v), name, GRADIENT_KERNELS)[
                    1
                ]
            )

        return lanczos(product, random_like(trained_leaves), steps)

    return lambda *arguments: ritz_values(*jax.device_get(run(*arguments)))


def random_like(tree: Any) -> Any:
    """Returns the same normal numbers for all trees of these shapes."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    samples = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, samples)


def leaves_with(*trees: Any) -> Iterator[tuple[Any, ...]]:
    """Iterates over the leaves of parallel trees side by side."""
    return zip(*map(jax.tree.leaves, trees), strict=True)


def preconditioner(checkpoint: Checkpoint) -> tuple[list[jax.Array] | None, str]:
    """Returns (the `adam_scales` of a checkpoint, ''), or (None, the reason for their absence)."""
    c = checkpoint
    try:
        state, _ = read_state(c.path.parent, c.step, abstract_state(c.learner, c.mesh))
        state = widen_weights(state)
    except ValueError as error:
        return None, f'the optimizer state cannot be read: {error}'
    return adam_scales(c.learner, c.hyper, state)


def adam_scales(learner: Learner, hyper: Hyper, state: State) -> tuple[list[jax.Array] | None, str]:
    """Returns the square roots of AdamW's preconditioner.

    D = sqrt(v_hat) + eps is AdamW's divisor of the first moment. f is the learning rate of the
    parameter over optim.lr, by its group and by the parametrisation. v is the second moment of
    clipped gradients.

    Args:
      learner: of the model.
      hyper: of the learner.
      state: gives the moments.

    Returns:
      (sqrt(f / D) of each trained leaf, ''), or (None, the reason for their absence).
    """
    described, scales, peaks = learner.description, [], peak_lrs(hyper)
    moments = adam_moments(state.opt_state, state.params)
    trees = described.specs, described.scalings, described.trainable
    for (spec, scaling, trained), moment in zip(leaves_with(*trees), moments, strict=True):
        if not trained:
            continue
        part = learner.recipe.find_optimizer(spec)
        if moment is None:
            return None, f'{part} stores no second moment like AdamW'
        numbers, (count, v) = part.option_values(hyper), moment
        if not int(count):
            return None, 'the optimizer has made no updates yet'
        denominator = jnp.sqrt(v / (1 - numbers['b2'] ** count)) + numbers['eps']
        factor = scaling.lr_factor * (peaks[find_group(spec)] / peaks[HIDDEN])
        scales.append(jnp.sqrt(factor / (scaling.eps_factor * denominator)))
    return scales, ''


def adam_moments(opt_state: Any, params: Any) -> list[tuple[jax.Array, jax.Array] | None]:
    """Returns (number of updates, second moment) of each leaf of params; None if AdamW has none."""
    moments: list[Any] = [None] * len(jax.tree.leaves(params))
    structure = jax.tree.structure(params)

    def is_adam(node):
        return isinstance(node, optax.ScaleByAdamState)

    for node in jax.tree.leaves(opt_state, is_leaf=is_adam):
        if is_adam(node):
            for i, v in enumerate(structure.flatten_up_to(node.nu)):
                if not isinstance(v, optax.MaskedNode):
                    moments[i] = node.count, v
    return moments


def learning_rate(recipe: Recipe, hyper: Hyper, step: int) -> float:
    """Returns the learning rate of the update after `step`, without factors of parameters.

    Args:
      recipe: gives the schedule.
      hyper: of the learner.
      step: number of updates so far.
    """
    fraction = bind_rows(recipe, hyper)['optim.schedule'](step, hyper['train.steps'])
    return float(peak_lrs(hyper)[HIDDEN] * fraction)


def measure_logits(checkpoint: Checkpoint, batch: Batch, box: float) -> dict[str, float]:
    """Returns means over the targets of a batch of statistics of the logits alone.

    Args:
      checkpoint: a loaded checkpoint.
      batch: of tokens.
      box: half width of the box of a logit, relative to its size and 1.
    """

    def statistic(logits_BCV, next_BC):
        return {
            'logit_curvature': logit_curvature(logits_BCV),
            'logit_sharpness': logit_sharpness(logits_BCV, next_BC, box),
        }

    c = checkpoint
    segments = batch['segments']
    segments_seen = (
        segments if c.recipe.data.mask_documents else (segments > 0).astype(segments.dtype)
    )
    score = jax.jit(functools.partial(score_batch, c.learner, statistic))
    statistics = score(c.weights, batch | {'segments': segments_seen})
    weights_BT = target_weights(batch, c.learner.bos_id)
    n = jnp.sum(weights_BT)
    return {name: float(jnp.sum(weights_BT * value) / n) for name, value in statistics.items()}


def measure_stretches(
    learner: Learner, weights: Weights, batch: Batch, hyper: Hyper, rounds: int
) -> list[np.ndarray]:
    """Returns `largest_stretches` [B] of each block at the streams of each row.

    All tokens of a row, and both streams if there are two, count together.

    Args:
      learner: of the model.
      weights: of the model.
      batch: gives the streams.
      hyper: of the learner.
      rounds: of the power iteration.
    """
    variables = learner.variables(weights)
    _, filled = compute_activations(learner, variables, batch, (ACTIVATIONS,), hyper)
    streams = learner.recipe.placement.row.split(filled[ACTIVATIONS][EMBEDDING])
    sequence = make_sequence(learner, batch['segments'][:, :-1])
    # All blocks begin with the same direction.
    start, stretch_by_block = random_like(streams), []

    @functools.partial(jax.jit, static_argnums=0)
    def stretch(apply, params, number, streams, sequence):
        def block(streams):
            return apply(params, number, streams, sequence)

        return jacobian_gains(block, streams, start, rounds)

    for layer in iterate_blocks(learner, variables):
        stretch_by_block.append(
            np.asarray(stretch(layer.apply, layer.variables, layer.number, streams, sequence))
        )
        streams = layer.apply(layer.variables, layer.number, streams, sequence)
    return stretch_by_block
