"""A training step and an evaluation step: pure functions (`lm.devices.shardings` jits them).

The page reads from the whole to its parts: the step, its gradient, the optimizer, the loss.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.config.stages import token_steps
from lm.training.guard import guard_step
from lm.training.state import (
    Hyper,
    Learner,
    State,
    Weights,
    narrow_weights,
    widen_weights,
)
from lm.training.update import (
    build_average,
    group_fractions,
    numbers_at_step,
    peak_lrs,
    update_stages,
)
from modules.losses import (
    add_error_probability,
    chunk_loss,
    logits_loss,
    select_chunk_size,
    shift_targets,
    token_weights_at,
    weigh_next_tokens,
)
from modules.optim import BatchFunctions
from modules.optim.groups import HIDDEN
from modules.optim.stages import apply_stages
from modules.optim.storage import round_weights
from modules.parallel.axes import count_shards
from modules.params import named_leaves
from modules.statistics import AUXILIARY, BACKWARD_STATS, STATS

Batch = Metrics = dict[str, jax.Array]
TRAINING = (STATS, AUXILIARY)  # collections that layers fill in a training pass
TOKEN_WEIGHTS = 'loss.token_weights'  # of the next tokens: a number of a step, not of a run


def make_train_step(
    learner: Learner, microbatches: int | None = None
) -> Callable[[State, Batch, Hyper], tuple[State, Metrics]]:
    """Returns `train_step(state, batch, hyper) -> (state, metrics)`.

    The gradient belongs to (sum of token losses) / (target tokens of the whole batch), so it does
    not depend on microbatches, hosts or padding. Each microbatch in turn updates the state of
    layers. A step that has diverged, or whose loss or gradient norm is a spike, may change nothing
    (`lm.training.guard`).

    Args:
      learner: the learner.
      microbatches: number of microbatches of a stage; None: train.microbatches.
    """
    recipe, description = learner.recipe, learner.description
    count = microbatches or recipe.train.microbatches

    def train_step(state: State, batch: Batch, hyper: Hyper):
        state = widen_weights(state)
        hyper = add_token_weights(learner, hyper, state.step)
        # A batch without a target has the loss 0, not 0 / 0.
        n_targets = jnp.maximum(jnp.sum(target_weights(batch, learner.bos_id)), 1.0)
        microbatches = split_microbatches(batch, count)

        def loss(used, backward, layer_stats, microbatch):
            variables = {'params': used, **layer_stats, **backward}
            sums, collections = apply_loss(learner, variables, microbatch, hyper, mutable=TRAINING)
            layer_stats = {name: collections[name] for name in layer_stats}
            # Divided by the targets of the whole batch: the gradients of microbatches then add up
            # to the batch's, however many targets each has.
            return sums['objective'] / n_targets, (sums, layer_stats)

        def apply_reparam(params):
            return description.reparam.apply(
                stop_frozen_gradients(learner, params), state.reparam, True
            )

        # Microbatches differentiate in the used weights; one pullback then serves them all.
        used, to_stored, reparam = jax.vjp(apply_reparam, state.params, has_aux=True)
        sums, grads, stats = _accumulate_gradients(loss, used, state.stats, microbatches)
        (grads,) = to_stored(grads)
        stats = finish_step(learner, stats, hyper)
        means = {name: sums[name] / n_targets for name in sums if name != 'tokens'}
        functions = batch_functions(learner, state, hyper, microbatches, n_targets)
        passed_state = state.replace(reparam=reparam, stats=stats)
        next_state, updates, stage_metrics = optimizer_step(
            learner, passed_state, hyper, grads, means, functions
        )
        metrics = {
            **means,
            **stage_metrics,
            'grad_norm': optax.tree.norm(grads),
            'update_norm': optax.tree.norm(updates),
            'batch_tokens': sums['tokens'],
        }
        metrics['loss'] = metrics.pop('objective')
        if 'targets' in batch:
            # Tokens that are no target cost the same work: the journal divides by this share, so
            # that tokens/s counts them (`lm.run.journal`).
            n_text_tokens = jnp.sum(text_weights(batch, learner.bos_id))
            metrics['target_share'] = sums['tokens'] / jnp.maximum(n_text_tokens, 1.0)
        next_state, metrics = guard_step(recipe.train, state, next_state, metrics)
        return narrow_weights(recipe, next_state), metrics

    return train_step


def make_eval_step(learner: Learner) -> Callable[[Weights, Batch, Hyper], Metrics]:
    """Returns `eval_step(weights, batch, hyper)`, which computes the `token_sums` of a batch."""

    def eval_step(weights, batch, hyper):
        return token_sums(learner, learner.variables(weights), batch, hyper)

    return eval_step


def add_token_weights(learner: Learner, hyper: Hyper, step: jax.Array) -> Hyper:
    """Returns `hyper` with the weights of the next tokens at a step, if there are several.

    Evaluation has no such entry, and so predicts only the next token.

    Args:
      learner: has the weights of each stage.
      hyper: the numbers of the run.
      step: number of updates done.
    """
    if (stages := learner.recipe.token_weights) is None:
        return hyper
    step = token_steps(learner.recipe.stages, step)
    return {**hyper, TOKEN_WEIGHTS: token_weights_at(stages, step / hyper['train.steps'])}


def find_targets(
    learner: Learner, batch: Batch, hyper: Hyper
) -> tuple[jax.Array, jax.Array, dict[str, Any]]:
    """Returns labels and weights of a pass, and the numbers of its loss.

    They are [B, T], or [B, T, n] if the loss is that of several next tokens.

    Args:
      learner: the learner.
      batch: tokens and segments.
      hyper: the numbers of the run, from `add_token_weights` in training.
    """
    labels_BT, numbers = batch['tokens'][:, 1:], learner.recipe.loss.option_values(hyper)
    weights_BT = target_weights(batch, learner.bos_id)
    if TOKEN_WEIGHTS not in hyper:
        return labels_BT, weights_BT, numbers
    token_weights_N = hyper[TOKEN_WEIGHTS]
    targets = shift_targets(labels_BT, weights_BT, batch['segments'], len(token_weights_N))
    return *targets, {**numbers, 'token_weights': token_weights_N}


def target_weights(batch: Batch, bos_id: int) -> jax.Array:
    """Returns [B, T] float32, 1 if the next token is a target.

    A batch of conversations, or of an objective that changes rows, marks its targets. Otherwise
    they are all tokens that are not padding and do not begin a document.
    """
    if 'targets' in batch:
        # BOS may be among them: a template may write it within a conversation, as ChatML does with
        # the BOS of SmolLM2, and it may be the token that ends an answer.
        is_target_BT = (batch['segments'][:, 1:] > 0) & (batch['targets'][:, 1:] > 0)
        return is_target_BT.astype(jnp.float32)
    return text_weights(batch, bos_id)


def text_weights(batch: Batch, bos_id: int) -> jax.Array:
    """Returns the `target_weights` [B, T] of a causal objective."""
    # Segment 0 is padding. BOS begins a document, which the tokens before it cannot predict.
    targets_BT = batch['tokens'][:, 1:]
    return ((batch['segments'][:, 1:] > 0) & (targets_BT != bos_id)).astype(jnp.float32)


def split_microbatches(batch: Batch, count: int) -> Batch:
    """Returns [count, B / count, ...]; microbatch i takes rows i, i + count, ...

    The stride spreads each device's contiguous rows evenly over microbatches, so that none move.
    """
    return jax.tree.map(
        lambda rows: jnp.swapaxes(rows.reshape(-1, count, *rows.shape[1:]), 0, 1), batch
    )


def stop_frozen_gradients(learner: Learner, params: Any, keep_unread: bool = False) -> Any:
    """Stops the gradients of weights that are not trained, so that they are never computed.

    Args:
      learner: tells which weights are trained, and by which optimizer.
      params: the stored weights.
      keep_unread: whether to keep gradients that the weight's optimizer does not read.

    Returns:
      The weights.
    """
    recipe, description = learner.recipe, learner.description

    def stop_gradient(weight, spec, is_trained):
        is_read = keep_unread or recipe.find_optimizer(spec).row.needs.gradient
        return weight if is_trained and is_read else jax.lax.stop_gradient(weight)

    return jax.tree.map(stop_gradient, params, description.specs, description.trainable)


def _accumulate_gradients(loss, used, stats, microbatches):
    """Returns (sums, gradient, stats) of `loss` over microbatches, in sequence.

    Statistics of the backward pass are returned by differentiation (`modules.statistics`).
    """
    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    backward = {name: tree for name, tree in stats.items() if name == BACKWARD_STATS}
    layer_stats = {name: tree for name, tree in stats.items() if name != BACKWARD_STATS}

    def run_microbatch(layer_stats, backward, microbatch):
        (grads, backward), (sums, layer_stats) = grad(used, backward, layer_stats, microbatch)
        return (grads, sums), layer_stats, backward

    first_microbatch = jax.tree.map(lambda rows: rows[0], microbatches)
    # A single microbatch needs no accumulator.
    if len(jax.tree.leaves(microbatches)[0]) == 1:
        (grads, sums), layer_stats, backward = run_microbatch(
            layer_stats, backward, first_microbatch
        )
        return sums, grads, layer_stats | backward

    def add(carry, microbatch):
        total, layer_stats, backward = carry
        increment, layer_stats, backward = run_microbatch(layer_stats, backward, microbatch)
        return (jax.tree.map(jnp.add, total, increment), layer_stats, backward), None

    shapes, *_ = jax.eval_shape(run_microbatch, layer_stats, backward, first_microbatch)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    ((grads, sums), layer_stats, backward), _ = jax.lax.scan(
        add, (zeros, layer_stats, backward), microbatches
    )
    return sums, grads, layer_stats | backward


def finish_step(learner: Learner, stats: Any, hyper: Hyper) -> Any:
    """Returns the state of layers after the last microbatch, by collection.

    Layers sum over the microbatches of a step what must not depend on their number.

    Args:
      learner: names the MLPs, whose rows finish a step.
      stats: the state of layers.
      hyper: the numbers of the run.
    """
    if STATS not in stats:
        return stats
    finished = stats[STATS]
    for kind in learner.recipe.kinds.values():  # a second one finds that nothing is left to do
        finished = kind.mlp.row.finish_step(finished, kind.mlp.option_values(hyper))
    return stats | {STATS: finished}


def batch_functions(
    learner: Learner, state: State, hyper: Hyper, parts: Batch, total: jax.Array
) -> BatchFunctions:
    """Returns functions of the batch that run the training pass with the state at the step's start.

    Args:
      learner: the learner.
      state: the state before the step.
      hyper: the numbers of the run.
      parts: the batch in microbatches.
      total: number of target tokens of the batch.

    Returns:
      Functions that optimizers may call.
    """
    loss = learner.recipe.loss

    def variables(params):
        stored = stop_frozen_gradients(learner, params, keep_unread=True)
        used, _ = learner.description.reparam.apply(stored, state.reparam, True)
        return {'params': used, **state.stats}

    def share(variables, rows):
        sums, _ = apply_loss(learner, variables, rows, hyper, mutable=TRAINING)
        return sums['objective'] / total

    def value_fn(params):
        rows_share = functools.partial(share, variables(params))
        if len(jax.tree.leaves(parts)[0]) > 1:
            # Otherwise the map holds the residuals of every microbatch at once.
            rows_share = jax.checkpoint(rows_share)
        return jnp.sum(jax.lax.map(rows_share, parts))

    def activations_fn(params, rows):
        return compute_activations(learner, variables(params), rows, TRAINING, hyper)[0]

    def logits_fn(params, rows):
        x_BTD, readout = activations_fn(params, rows)
        return readout(x_BTD)

    def share_from_logits(logits_BTV, rows):
        labels, weights, numbers = find_targets(learner, rows, hyper)
        row = weigh_next_tokens(loss.row) if TOKEN_WEIGHTS in hyper else loss.row
        return row(logits_BTV, lambda x: x, labels, weights, **numbers)['objective'] / total

    weights = jax.vmap(lambda rows: target_weights(rows, learner.bos_id))(parts)
    return BatchFunctions(
        rows=parts,
        weights=weights,
        value_fn=value_fn,
        share_fn=lambda params, rows: share(variables(params), rows),
        activations_fn=activations_fn,
        logits_fn=logits_fn,
        share_from_logits=share_from_logits,
        tokens_at_a_time=loss_chunk_size(learner, weights[0].shape, learner.model.vocab_size),
    )


def optimizer_step(
    learner: Learner,
    state: State,
    hyper: Hyper,
    grads: Any,
    means: Metrics,
    functions: BatchFunctions,
) -> tuple[State, Any, Metrics]:
    """Computes the next state from the gradient of the stored weights.

    Args:
      learner: the learner.
      state: the state before the step; its `stats` are returned unchanged.
      hyper: the numbers of the run.
      grads: gradient in the stored weights.
      means: `objective` and the other terms of the loss, per target token of the batch.
      functions: functions of the batch that optimizers may call.

    Returns:
      (state, updates, metrics): `updates` are those added to the weights, before any map after the
      update (`modules.reparam`).
    """
    recipe, description, params = learner.recipe, learner.description, state.params
    # `state.step` counts the updates done, so the first update is at step 0 of the schedule.
    hyper = numbers_at_step(hyper, state.step, recipe.stages)
    fractions = group_fractions(recipe, hyper, state.step)
    updates, opt_state, stage_metrics = apply_stages(
        update_stages(recipe, description, hyper, fractions),
        grads,
        state.opt_state,
        params,
        value=means['objective'],
        grad=grads,
        means=means,
        **functions._asdict(),
    )
    average = build_average(recipe, description, hyper)
    # Most averages return the update unchanged; Schedule-Free replaces it.
    updates, average_state = average.adjust_updates(
        updates, params, state.average, fractions[HIDDEN]
    )
    params, reparam = description.after_update(optax.apply_updates(params, updates), state.reparam)
    if recipe.optim.weight_dtype != 'float32':
        params = round_weights(params, recipe.optim.weight_rounding, state.step)
    average_state = average.update_average(params, average_state)
    next_state = State(
        state.step + 1, params, reparam, state.stats, opt_state, average_state, state.watched
    )
    return next_state, updates, stage_metrics | {'lr': peak_lrs(hyper)[HIDDEN] * fractions[HIDDEN]}


def token_sums(learner: Learner, variables: Any, batch: Batch, hyper: Hyper) -> Metrics:
    """Computes sums over target tokens.

    Args:
      learner: the learner.
      variables: as `model.apply` takes them.
      batch: tokens and segments.
      hyper: the numbers of the run.

    Returns:
      `objective`, `ce`, `tokens` and the other terms of the loss, by name.
    """
    return apply_loss(learner, variables, batch, hyper, mutable=())[0]


def apply_loss(
    learner: Learner, variables: Any, batch: Batch, hyper: Hyper, mutable: tuple[str, ...]
) -> tuple[Metrics, Any]:
    """Computes `token_sums` and the mutable collections.

    If `mutable` has STATS and AUXILIARY, this is a training pass: layers update their state, and
    the auxiliary losses that they sow are added to the objective, once for each target token.

    Args:
      learner: the learner.
      variables: as `model.apply` takes them.
      batch: tokens and segments.
      hyper: the numbers of the run.
      mutable: names of Linen collections.

    Returns:
      (sums by name, the collections after the pass).
    """
    (x_BTD, readout), collections = compute_activations(learner, variables, batch, mutable, hyper)
    return loss_sums(learner, x_BTD, readout, collections, batch, hyper), collections


def compute_activations(
    learner: Learner, variables: Any, batch: Batch, mutable: tuple[str, ...], hyper: Hyper
) -> tuple[tuple[jax.Array, Any], Any]:
    """Computes the last activations.

    Args:
      learner: the learner.
      variables: as `model.apply` takes them.
      batch: tokens and segments.
      mutable: names of Linen collections.
      hyper: has the dropout rates, which a training pass reads.

    Returns:
      ((activations [B, T, D], readout), the collections after the pass).
    """
    # A row has T + 1 tokens: tokens 0 to T - 1 predict tokens 1 to T (`lm.data.rows`).
    tokens_BT, packed_BT = batch['tokens'][:, :-1], batch['segments'][:, :-1]
    segments_BT = packed_BT if learner.recipe.data.mask_documents else None
    prefix_BT = batch['prefix'][:, :-1] if 'prefix' in batch else None
    # A pass trains if and only if it may change STATS (`modules.statistics`): no other flag exists.
    dropout = learner.recipe.dropout if STATS in mutable else {}
    rates = {site: hyper[path] for site, path in dropout.items()} or None
    args = (tokens_BT, segments_BT, packed_BT > 0, prefix_BT, rates)
    model = learner.model
    if formats := learner.recipe.traced_formats:
        numbers = {path.split('.')[1][0]: hyper[path] for path in formats if path in hyper}
        model = model.clone(kernels=model.kernels.with_formats(numbers))
    return model.apply(variables, *args, method='activations', mutable=mutable)


def loss_sums(
    learner: Learner, x_BTD: jax.Array, readout: Any, collections: Any, batch: Batch, hyper: Hyper
) -> Metrics:
    """Computes `token_sums` from the results of `compute_activations`.

    Args:
      learner: the learner.
      x_BTD: the last activations.
      readout: maps activations to logits.
      collections: the collections after the pass.
      batch: tokens and segments.
      hyper: the numbers of the run.

    Returns:
      Sums over target tokens by name.
    """
    recipe, row = learner.recipe, learner.recipe.loss.row
    labels, weights, numbers = find_targets(learner, batch, hyper)
    fused = learner.model.kernels.fused_cross_entropy
    # Kernels compute log Z, the label's logit and the mean logit. Losses that need more of the
    # logits (`has_kernels` is False) use plain operations under every kernels.cross_entropy.
    if fused is not None and row.has_kernels:
        row = logits_loss(fused)
    if any(auxiliary.row.needs.error_probability for auxiliary in recipe.optimizers.values()):
        row = add_error_probability(row)
    if TOKEN_WEIGHTS in hyper:
        row, weights_BT = weigh_next_tokens(row), weights[..., 0]
    else:
        weights_BT = weights
    loss = chunk_loss(row, loss_chunk_size(learner, weights_BT.shape, readout.weight_DV.shape[-1]))
    sums = loss(x_BTD, readout, labels, weights, **numbers)
    sums |= {'tokens': jnp.sum(weights_BT)}
    for auxiliary in recipe.auxiliaries if AUXILIARY in collections else ():
        sown = named_leaves(collections[AUXILIARY]).items()
        # `sow` stores a tuple, so a path ends with an index, and the name is the part before it.
        total = sum(jnp.sum(leaf) for path, leaf in sown if path.split('/')[-2] == auxiliary.name)
        weighted = auxiliary.row(total, **auxiliary.option_values(hyper))
        # All sums are divided by the batch's targets later. An auxiliary loss is one number of a
        # pass: times the targets, a microbatch has a weight in proportion to them.
        sums[auxiliary.name] = total * sums['tokens']
        sums['objective'] += weighted * sums['tokens']
    return sums


def loss_chunk_size(learner: Learner, shape_BT: tuple[int, ...], vocab_size: int) -> int:
    """Returns the number of tokens whose logits are computed at once on all devices; 0 for all.

    Args:
      learner: has the config and the platform.
      shape_BT: rows and tokens.
      vocab_size: size of the vocabulary, V.
    """
    if (chunk := learner.recipe.config.loss.chunk) is not None:
        return chunk
    shards, platform = count_shards('BTV', (*shape_BT, vocab_size)), learner.model.kernels.platform
    # The mesh that is traced, not jax.devices(): a step may be compiled for devices that are not
    # here (`tpu.plan`).
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device else ''
    return select_chunk_size(math.prod(shape_BT), vocab_size, shards, platform, kind)
