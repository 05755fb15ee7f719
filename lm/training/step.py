"""One training step and one evaluation step: pure functions (`lm.devices.shardings` jits them)."""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.model.parameters import optimizer_of
from lm.training.state import Hyper, Learner, State, Weights
from lm.training.update import Asked, optimizer_step
from modules.devices import pieces
from modules.losses import (
    by_chunks,
    logits_loss,
    tokens_at_a_time,
    with_error_probability,
)
from modules.params import named_leaves
from modules.statistics import AUXILIARY, BACKWARD_STATS, STATS

Batch = dict[str, jax.Array]
TRAINING = (STATS, AUXILIARY)  # what layers fill in a training pass
MUST_BE_FINITE = ('loss', 'grad_norm', 'update_norm')  # otherwise the step has diverged


def target_weights(batch: Batch, bos_id: int) -> jax.Array:
    """[B, T] float32: 1 where the next token is one to predict: not padding, not a beginning, and
    a target of the objective where the batch says which are (`lm.model.objectives`).
    """
    weights_BT = text_weights(batch, bos_id)
    if 'targets' in batch:
        weights_BT = weights_BT * batch['targets'][:, 1:]
    return weights_BT


def text_weights(batch: Batch, bos_id: int) -> jax.Array:
    """[B, T] float32: `target_weights` of a causal model."""
    targets_BT = batch['tokens'][:, 1:]
    return ((batch['segments'][:, 1:] > 0) & (targets_BT != bos_id)).astype(jnp.float32)


def token_sums(
    learner: Learner, variables: Any, batch: Batch, hyper: Hyper
) -> dict[str, jax.Array]:
    """Sums over the target tokens: `objective`, `ce`, `tokens`, and the loss's other terms."""
    return observed_sums(learner, variables, batch, hyper, mutable=())[0]


def observed_sums(
    learner: Learner, variables: Any, batch: Batch, hyper: Hyper, mutable: tuple[str, ...]
) -> tuple[dict[str, jax.Array], Any]:
    """`token_sums`, and the Linen collections named in `mutable`, which the forward pass filled.

    With STATS and AUXILIARY among them the pass is one of training: layers update what they carry,
    and what they sow as auxiliary losses is in the objective, once for each target token.
    """
    (x_BTD, readout), filled = activations(learner, variables, batch, mutable)
    return loss_sums(learner, x_BTD, readout, filled, batch, hyper), filled


def activations(
    learner: Learner, variables: Any, batch: Batch, mutable: tuple[str, ...]
) -> tuple[tuple[jax.Array, Any], Any]:
    """((the last activations [B, T, D], the readout), the collections named in `mutable`)."""
    tokens_BT, read_BT = batch['tokens'][:, :-1], batch['segments'][:, :-1]
    segments_BT = read_BT if learner.recipe.data.mask_documents else None
    prefix_BT = batch['prefix'][:, :-1] if 'prefix' in batch else None
    return learner.model.apply(
        variables,
        tokens_BT,
        segments_BT,
        read_BT > 0,
        prefix_BT,
        method='activations',
        mutable=mutable,
    )


def loss_sums(
    learner: Learner, x_BTD: jax.Array, readout: Any, filled: Any, batch: Batch, hyper: Hyper
) -> dict[str, jax.Array]:
    """`token_sums` of what `activations` gave."""
    recipe, labels_BT = learner.recipe, batch['tokens'][:, 1:]
    weights_BT, row = target_weights(batch, learner.bos_id), recipe.loss.row
    fused = learner.model.kernels.fused_cross_entropy
    if fused is not None and row.has_kernels:
        row = logits_loss(fused)
    if any(part.row.needs.error_probability for part in recipe.optimizers.values()):
        row = with_error_probability(row)
    loss = by_chunks(row, chunk_of(learner, labels_BT.shape, readout.weight_DV.shape[-1]))
    sums = loss(x_BTD, readout, labels_BT, weights_BT, **recipe.loss.numbers(hyper))
    sums |= {'tokens': jnp.sum(weights_BT)}
    for part in recipe.auxiliaries if AUXILIARY in filled else ():
        total = total_sown(filled[AUXILIARY], part.name)
        weighed = part.row(total, **part.numbers(hyper))
        sums[part.name] = total * sums['tokens']
        sums['objective'] += weighed * sums['tokens']
    return sums


def chunk_of(learner: Learner, shape_BT: tuple[int, int], vocab_size: int) -> int:
    """Of how many tokens logits are made at a time, on all devices together; 0: of all."""
    chunk = learner.recipe.config.loss.chunk
    if chunk is not None:
        return chunk
    return tokens_at_a_time(math.prod(shape_BT), vocab_size, pieces('BTV', (*shape_BT, vocab_size)))


def total_sown(collection: Any, name: str) -> jax.Array:
    """The sum over layers of what they have sown as `name`."""
    leaves = named_leaves(collection)
    return sum(jnp.sum(leaf) for path, leaf in leaves.items() if path.split('/')[-2] == name)


def microbatched(batch: Batch, count: int) -> Batch:
    """[B, ...] -> [count, B / count, ...]; part i takes rows i, i + count, ...

    Strided, so that each device's contiguous rows spread evenly over the parts without moving.
    """

    def cut(rows):
        return jnp.swapaxes(rows.reshape(-1, count, *rows.shape[1:]), 0, 1)

    return jax.tree.map(cut, batch)


def make_train_step(
    learner: Learner,
) -> Callable[[State, Batch, Hyper], tuple[State, dict[str, jax.Array]]]:
    """`train_step(state, batch, hyper) -> (state, metrics)`.

    The gradient is that of (sum of token losses) / (target tokens of the whole batch), so it does
    not depend on microbatches, hosts or padding; what layers carry is updated by each microbatch in
    turn. With on_divergence = skip_step, a step whose loss or gradient is not finite changes
    nothing but the step count, and says so in `skipped`.
    """
    recipe, described = learner.recipe, learner.described

    def train_step(state: State, batch: Batch, hyper: Hyper):
        total = jnp.maximum(jnp.sum(target_weights(batch, learner.bos_id)), 1.0)
        parts = microbatched(batch, recipe.train.microbatches)

        def loss(used, backward, carried, part):
            variables = {'params': used, **carried, **backward}
            sums, filled = observed_sums(learner, variables, part, hyper, mutable=TRAINING)
            carried = {name: filled[name] for name in carried}
            return sums['objective'] / total, (sums, carried)

        def use(params):
            return described.reparam.apply(differentiated(learner, params), state.reparam, True)

        used, to_stored, reparam = jax.vjp(use, state.params, has_aux=True)
        sums, grads, stats = _sum_over_parts(loss, used, state.stats, parts)
        (grads,) = to_stored(grads)
        means = {name: sums[name] / total for name in sums if name != 'tokens'}
        made = optimizer_step(
            learner,
            state.replace(reparam=reparam, stats=stats),
            hyper,
            grads,
            means,
            asked_of(learner, state, hyper, parts, total),
        )
        metrics = {
            'loss': means['objective'],
            **{name: value for name, value in means.items() if name != 'objective'},
            **made.seen,
            'lr': made.lr,
            'grad_norm': optax.tree.norm(grads),
            'update_norm': optax.tree.norm(made.updates),
            'batch_tokens': sums['tokens'],
        }
        if 'targets' in batch:
            of_text = jnp.sum(text_weights(batch, learner.bos_id))
            metrics['target_share'] = sums['tokens'] / jnp.maximum(of_text, 1.0)
        new = made.state
        if recipe.train.on_divergence == 'skip_step':
            new, metrics = _unless_divergent(state, new, metrics)
        return new, metrics

    return train_step


def asked_of(learner: Learner, state: State, hyper: Hyper, parts: Batch, total: jax.Array) -> Asked:
    """Functions of the stored parameters that run the training pass from the step's start: each
    microbatch with what layers and reparametrisations carry there.

    parts: the batch in microbatches; total: its target tokens.
    """
    loss = learner.recipe.loss

    def variables(params):
        stored = trained_alone(learner, params)
        used, _ = learner.described.reparam.apply(stored, state.reparam, True)
        return {'params': used, **state.stats}

    def share(variables, rows):
        sums, _ = observed_sums(learner, variables, rows, hyper, mutable=TRAINING)
        return sums['objective'] / total

    def value_fn(params):
        once = variables(params)
        own = functools.partial(share, once)
        if learner.recipe.train.microbatches > 1:
            own = jax.checkpoint(own)  # or the map keeps what all of them need to go backward
        return jnp.sum(jax.lax.map(own, parts))

    def activations_fn(params, rows):
        return activations(learner, variables(params), rows, TRAINING)[0]

    def of_logits(logits_BTV, rows):
        weights_BT = target_weights(rows, learner.bos_id)
        given = loss.numbers(hyper)
        sums = loss.row(logits_BTV, lambda x: x, rows['tokens'][:, 1:], weights_BT, **given)
        return sums['objective'] / total

    weights = jax.vmap(lambda rows: target_weights(rows, learner.bos_id))(parts)
    return Asked(
        rows=parts,
        weights=weights,
        value_fn=value_fn,
        share_fn=lambda params, rows: share(variables(params), rows),
        activations_fn=activations_fn,
        of_logits=of_logits,
        tokens_at_a_time=chunk_of(learner, weights[0].shape, learner.model.vocab_size),
    )


def differentiated(learner: Learner, params: Any) -> Any:
    """`trained_alone`, without those whose optimizer reads no gradient."""

    def own(w, spec):
        needs = learner.recipe.optimizers[optimizer_of(spec)].row.needs
        return w if needs.gradient else jax.lax.stop_gradient(w)

    return jax.tree.map(own, trained_alone(learner, params), learner.described.specs)


def trained_alone(learner: Learner, params: Any) -> Any:
    """The weights, of which those that are not trained have no gradient: it is never computed, and
    their update is none.
    """
    return jax.tree.map(
        lambda w, trained: w if trained else jax.lax.stop_gradient(w),
        params,
        learner.described.trainable,
    )


def _sum_over_parts(loss, used, stats, parts):
    """(sums, gradient, stats) of `loss` over microbatches, one after the other.

    The statistics of the backward pass come back as gradients (`modules.statistics`).
    """
    grad = jax.grad(loss, argnums=(0, 1), has_aux=True)
    backward = {name: tree for name, tree in stats.items() if name == BACKWARD_STATS}
    carried = {name: tree for name, tree in stats.items() if name != BACKWARD_STATS}

    def one(carried, backward, part):
        (grads, backward), (sums, carried) = grad(used, backward, carried, part)
        return (grads, sums), carried, backward

    first = jax.tree.map(lambda rows: rows[0], parts)
    if len(jax.tree.leaves(parts)[0]) == 1:
        (grads, sums), carried, backward = one(carried, backward, first)
        return sums, grads, carried | backward

    def add(carry, part):
        total, carried, backward = carry
        found, carried, backward = one(carried, backward, part)
        return (jax.tree.map(jnp.add, total, found), carried, backward), None

    shapes, *_ = jax.eval_shape(one, carried, backward, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    ((grads, sums), carried, backward), _ = jax.lax.scan(add, (zeros, carried, backward), parts)
    return sums, grads, carried | backward


def _unless_divergent(old: State, new: State, metrics: dict[str, jax.Array]):
    watched = jnp.stack([metrics[name] for name in MUST_BE_FINITE])
    finite = jnp.all(jnp.isfinite(watched))
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    return kept.replace(step=new.step), metrics | {'skipped': 1.0 - finite}


def make_eval_step(
    learner: Learner,
) -> Callable[[Weights, Batch, Hyper], dict[str, jax.Array]]:
    """`eval_step(weights, batch, hyper)`: the sums of `token_sums` over one batch."""

    def eval_step(weights, batch, hyper):
        return token_sums(learner, learner.variables(weights), batch, hyper)

    return eval_step
