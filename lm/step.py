"""One training step and one evaluation step: pure functions, jitted with shardings here."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh

from lm.config import Config
from lm.mesh import batch_sharding, param_sharding, replicated
from lm.model import Transformer
from lm.state import Hyper, State, describe_params, init_state, optimizer
from modules.losses import LOSSES
from modules.losses.cross_entropy import z_loss
from modules.optim import SCHEDULES
from modules.scaling import DECAY_RULES

Batch = dict[str, jax.Array]
MUST_BE_FINITE = ('loss', 'grad_norm', 'update_norm')  # otherwise the step has diverged


def target_weights(batch: Batch, bos_id: int) -> jax.Array:
    """[B, T] float32: 1 where the next token is one to predict: not padding, not a beginning."""
    targets_BT = batch['tokens'][:, 1:]
    return ((batch['segments'][:, 1:] > 0) & (targets_BT != bos_id)).astype(jnp.float32)


def token_sums(
    config: Config, model: Transformer, bos_id: int, params: Any, batch: Batch, hyper: Hyper
) -> dict[str, jax.Array]:
    """Sums over the target tokens: `objective` (z-loss term included), `ce`, `z_loss`, `tokens`."""
    return observed_sums(config, model, bos_id, params, batch, hyper, mutable=False)[0]


def observed_sums(
    config: Config,
    model: Transformer,
    bos_id: int,
    params: Any,
    batch: Batch,
    hyper: Hyper,
    mutable: tuple[str, ...] | bool,
) -> tuple[dict[str, jax.Array], Any]:
    """`token_sums`, and the Linen collections named in `mutable`, which the forward pass filled."""
    tokens_BT, targets_M = batch['tokens'][:, :-1], batch['tokens'][:, 1:].reshape(-1)
    segments_BT = batch['segments'][:, :-1] if config.data.mask_documents else None
    logits_MV = model.apply({'params': params}, tokens_BT, segments_BT, mutable=mutable)
    logits_MV, filled = logits_MV if mutable else (logits_MV, {})
    token = LOSSES[config.loss.name](logits_MV, targets_M, hyper.label_smoothing)
    weights_M = target_weights(batch, bos_id).reshape(-1)
    z_M = z_loss(token.log_z)
    sums = {
        'objective': jnp.sum(weights_M * (token.objective + hyper.z_loss * z_M)),
        'ce': jnp.sum(weights_M * token.ce),
        'z_loss': jnp.sum(weights_M * z_M),
        'tokens': jnp.sum(weights_M),
    }
    return sums, filled


def microbatched(batch: Batch, count: int) -> Batch:
    """[B, ...] -> [count, B / count, ...]; part i takes rows i, i + count, ...

    Strided, so that each device's contiguous rows spread evenly over the parts without moving.
    """

    def cut(rows):
        return jnp.swapaxes(rows.reshape(-1, count, *rows.shape[1:]), 0, 1)

    return jax.tree.map(cut, batch)


def make_train_step(
    config: Config, model: Transformer, bos_id: int
) -> Callable[[State, Batch, Hyper], tuple[State, dict[str, jax.Array]]]:
    """`train_step(state, batch, hyper) -> (state, metrics)`.

    The gradient is that of (sum of token losses) / (target tokens of the whole batch), so it does
    not depend on microbatches, hosts or padding. With on_divergence = skip_step, a step whose loss
    or gradient is not finite changes nothing but the step count, and says so in `skipped`.
    """
    described = describe_params(config, model)

    def train_step(state: State, batch: Batch, hyper: Hyper):
        total = jnp.maximum(jnp.sum(target_weights(batch, bos_id)), 1.0)

        def loss(used, part):
            sums = token_sums(config, model, bos_id, used, part, hyper)
            return sums['objective'] / total, sums

        def use(params):
            return described.reparam.apply(params, state.reparam, True)

        used, to_stored, reparam = jax.vjp(use, state.params, has_aux=True)
        sums, grads = _sum_over_parts(loss, used, batch, config.train.microbatches)
        (grads,) = to_stored(grads)
        fraction = SCHEDULES[config.optim.schedule](state.step, hyper)
        lr = hyper.lr * fraction
        decay = DECAY_RULES[config.optim.decay_rule](hyper.weight_decay, hyper.lr, fraction)
        tx = optimizer(config, hyper)
        direction, opt_state = tx.update(grads, state.opt_state, state.params)
        updates = jax.tree.map(
            lambda u, w, s: -(lr * s.lr_factor * u + decay * s.decay_factor * w),
            direction,
            state.params,
            described.scalings,
        )
        metrics = {
            'loss': sums['objective'] / total,
            'ce': sums['ce'] / total,
            'z_loss': sums['z_loss'] / total,
            'lr': lr,
            'grad_norm': optax.tree.norm(grads),
            'update_norm': optax.tree.norm(updates),
            'batch_tokens': sums['tokens'],
        }
        params = optax.apply_updates(state.params, updates)
        new = State(state.step + 1, params, reparam, opt_state)
        if config.train.on_divergence == 'skip_step':
            new, metrics = _unless_divergent(state, new, metrics)
        return new, metrics

    return train_step


def _sum_over_parts(loss, params, batch, count):
    """(sums, gradient) of `loss` over `count` microbatches, one after the other."""
    grad = jax.grad(loss, has_aux=True)
    if count == 1:
        grads, sums = grad(params, batch)
        return sums, grads
    parts = microbatched(batch, count)

    def add(carry, part):
        return jax.tree.map(jnp.add, carry, grad(params, part)), None

    first = jax.tree.map(lambda rows: rows[0], parts)
    shapes = jax.eval_shape(grad, params, first)
    zeros = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    (grads, sums), _ = jax.lax.scan(add, zeros, parts)
    return sums, grads


def _unless_divergent(old: State, new: State, metrics: dict[str, jax.Array]):
    watched = jnp.stack([metrics[name] for name in MUST_BE_FINITE])
    finite = jnp.all(jnp.isfinite(watched))
    kept = jax.tree.map(lambda a, b: jnp.where(finite, a, b), new, old)
    return kept.replace(step=new.step), metrics | {'skipped': 1.0 - finite}


def make_eval_step(
    config: Config, model: Transformer, bos_id: int
) -> Callable[[Any, Batch, Hyper], dict[str, jax.Array]]:
    """`eval_step(params, reparam, batch, hyper)`: the sums of `token_sums` over one batch."""
    described = describe_params(config, model)

    def eval_step(params, reparam, batch, hyper):
        used, _ = described.reparam.apply(params, reparam, False)
        return token_sums(config, model, bos_id, used, batch, hyper)

    return eval_step


def state_shardings(config: Config, model: Transformer, mesh: Mesh, hyper: Hyper) -> State:
    """Parameters by their specs; an optimizer moment as its parameter; all else everywhere."""
    abstract = jax.eval_shape(lambda: init_state(config, model, hyper, jax.random.key(0)))
    specs = describe_params(config, model).specs
    params = jax.tree.map(lambda spec: param_sharding(mesh, spec), specs)
    opt_state = optax.tree.map_params(
        optimizer(config, hyper),
        lambda _, sharding: sharding,
        abstract.opt_state,
        params,
        transform_non_params=lambda _: replicated(mesh),
    )
    everywhere = replicated(mesh)
    reparam = jax.tree.map(lambda _: everywhere, abstract.reparam)
    return State(everywhere, params, reparam, opt_state)


def abstract_state(config: Config, model: Transformer, mesh: Mesh, hyper: Hyper) -> State:
    """Shapes, types and shardings of the state: what a checkpoint is read as."""
    shapes = jax.eval_shape(lambda: init_state(config, model, hyper, jax.random.key(0)))
    return jax.tree.map(
        lambda s, sharding: jax.ShapeDtypeStruct(s.shape, s.dtype, sharding=sharding),
        shapes,
        state_shardings(config, model, mesh, hyper),
    )


def jit_init(config: Config, model: Transformer, mesh: Mesh, hyper: Hyper) -> Callable:
    """`init(key, hyper) -> State`, laid out on the mesh as the step wants it."""
    shardings = state_shardings(config, model, mesh, hyper)
    return jax.jit(lambda key, h: init_state(config, model, h, key), out_shardings=shardings)


def jit_train_step(
    config: Config, model: Transformer, mesh: Mesh, hyper: Hyper, bos_id: int
) -> Callable:
    """The step with its state donated, its batch cut over `data`, its metrics everywhere."""
    state = state_shardings(config, model, mesh, hyper)
    return jax.jit(
        make_train_step(config, model, bos_id),
        in_shardings=(state, batch_sharding(mesh), replicated(mesh)),
        out_shardings=(state, replicated(mesh)),
        donate_argnums=0,
    )


def jit_eval_step(
    config: Config, model: Transformer, mesh: Mesh, hyper: Hyper, bos_id: int
) -> Callable:
    """The evaluation step, its batch cut over `data`, its sums everywhere."""
    state = state_shardings(config, model, mesh, hyper)
    shardings = (state.params, state.reparam, batch_sharding(mesh), replicated(mesh))
    return jax.jit(
        make_eval_step(config, model, bos_id),
        in_shardings=shardings,
        out_shardings=replicated(mesh),
    )
