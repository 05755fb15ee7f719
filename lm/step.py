"""One training step and one evaluation step: pure functions (`lm.shardings` jits them)."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.state import Hyper, Learner, State, Weights, optimizer
from modules.losses import LOSSES
from modules.losses.cross_entropy import z_loss
from modules.optim import SCHEDULES
from modules.scaling import DECAY_RULES
from modules.statistics import AUXILIARY, BACKWARD_STATS, STATS

Batch = dict[str, jax.Array]
MUST_BE_FINITE = ('loss', 'grad_norm', 'update_norm')  # otherwise the step has diverged


def target_weights(batch: Batch, bos_id: int) -> jax.Array:
    """[B, T] float32: 1 where the next token is one to predict: not padding, not a beginning."""
    targets_BT = batch['tokens'][:, 1:]
    return ((batch['segments'][:, 1:] > 0) & (targets_BT != bos_id)).astype(jnp.float32)


def token_sums(
    learner: Learner, variables: Any, batch: Batch, hyper: Hyper
) -> dict[str, jax.Array]:
    """Sums over the target tokens: `objective` (z-loss term included), `ce`, `z_loss`, `tokens`."""
    return observed_sums(learner, variables, batch, hyper, mutable=False)[0]


def observed_sums(
    learner: Learner,
    variables: Any,
    batch: Batch,
    hyper: Hyper,
    mutable: tuple[str, ...] | bool,
) -> tuple[dict[str, jax.Array], Any]:
    """`token_sums`, and the Linen collections named in `mutable`, which the forward pass filled.

    With STATS and AUXILIARY among them the pass is one of training: layers update what they carry,
    and what they sow as auxiliary losses is in the objective, once for each target token.
    """
    config, model, bos_id = learner.config, learner.model, learner.bos_id
    tokens_BT, targets_M = batch['tokens'][:, :-1], batch['tokens'][:, 1:].reshape(-1)
    read_BT = batch['segments'][:, :-1]
    segments_BT = read_BT if config.data.mask_documents else None
    logits_BTV = model.apply(variables, tokens_BT, segments_BT, read_BT > 0, mutable=mutable)
    logits_BTV, filled = logits_BTV if mutable else (logits_BTV, {})
    logits_MV = logits_BTV.reshape(-1, logits_BTV.shape[-1])
    token = LOSSES[config.loss.name](logits_MV, targets_M, hyper.label_smoothing)
    weights_M = target_weights(batch, bos_id).reshape(-1)
    z_M = z_loss(token.log_z)
    sums = {
        'objective': jnp.sum(weights_M * (token.objective + hyper.z_loss * z_M)),
        'ce': jnp.sum(weights_M * token.ce),
        'z_loss': jnp.sum(weights_M * z_M),
        'tokens': jnp.sum(weights_M),
    }
    if AUXILIARY in filled:
        balance = sum(jnp.sum(leaf) for leaf in jax.tree.leaves(filled[AUXILIARY]))
        sums['balance_loss'] = balance * sums['tokens']
        sums['objective'] += hyper.balance_loss * sums['balance_loss']
    return sums, filled


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
    config, bos_id, described = learner.config, learner.bos_id, learner.described

    def train_step(state: State, batch: Batch, hyper: Hyper):
        total = jnp.maximum(jnp.sum(target_weights(batch, bos_id)), 1.0)

        def loss(used, backward, carried, part):
            variables = {'params': used, **carried, **backward}
            sums, filled = observed_sums(
                learner, variables, part, hyper, mutable=(STATS, AUXILIARY)
            )
            carried = {name: filled[name] for name in carried}
            return sums['objective'] / total, (sums, carried)

        def use(params):
            # The gradient of what is not trained is never computed, and its update is none.
            kept = jax.tree.map(
                lambda w, trained: w if trained else jax.lax.stop_gradient(w),
                params,
                described.trainable,
            )
            return described.reparam.apply(kept, state.reparam, True)

        used, to_stored, reparam = jax.vjp(use, state.params, has_aux=True)
        parts = microbatched(batch, config.train.microbatches)
        sums, grads, stats = _sum_over_parts(loss, used, state.stats, parts)
        (grads,) = to_stored(grads)
        fraction = SCHEDULES[config.optim.schedule](state.step, hyper)
        lr = hyper.lr * fraction
        decay = DECAY_RULES[config.optim.decay_rule](hyper.weight_decay, hyper.lr, fraction)
        tx = optimizer(config, hyper)
        direction, opt_state = tx.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(
            lambda u, w, s, trained: _update(u, w, s, lr, decay) if trained else jnp.zeros_like(w),
            direction,
            state.params,
            described.scalings,
            described.trainable,
        )
        means = {name: sums[name] / total for name in sums if name != 'tokens'}
        metrics = {
            'loss': means.pop('objective'),
            **means,
            'lr': lr,
            'grad_norm': optax.tree.norm(grads),
            'update_norm': optax.tree.norm(updates),
            'batch_tokens': sums['tokens'],
        }
        params = optax.apply_updates(state.params, updates)
        new = State(state.step + 1, params, reparam, stats, opt_state)
        if config.train.on_divergence == 'skip_step':
            new, metrics = _unless_divergent(state, new, metrics)
        return new, metrics

    return train_step


def _update(direction, weight, scaling, lr, decay):
    """What is added to a weight."""
    update = -lr * scaling.lr_factor * direction
    if scaling.decay_factor:
        update = update - decay * scaling.decay_factor * weight
    return update


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
