"""Sharpness: how strongly the loss curves in the weights and the logits, and blocks stretch."""

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
from lm.model.parameters import optimizer_field
from lm.model.transformer import ACTIVATIONS, EMBEDDING
from lm.record.checkpoint import read_state
from lm.training.state import Hyper, Learner, State, Weights, build_learner
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
from modules.options import Option

# Kernels whose gradient can be differentiated in forward mode, and kernels that can be themselves.
GRADIENT_KERNELS, VALUE_KERNELS = 'xla', 'reference'


def sharpness(
    checkpoint: Checkpoint,
    *,
    rows: Annotated[
        int, Option('rows of the validation split that the loss is a mean over', 1)
    ] = 4,
    eigenvalues: Annotated[int, Option('largest eigenvalues that are recorded', 1)] = 3,
    iterations: Annotated[
        int, Option('products with the Hessian; as many vectors like the weights are held', 2)
    ] = 15,
    rounds: Annotated[int, Option('of the power iteration through each block', 1)] = 10,
    box: Annotated[
        float, Option('how far logit_sharpness moves a logit, times its size and 1', 0, 1)
    ] = 5e-4,
) -> SuiteResult:
    """Measures how strongly the loss of some validation rows curves, and how far blocks stretch.

    sharpness is the largest eigenvalue of the Hessian of the mean loss in the stored weights that
    are trained (sharpness_2, ... the next, sharpness_least the least); preconditioned_sharpness is
    that of D^-1/2 H D^-1/2, D = sqrt(v_hat) + eps of AdamW as stored, and _times_lr is times the
    last learning rate. logit_curvature is the largest eigenvalue in a token's logits,
    logit_sharpness what a small box of logits adds to its loss. lipschitz_ is a lower bound of each
    block's local Lipschitz constant. All is float32, with kernels that have the derivatives.
    """
    split = open_data(checkpoint).validation
    batch = next(data.evaluation_batches(split, batch_size=min(rows, len(split)), limit=1))
    batch = jax.tree.map(jnp.asarray, batch)
    in_weights, of_hessian = measure_curvature(checkpoint, batch, eigenvalues, iterations)
    in_logits = measure_logits(checkpoint, batch, box)
    stretched, of_blocks = measure_lipschitz(checkpoint, batch, rounds)
    return SuiteResult(in_weights | in_logits | stretched, {}, of_hessian | of_blocks)


def measure_curvature(
    checkpoint: Checkpoint, batch: Batch, eigenvalues: int, iterations: int
) -> tuple[dict[str, float], dict[str, Table]]:
    """Returns numbers and a table of the Hessian, plain and preconditioned."""
    c, numbers, lines = checkpoint, {}, []
    learner = build_float32_learner(c, GRADIENT_KERNELS)
    spectrum = build_spectrum(learner, iterations)

    def measure(name, scales):
        values, bounds = spectrum(c.weights, batch, c.hyper, scales)
        kept = min(eigenvalues, len(values))
        names = [name, *(f'{name}_{i}' for i in range(2, kept + 1))]
        numbers.update(zip(names, values[:kept].tolist(), strict=True))
        numbers[f'{name}_least'] = float(values[-1])
        for i, one in enumerate(names):
            lines.append((one, float(values[i]), f'within {bounds[i]:.2g} of an eigenvalue'))

    trained = [w for w, t in leaves_with(c.weights.params, learner.description.trainable) if t]
    measure('sharpness', [jnp.ones_like(w, jnp.float32) for w in trained])
    scales, why_not = preconditioner(c)
    if scales is None:
        lines.append(('preconditioned_sharpness', None, why_not))
    else:
        measure('preconditioned_sharpness', scales)
        lr = learning_rate(c.recipe, c.hyper, c.step - 1)
        numbers['preconditioned_sharpness_times_lr'] = lr * numbers['preconditioned_sharpness']
    table = Table.from_rows(('what', 'value', 'how'), lines)
    return numbers, {'Eigenvalues of the Hessian': table}


def measure_lipschitz(
    checkpoint: Checkpoint, batch: Batch, rounds: int
) -> tuple[dict[str, float], dict[str, Table]]:
    """Returns numbers and a table of how far each block stretches a small change of its input."""
    c = checkpoint
    found_LB = np.array(
        measure_stretches(
            build_float32_learner(c, VALUE_KERNELS), c.weights, batch, c.hyper, rounds
        )
    )
    most_L = found_LB.max(1)
    numbers = {
        'lipschitz_max': float(most_L.max()),
        'lipschitz_mean': float(found_LB.mean()),
        'lipschitz_last': float(most_L[-1]),
    }
    largest = 'largest of the rows'
    columns = {
        'layer': list(range(1, len(most_L) + 1)),
        largest: most_L.tolist(),
        'mean of the rows': found_LB.mean(1).tolist(),
    }
    return numbers, {'Local Lipschitz constants, at least': Table(columns, x='layer', y=largest)}


def build_float32_learner(checkpoint: Checkpoint, implementation: str) -> Learner:
    """Returns the learner of a checkpoint in float32, with the kernels of an implementation."""
    c = checkpoint
    chosen = {f'kernels.{operation}': AUTO for operation in OPERATIONS}
    chosen |= {'kernels.implementation': implementation, 'model.dtype': 'float32'}
    recipe = drop_unread_options(update_recipe(c.recipe, chosen))
    return build_learner(recipe, c.model.vocab_size, c.learner.bos_id, c.model.kernels.platform)


def mean_loss(learner: Learner, weights: Weights, batch: Batch, hyper: Hyper) -> jax.Array:
    """Returns the objective of a batch for each target token, as evaluation computes it."""
    sums = token_sums(learner, learner.variables(weights), batch, hyper)
    return sums['objective'] / jnp.maximum(sums['tokens'], 1.0)


def build_spectrum(
    learner: Learner, iterations: int, loss: Callable[..., jax.Array] = mean_loss
) -> Callable[..., Any]:
    """Returns spectrum(weights, batch, hyper, scales) -> `ritz_values` of S H S, one program for all.

    H is the Hessian of the loss in the leaves of weights.params that are trained, and `scales` has
    the diagonal S of each such leaf, shaped like it.

    Args:
      learner: with kernels whose gradient has a derivative in forward mode.
      iterations: of Lanczos; fewer where there are fewer weights.
      loss: (learner, weights, batch, hyper) -> a scalar.
    """
    described = learner.description
    trained = jax.tree.leaves(described.trainable)
    sizes = [math.prod(shape.shape) for shape in jax.tree.leaves(described.shapes)]
    steps = min(iterations, sum(size for size, t in zip(sizes, trained, strict=True) if t))

    @jax.jit
    def run(weights, batch, hyper, scales):
        leaves, structure = jax.tree.flatten(weights.params)
        counted = [w.astype(jnp.float32) for w, t in zip(leaves, trained, strict=True) if t]

        def of_counted(counted):
            left = iter(counted)
            full = [next(left) if t else w for w, t in zip(leaves, trained, strict=True)]
            params = jax.tree.unflatten(structure, full)
            return loss(learner, weights.replace(params=params), batch, hyper)

        def scale(v):
            return [s * x for s, x in zip(scales, v, strict=True)]

        def product(v):
            name = 'gradient of this model'
            return scale(
                jvp_along(jax.grad(of_counted), counted, scale(v), name, GRADIENT_KERNELS)[1]
            )

        return lanczos(product, random_like(counted), steps)

    return lambda *arguments: ritz_values(*jax.device_get(run(*arguments)))


def random_like(tree: Any) -> Any:
    """Returns the same normal numbers for each tree of these shapes."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(jax.random.key(0), len(leaves))
    drawn = [jax.random.normal(k, x.shape) for k, x in zip(keys, leaves, strict=True)]
    return jax.tree.unflatten(structure, drawn)


def leaves_with(*trees: Any) -> Iterator[tuple[Any, ...]]:
    """Iterates over the leaves of parallel trees side by side."""
    return zip(*map(jax.tree.leaves, trees), strict=True)


def preconditioner(checkpoint: Checkpoint) -> tuple[list[jax.Array] | None, str]:
    """Returns (the `adam_scales` of a checkpoint, ''), or (None, why there are none)."""
    c = checkpoint
    try:
        state, _ = read_state(c.path.parent, c.step, abstract_state(c.learner, c.mesh))
    except ValueError as error:
        return None, f'the state of the optimizer cannot be read: {error}'
    return adam_scales(c.learner, c.hyper, state)


def adam_scales(learner: Learner, hyper: Hyper, state: State) -> tuple[list[jax.Array] | None, str]:
    """Returns (sqrt(f / D) of each trained leaf, ''), or (None, why there are none).

    D = sqrt(v_hat) + eps is what AdamW divides the first moment by, and f the factor that the
    parametrisation gives the learning rate of the parameter. v is of clipped gradients.
    """
    described, found = learner.description, []
    moments = adam_moments(state.opt_state, state.params)
    trees = described.specs, described.scalings, described.trainable
    for (spec, scaling, trained), moment in zip(leaves_with(*trees), moments, strict=True):
        if not trained:
            continue
        part = learner.recipe.optimizers[optimizer_field(spec)]
        if moment is None:
            return None, f'{part} keeps no second moment as AdamW does'
        numbers, (count, v) = part.option_values(hyper), moment
        if not int(count):
            return None, 'the optimizer has made no update'
        root = jnp.sqrt(v / (1 - numbers['b2'] ** count)) + numbers['eps']
        found.append(jnp.sqrt(scaling.lr_factor / (scaling.eps_factor * root)))
    return found, ''


def adam_moments(opt_state: Any, params: Any) -> list[tuple[jax.Array, jax.Array] | None]:
    """Returns (updates done, second moment) of each leaf of params; None where AdamW has none."""
    found: list[Any] = [None] * len(jax.tree.leaves(params))
    structure = jax.tree.structure(params)

    def is_adam(node):
        return isinstance(node, optax.ScaleByAdamState)

    for node in jax.tree.leaves(opt_state, is_leaf=is_adam):
        if is_adam(node):
            for i, v in enumerate(structure.flatten_up_to(node.nu)):
                if not isinstance(v, optax.MaskedNode):
                    found[i] = node.count, v
    return found


def learning_rate(recipe: Recipe, hyper: Hyper, step: int) -> float:
    """Returns the learning rate of the update after `step`, without factors of parameters."""
    fraction = bind_rows(recipe, hyper)['optim.schedule'](step, hyper['train.steps'])
    return float(peak_lrs(hyper)['optim.name'] * fraction)


def measure_logits(checkpoint: Checkpoint, batch: Batch, box: float) -> dict[str, float]:
    """Returns means over the targets of a batch of what its logits alone say."""

    def statistic(logits_BCV, next_BC):
        return {
            'logit_curvature': logit_curvature(logits_BCV),
            'logit_sharpness': logit_sharpness(logits_BCV, next_BC, box),
        }

    c = checkpoint
    segments = batch['segments']
    read = segments if c.recipe.data.mask_documents else (segments > 0).astype(segments.dtype)
    score = jax.jit(functools.partial(score_batch, c.learner, statistic))
    found = score(c.weights, batch | {'segments': read})
    weights_BT = target_weights(batch, c.learner.bos_id)
    n = jnp.sum(weights_BT)
    return {name: float(jnp.sum(weights_BT * value) / n) for name, value in found.items()}


def measure_stretches(
    learner: Learner, weights: Weights, batch: Batch, hyper: Hyper, rounds: int
) -> list[np.ndarray]:
    """Returns `jacobian_gains` [B] of each block at the streams of each row, all of its tokens
    together; of two streams both count.
    """
    variables = learner.variables(weights)
    _, filled = compute_activations(learner, variables, batch, (ACTIVATIONS,), hyper)
    streams = learner.recipe.placement.row.split(filled[ACTIVATIONS][EMBEDDING])
    sequence = make_sequence(learner, batch['segments'][:, :-1])
    start, found = random_like(streams), []

    @functools.partial(jax.jit, static_argnums=0)
    def stretch(apply, own, number, streams, sequence):
        def block(streams):
            return apply(own, number, streams, sequence)

        return jacobian_gains(block, streams, start, rounds)

    for one in iterate_blocks(learner, variables):
        found.append(np.asarray(stretch(one.apply, one.variables, one.number, streams, sequence)))
        streams = one.apply(one.variables, one.number, streams, sequence)
    return found
