"""Probes of a model: logits, activations of the residual stream, and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lm.config.recipe import Recipe
from lm.model.block import ACTIVATIONS, AFTER_MLP, BLOCK_ACTIVATIONS
from lm.model.pattern import block_groups, block_stacks, join_stacks, take_blocks
from lm.training.diagnostics import join_sown
from lm.training.state import Learner, Weights
from modules.interventions import HEADS, HIDDEN, INNER, SHIFTS
from modules.params import named_leaves
from modules.statistics import DIAGNOSTICS, INPUT_MOMENTS, INPUTS

Activations = dict[str, jax.Array]


def observe(
    learner: Learner,
    weights: Weights,
    tokens_BT: jax.Array,
    shifts: Activations | None = None,
    collections: dict[str, Any] | None = None,
    within: bool = False,
) -> tuple[jax.Array, Activations]:
    """Computes logits and activations as in evaluation, each row as one document.

    The residual stream is named `embedding` and `final` [B, T, D], the latter after the last norm,
    and `after_attention` and `after_mlp` [L, B, T, D] in the blocks, scanned or not. With two
    streams (resi_dual) it is the stream that the next block reads.

    Args:
      learner: the learner.
      weights: the weights.
      tokens_BT: token ids.
      shifts: added to the activations of the same names. The gradient in a shift of 0 is the
        gradient in the activation.
      collections: interventions (`lm.inference.interventions.build_collections`).
      within: whether to return activations within sublayers too: `heads` [L, B, T, N, H], the
        outputs of attention heads, and `hidden` [L, B, T, F], the hidden units of MLPs.

    Returns:
      (logits [B, T, V], activations by name).
    """
    variables = learner.variables(weights)
    if shifts is not None:
        variables = variables | {SHIFTS: split_blocks(learner.recipe, shifts)}
    if collections:
        variables = variables | collections
    mutable = (ACTIVATIONS, INNER) if within else (ACTIVATIONS,)
    logits_BTV, filled = learner.model.apply(variables, tokens_BT, mutable=mutable)
    activations = join_blocks(learner.recipe, filled[ACTIVATIONS])
    if within:
        activations |= join_inner(learner.recipe, filled[INNER])
    return logits_BTV, activations


def join_inner(recipe: Recipe, collection: dict) -> Activations:
    """Joins the activations within sublayers into arrays over all blocks.

    An activation that some blocks lack, or have in another shape, is left out.
    """
    stacks, joined = block_stacks(recipe), {}
    for name, sublayer in ((HEADS, 'attention'), (HIDDEN, 'mlp')):
        arrays = [stack.find(collection).get(sublayer, {}).get(name) for stack in stacks]
        shapes = {None if x is None else x.shape[1:] for x in arrays}
        if None not in shapes and len(shapes) == 1:
            joined[name] = join_stacks(stacks, arrays)
    return joined


def logit_lens(learner: Learner, weights: Weights, tokens_BT: jax.Array) -> jax.Array:
    """Applies the model's last norm and readout to the residual stream after each block (logit
    lens).

    The stream replaces the stream after the last block; a second stream (resi_dual) is unchanged.

    Args:
      learner: the learner.
      weights: the weights.
      tokens_BT: token ids.

    Returns:
      Logits [L, B, T, V]; the last are the model's.
    """
    _, activations = observe(learner, weights, tokens_BT)
    stream_LBTD = activations[AFTER_MLP]
    no_shifts = jax.tree.map(jnp.zeros_like, activations)

    def read_out(x_BTD):
        shift_LBTD = no_shifts[AFTER_MLP].at[-1].set(x_BTD - stream_LBTD[-1])
        return observe(learner, weights, tokens_BT, no_shifts | {AFTER_MLP: shift_LBTD})[0]

    return jax.lax.map(read_out, stream_LBTD)


def forward_diagnostics(
    learner: Learner, weights: Weights, tokens_BT: jax.Array
) -> dict[str, jax.Array]:
    """Computes the diagnostics of the forward pass that `train.diagnose_every` records.

    Args:
      learner: the learner.
      weights: the weights.
      tokens_BT: token ids.

    Returns:
      Arrays over layers [L] or layers and heads [L, N], by the names of metrics.jsonl
      (`attention_entropy`, `residual_rms`, ...).
    """
    variables = learner.variables(weights)
    _, collections = learner.model.apply(variables, tokens_BT, mutable=(DIAGNOSTICS,))
    return join_sown(learner, collections[DIAGNOSTICS])


def input_squares(learner: Learner, weights: Weights, tokens_BT: jax.Array) -> dict[str, jax.Array]:
    """Computes the mean of x^2 over tokens for the inputs x of every matrix in the blocks.

    An expert's mean sums over its own tokens and divides by the number of all tokens. The readout
    and the matrices of norms are not included.

    Args:
      learner: the learner.
      weights: the weights.
      tokens_BT: token ids.

    Returns:
      {path of the matrix: [layer, other batch axes, contracted axes]}.
    """
    return _input_means(learner, weights, tokens_BT, INPUTS)


def input_moments(learner: Learner, weights: Weights, tokens_BT: jax.Array) -> dict[str, jax.Array]:
    """Computes the means of x_i x_j for the inputs of every matrix, counted as in `input_squares`.

    Args:
      learner: the learner.
      weights: the weights.
      tokens_BT: token ids.

    Returns:
      {path of the matrix: [layer, other batch axes, I, I]}; I runs over all contracted axes.
    """
    return _input_means(learner, weights, tokens_BT, INPUT_MOMENTS)


def _input_means(
    learner: Learner, weights: Weights, tokens_BT: jax.Array, collection: str
) -> dict[str, jax.Array]:
    variables = learner.variables(weights)
    _, collections = learner.model.apply(variables, tokens_BT, mutable=(collection,))
    return {path: x / tokens_BT.size for path, x in named_leaves(collections[collection]).items()}


def join_blocks(recipe: Recipe, collection: dict) -> Activations:
    """Joins the activations of groups of blocks into arrays over all blocks."""
    names = [group.name for group in block_groups(recipe)]
    shared = {name: x for name, x in collection.items() if name not in names}
    stacks = block_stacks(recipe)
    return shared | {
        name: join_stacks(stacks, [stack.find(collection)[name] for stack in stacks])
        for name in BLOCK_ACTIVATIONS
    }


def split_blocks(recipe: Recipe, activations: Activations) -> dict:
    """Splits arrays over all blocks into groups: the inverse of `join_blocks`."""
    collection: dict[str, Any] = {
        name: x for name, x in activations.items() if name not in BLOCK_ACTIVATIONS
    }
    for stack in block_stacks(recipe):
        tree = collection
        for name in stack.path.split('/'):
            tree = tree.setdefault(name, {})
        tree |= {
            name: take_blocks(stack, x)
            for name, x in activations.items()
            if name in BLOCK_ACTIVATIONS
        }
    return collection


def next_token_loss(logits_BTV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns the mean of -log p(token t + 1 | tokens up to t) over t < T - 1, in nats per
    token.
    """
    log_p_BTV = jax.nn.log_softmax(logits_BTV[:, :-1].astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_p_BTV, tokens_BT[:, 1:, None], -1))


def gradients(
    learner: Learner,
    weights: Weights,
    tokens_BT: jax.Array,
    scalar: Callable[[jax.Array, jax.Array], jax.Array] = next_token_loss,
) -> tuple[Any, Activations]:
    """Computes the gradients of a scalar in the stored weights and in the activations.

    Args:
      learner: the learner.
      weights: the weights.
      tokens_BT: token ids.
      scalar: maps (logits [B, T, V], tokens [B, T]) to a scalar.

    Returns:
      (gradients with the structure of weights.params, gradients with the structure of the
      activations of `observe`).
    """

    def value(params, shifts):
        logits_BTV, _ = observe(learner, weights.replace(params=params), tokens_BT, shifts)
        return scalar(logits_BTV, tokens_BT)

    _, shapes = jax.eval_shape(lambda: observe(learner, weights, tokens_BT))
    shifts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.grad(value, argnums=(0, 1))(weights.params, shifts)
