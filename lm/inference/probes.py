"""Probes of a model: logits, activations of the residual stream, and gradients."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from lm.config.recipe import Recipe
from lm.model.transformer import ACTIVATIONS, AFTER_MLP, BLOCK_ACTIVATIONS, SHIFTS, block_groups
from lm.training.diagnostics import join_sown
from lm.training.state import Learner, Weights
from modules.params import named_leaves
from modules.statistics import DIAGNOSTICS, INPUT_MOMENTS, INPUTS

Activations = dict[str, jax.Array]


def observe(
    learner: Learner, weights: Weights, tokens_BT: jax.Array, shifts: Activations | None = None
) -> tuple[jax.Array, Activations]:
    """Returns (logits [B, T, V], activations by name), as in evaluation, each row as one document.

    The residual stream is `embedding` and `final` [B, T, D], the latter behind the last norm, and
    `after_attention` and `after_mlp` [L, B, T, D] of the blocks, scanned or not. With two streams
    (resi_dual) it is the one that the next block reads. `shifts` are added to the activations of
    their names: the gradient in a shift of 0 is the gradient in the activation.
    """
    variables = learner.variables(weights)
    if shifts is not None:
        variables = variables | {SHIFTS: split_blocks(learner.recipe, shifts)}
    logits_BTV, filled = learner.model.apply(variables, tokens_BT, mutable=(ACTIVATIONS,))
    return logits_BTV, join_blocks(learner.recipe, filled[ACTIVATIONS])


def logit_lens(learner: Learner, weights: Weights, tokens_BT: jax.Array) -> jax.Array:
    """Returns the logits [L, B, T, V] that the model's last norm and readout make of the residual
    stream behind each block (the logit lens); those of the last are the model's.

    The stream stands in for that behind the last block; a second one (resi_dual) stays its own.
    """
    _, activations = observe(learner, weights, tokens_BT)
    stream_LBTD = activations[AFTER_MLP]
    none = jax.tree.map(jnp.zeros_like, activations)

    def read_out(x_BTD):
        shift_LBTD = none[AFTER_MLP].at[-1].set(x_BTD - stream_LBTD[-1])
        return observe(learner, weights, tokens_BT, none | {AFTER_MLP: shift_LBTD})[0]

    return jax.lax.map(read_out, stream_LBTD)


def forward_diagnostics(
    learner: Learner, weights: Weights, tokens_BT: jax.Array
) -> dict[str, jax.Array]:
    """Returns what `train.diagnose_every` records of the forward pass of each layer [L] and head
    [L, N], by the names of metrics.jsonl (`attention_entropy`, `residual_rms`, ...).
    """
    variables = learner.variables(weights)
    _, filled = learner.model.apply(variables, tokens_BT, mutable=(DIAGNOSTICS,))
    return join_sown(learner, filled[DIAGNOSTICS])


def input_squares(learner: Learner, weights: Weights, tokens_BT: jax.Array) -> dict[str, jax.Array]:
    """Returns the mean of x^2 over tokens for the inputs x of every matrix of the blocks, by the
    path of its parameter: [layer, other batch axes, axes that are summed over].

    An expert's is of its own tokens, over the number of all. The readout and the matrices of norms
    are not among them.
    """
    return _input_means(learner, weights, tokens_BT, INPUTS)


def input_moments(learner: Learner, weights: Weights, tokens_BT: jax.Array) -> dict[str, jax.Array]:
    """Returns the means of x_i x_j, [layer, other batch axes, I, I], as `input_squares` those of
    x_i^2; several axes that are summed over are one, I.
    """
    return _input_means(learner, weights, tokens_BT, INPUT_MOMENTS)


def _input_means(
    learner: Learner, weights: Weights, tokens_BT: jax.Array, collection: str
) -> dict[str, jax.Array]:
    variables = learner.variables(weights)
    _, filled = learner.model.apply(variables, tokens_BT, mutable=(collection,))
    return {path: x / tokens_BT.size for path, x in named_leaves(filled[collection]).items()}


def join_blocks(recipe: Recipe, collection: dict) -> Activations:
    """Joins the activations of groups of blocks into arrays over all blocks."""
    names = [group.name for group in block_groups(recipe)]
    whole = {name: x for name, x in collection.items() if name not in names}
    parts = [collection[name] for name in names]
    return whole | {
        name: jnp.concatenate([part[name] for part in parts]) for name in BLOCK_ACTIVATIONS
    }


def split_blocks(recipe: Recipe, activations: Activations) -> dict:
    """Splits arrays over all blocks into groups: the inverse of `by_name`."""
    found = {name: x for name, x in activations.items() if name not in BLOCK_ACTIVATIONS}
    start = 0
    for group in block_groups(recipe):
        stop = start + group.count
        found[group.name] = {
            name: x[start:stop] for name, x in activations.items() if name in BLOCK_ACTIVATIONS
        }
        start = stop
    return found


def next_token_loss(logits_BTV: jax.Array, tokens_BT: jax.Array) -> jax.Array:
    """Returns the mean of -log p(token t + 1 | tokens up to t) over t < T - 1, in nats a token."""
    log_p_BTV = jax.nn.log_softmax(logits_BTV[:, :-1].astype(jnp.float32))
    return -jnp.mean(jnp.take_along_axis(log_p_BTV, tokens_BT[:, 1:, None], -1))


def gradients(
    learner: Learner,
    weights: Weights,
    tokens_BT: jax.Array,
    scalar: Callable[[jax.Array, jax.Array], jax.Array] = next_token_loss,
) -> tuple[Any, Activations]:
    """Returns the gradients of scalar(logits [B, T, V], tokens [B, T]) in the stored weights and in
    the activations, shaped as `observe` gives them.
    """

    def value(params, shifts):
        logits_BTV, _ = observe(learner, weights.replace(params=params), tokens_BT, shifts)
        return scalar(logits_BTV, tokens_BT)

    _, shapes = jax.eval_shape(lambda: observe(learner, weights, tokens_BT))
    shifts = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)
    return jax.grad(value, argnums=(0, 1))(weights.params, shifts)
