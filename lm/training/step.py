"""One training step and one evaluation step: pure functions (`lm.devices.shardings` jits them).

The page reads from the whole to its parts: the step, its gradient, the optimizer, the loss.
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.model.parameters import optimizer_field
from lm.training.state import Hyper, Learner, State, Weights
from lm.training.update import bind_rows, build_average, peak_lrs, update_stages
from modules.losses import add_error_probability, chunk_loss, logits_loss, select_chunk_size
from modules.optim import BatchFunctions
from modules.optim.stages import apply_stages
from modules.parallel.axes import count_shards
from modules.params import named_leaves
from modules.statistics import AUXILIARY, BACKWARD_STATS, STATS

Batch = Metrics = dict[str, jax.Array]
TRAINING = (STATS, AUXILIARY)  # what layers fill in a training pass
MUST_BE_FINITE = ('loss', 'grad_norm', 'update_norm')  # otherwise the step has diverged


def make_train_step(learner: Learner) -> Callable[[State, Batch, Hyper], tuple[State, Metrics]]:
    """Returns `train_step(state, batch, hyper) -> (state, metrics)`.

    The gradient is that of (sum of token losses) / (target tokens of the whole batch), so it does
    not depend on microbatches, hosts or padding. Each microbatch in turn updates what layers carry.
    With on_divergence = skip_step, a step whose loss or gradient is not finite changes nothing but
    the step count, and its metrics have `skipped` = 1.
    """
    recipe, described = learner.recipe, learner.description

    def train_step(state: State, batch: Batch, hyper: Hyper):
        total = jnp.maximum(jnp.sum(target_weights(batch, learner.bos_id)), 1.0)
        parts = split_microbatches(batch, recipe.train.microbatches)

        def loss(used, backward, carried, part):
            variables = {'params': used, **carried, **backward}
            sums, filled = apply_loss(learner, variables, part, hyper, mutable=TRAINING)
            carried = {name: filled[name] for name in carried}
            return sums['objective'] / total, (sums, carried)

        def apply_reparam(params):
            return described.reparam.apply(
                stop_frozen_gradients(learner, params), state.reparam, True
            )

        used, to_stored, reparam = jax.vjp(apply_reparam, state.params, has_aux=True)
        sums, grads, stats = _accumulate_gradients(loss, used, state.stats, parts)
        (grads,) = to_stored(grads)
        means = {name: sums[name] / total for name in sums if name != 'tokens'}
        functions = batch_functions(learner, state, hyper, parts, total)
        passed = state.replace(reparam=reparam, stats=stats)
        new, updates, seen = optimizer_step(learner, passed, hyper, grads, means, functions)
        metrics = {
            **means,
            **seen,
            'grad_norm': optax.tree.norm(grads),
            'update_norm': optax.tree.norm(updates),
            'batch_tokens': sums['tokens'],
        }
        metrics['loss'] = metrics.pop('objective')
        if 'targets' in batch:
            of_text = jnp.sum(text_weights(batch, learner.bos_id))
            metrics['target_share'] = sums['tokens'] / jnp.maximum(of_text, 1.0)
        if recipe.train.on_divergence == 'skip_step':
            finite = jnp.all(jnp.isfinite(jnp.stack([metrics[name] for name in MUST_BE_FINITE])))
            kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, state)
            new, metrics['skipped'] = kept.replace(step=new.step), 1.0 - finite
        return new, metrics

    return train_step


def make_eval_step(learner: Learner) -> Callable[[Weights, Batch, Hyper], Metrics]:
    """Returns `eval_step(weights, batch, hyper)`, the `token_sums` of one batch."""

    def eval_step(weights, batch, hyper):
        return token_sums(learner, learner.variables(weights), batch, hyper)

    return eval_step


def target_weights(batch: Batch, bos_id: int) -> jax.Array:
    """Returns [B, T] float32, 1 where the next token is a target: not padding, not a beginning, and
    among those that an objective marks in the batch (`lm.model.objectives`).
    """
    weights_BT = text_weights(batch, bos_id)
    if 'targets' in batch:
        weights_BT = weights_BT * batch['targets'][:, 1:]
    return weights_BT


def text_weights(batch: Batch, bos_id: int) -> jax.Array:
    """Returns the `target_weights` [B, T] of a causal model."""
    targets_BT = batch['tokens'][:, 1:]
    return ((batch['segments'][:, 1:] > 0) & (targets_BT != bos_id)).astype(jnp.float32)


def split_microbatches(batch: Batch, count: int) -> Batch:
    """Returns [count, B / count, ...]; part i takes rows i, i + count, ...

    Strided, so that each device's contiguous rows spread evenly over the parts without moving.
    """
    return jax.tree.map(
        lambda rows: jnp.swapaxes(rows.reshape(-1, count, *rows.shape[1:]), 0, 1), batch
    )


def stop_frozen_gradients(learner: Learner, params: Any, keep_unread: bool = False) -> Any:
    """Stops the gradients of weights that are not trained, so that they are never computed.

    unread: whether weights whose optimizer reads no gradient keep theirs.
    """
    optimizers, described = learner.recipe.optimizers, learner.description

    def stop_gradient(w, spec, trained):
        is_read = keep_unread or optimizers[optimizer_field(spec)].row.needs.gradient
        return w if trained and is_read else jax.lax.stop_gradient(w)

    return jax.tree.map(stop_gradient, params, described.specs, described.trainable)


def _accumulate_gradients(loss, used, stats, parts):
    """Returns (sums, gradient, stats) of `loss` over microbatches, one after the other.

    The statistics of the backward pass come back as gradients (`modules.statistics`).
    """
    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    backward = {name: tree for name, tree in stats.items() if name == BACKWARD_STATS}
    carried = {name: tree for name, tree in stats.items() if name != BACKWARD_STATS}

    def run_part(carried, backward, part):
        (grads, backward), (sums, carried) = grad(used, backward, carried, part)
        return (grads, sums), carried, backward

    first = jax.tree.map(lambda rows: rows[0], parts)
    if len(jax.tree.leaves(parts)[0]) == 1:
        (grads, sums), carried, backward = run_part(carried, backward, first)
        return sums, grads, carried | backward

    def add(carry, part):
        total, carried, backward = carry
        more, carried, backward = run_part(carried, backward, part)
        return (jax.tree.map(jnp.add, total, more), carried, backward), None

    shapes, *_ = jax.eval_shape(run_part, carried, backward, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    ((grads, sums), carried, backward), _ = jax.lax.scan(add, (zeros, carried, backward), parts)
    return sums, grads, carried | backward


def batch_functions(
    learner: Learner, state: State, hyper: Hyper, parts: Batch, total: jax.Array
) -> BatchFunctions:
    """Returns functions that run the training pass with what the step's start carries.

    parts: the batch in microbatches; total: its target tokens.
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
        share_of_rows = functools.partial(share, variables(params))
        if learner.recipe.train.microbatches > 1:
            # Or the map keeps what all of them need to go backward.
            share_of_rows = jax.checkpoint(share_of_rows)
        return jnp.sum(jax.lax.map(share_of_rows, parts))

    def activations_fn(params, rows):
        return compute_activations(learner, variables(params), rows, TRAINING, hyper)[0]

    def logits_fn(params, rows):
        x_BTD, readout = activations_fn(params, rows)
        return readout(x_BTD)

    def share_from_logits(logits_BTV, rows):
        weights_BT = target_weights(rows, learner.bos_id)
        labels_BT, numbers = rows['tokens'][:, 1:], loss.option_values(hyper)
        sums = loss.row(logits_BTV, lambda x: x, labels_BT, weights_BT, **numbers)
        return sums['objective'] / total

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

    Returns (state, updates, seen): `updates` were added to the weights before any map after them
    (`modules.reparam`), `seen` is recorded by name. The new state keeps `stats`, and `reparam` but
    for that map. means: `objective` and the other terms of the loss, per target token of the batch.
    """
    recipe, described, params = learner.recipe, learner.description, state.params
    schedule = bind_rows(recipe, hyper)['optim.schedule']
    fraction = schedule(state.step, hyper['train.steps'])
    updates, opt_state, seen = apply_stages(
        update_stages(recipe, described, hyper, fraction),
        grads,
        state.opt_state,
        params,
        value=means['objective'],
        grad=grads,
        means=means,
        **functions._asdict(),
    )
    average = build_average(recipe, described, hyper)
    updates, kept = average.adjust_updates(updates, params, state.average, fraction)
    params, reparam = described.after_update(optax.apply_updates(params, updates), state.reparam)
    kept = average.update_average(params, kept)
    new = State(state.step + 1, params, reparam, state.stats, opt_state, kept)
    return new, updates, seen | {'lr': peak_lrs(hyper)['optim.name'] * fraction}


def token_sums(learner: Learner, variables: Any, batch: Batch, hyper: Hyper) -> Metrics:
    """Returns sums over target tokens: `objective`, `ce`, `tokens`, and other terms of the loss."""
    return apply_loss(learner, variables, batch, hyper, mutable=())[0]


def apply_loss(
    learner: Learner, variables: Any, batch: Batch, hyper: Hyper, mutable: tuple[str, ...]
) -> tuple[Metrics, Any]:
    """Returns `token_sums`, and the Linen collections named in `mutable` as the pass filled them.

    With STATS and AUXILIARY among them the pass is one of training: layers update what they carry,
    and the auxiliary losses that they sow are in the objective, once for each target token.
    """
    (x_BTD, readout), filled = compute_activations(learner, variables, batch, mutable, hyper)
    return loss_sums(learner, x_BTD, readout, filled, batch, hyper), filled


def compute_activations(
    learner: Learner, variables: Any, batch: Batch, mutable: tuple[str, ...], hyper: Hyper
) -> tuple[tuple[jax.Array, Any], Any]:
    """Returns ((the last activations [B, T, D], the readout), the collections of `mutable`).

    hyper: has the rates of dropout, which a pass of training reads.
    """
    tokens_BT, read_BT = batch['tokens'][:, :-1], batch['segments'][:, :-1]
    segments_BT = read_BT if learner.recipe.data.mask_documents else None
    prefix_BT = batch['prefix'][:, :-1] if 'prefix' in batch else None
    dropout = learner.recipe.dropout if STATS in mutable else {}
    rates = {what: hyper[path] for what, path in dropout.items()} or None
    given = (tokens_BT, segments_BT, read_BT > 0, prefix_BT, rates)
    return learner.model.apply(variables, *given, method='activations', mutable=mutable)


def loss_sums(
    learner: Learner, x_BTD: jax.Array, readout: Any, filled: Any, batch: Batch, hyper: Hyper
) -> Metrics:
    """Returns `token_sums` from the results of `activations`."""
    recipe, labels_BT = learner.recipe, batch['tokens'][:, 1:]
    weights_BT, row = target_weights(batch, learner.bos_id), recipe.loss.row
    fused = learner.model.kernels.fused_cross_entropy
    if fused is not None and row.has_kernels:
        row = logits_loss(fused)
    if any(part.row.needs.error_probability for part in recipe.optimizers.values()):
        row = add_error_probability(row)
    loss = chunk_loss(row, loss_chunk_size(learner, labels_BT.shape, readout.weight_DV.shape[-1]))
    sums = loss(x_BTD, readout, labels_BT, weights_BT, **recipe.loss.option_values(hyper))
    sums |= {'tokens': jnp.sum(weights_BT)}
    for part in recipe.auxiliaries if AUXILIARY in filled else ():
        sown = named_leaves(filled[AUXILIARY]).items()
        total = sum(jnp.sum(leaf) for path, leaf in sown if path.split('/')[-2] == part.name)
        weighed = part.row(total, **part.option_values(hyper))
        sums[part.name] = total * sums['tokens']
        sums['objective'] += weighed * sums['tokens']
    return sums


def loss_chunk_size(learner: Learner, shape_BT: tuple[int, int], vocab_size: int) -> int:
    """Returns how many tokens' logits are made at a time, on all devices together; 0: all."""
    if (chunk := learner.recipe.config.loss.chunk) is not None:
        return chunk
    parts, platform = count_shards('BTV', (*shape_BT, vocab_size)), learner.model.kernels.platform
    device = jax.sharding.get_abstract_mesh().abstract_device
    kind = device.device_kind if device else ''
    return select_chunk_size(math.prod(shape_BT), vocab_size, parts, platform, kind)
