"""Stages of an update, from the gradient of a batch to the change of the weights.

`STAGES` has them in order. A stage is an optax transformation. Its row makes it from facts of the
parameters, which are parallel trees, and from options: its keywords, which are fields of the
section `optim` of a config, and may be tracers. A stage is left out of the chain (`build_stages`)
if a fact is missing, or if it has options and none is given.

Up to `apply_decay` an update may be a Direction, which `map_updates` looks into. The extra
arguments of `update` are the same as for an optimizer (`modules.optim`). The state that a stage
returns is recorded with the metrics of the step, by field; a stage that reads its state has to be
in `STORED_STAGES`.
"""

import inspect
import math
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from modules.losses import count_chunks, split_chunks
from modules.optim.base import BatchFunctions, as_direction, divide_or_zero, jvp_along, map_updates
from modules.params import ParamBox, ParamSpec, batch_axes, root_mean_square
from modules.recent import MIN_DEVIATION, Recent, find_limit, init_recent, push
from modules.statistics import at_least_float32


def shrink_embedding_gradient(
    specs: Any, *, embedding_gradient_shrink: Any
) -> optax.GradientTransformation:
    """A smaller gradient of the word embedding (arXiv:2210.02414): `g <- c g`.

    `c` is the option; all other gradients are unchanged. This comes before clipping. Adam's
    direction does not depend on the size of its gradient, so the factor acts on it only through the
    clipped norm and epsilon. Source: section 3.2.

    Args:
      specs: a ParamSpec for each parameter.
      embedding_gradient_shrink: the factor.
    """

    def shrink(spec, grad):
        is_word = spec.role == 'embedding' and 'vocab' in spec.axes
        return embedding_gradient_shrink * grad if is_word else grad

    return optax.stateless(lambda grads, _: jax.tree.map(shrink, specs, grads))


def add_penalty(penalty_shares: Any) -> optax.GradientTransformation:
    """Weight decay inside the gradient (arXiv:1711.05101): `g <- g + s w`.

    This is the gradient of a penalty `s |w|^2 / 2`, for decay rules with `in_gradient`. Source:
    section 2.

    Args:
      penalty_shares: s of each parameter, NO_DECAY for none.
    """

    def add(share, grad, weight):
        return grad if is_no_decay(share) else grad + share * weight

    return optax.stateless(lambda grads, params: jax.tree.map(add, penalty_shares, grads, params))


def clip(*, clip_norm: Any) -> optax.GradientTransformation:
    """Clipping of the gradient by its norm (arXiv:1211.5063): `g <- g min(1, c / |g|)`.

    `|g|` is the norm of all gradients together, and `c` is `clip_norm`.

    Args:
      clip_norm: the largest norm; inf: any.
    """
    return optax.clip_by_global_norm(clip_norm)


def divide_by_eps_factor(eps_factors: Any) -> optax.GradientTransformation:
    """The parametrisation's factor of epsilon, applied to the gradient: `g <- g / c`.

    `c` is the factor for the parameter. An optimizer that compares epsilon with the gradient then
    has the direction of an epsilon `c` times as large.

    Args:
      eps_factors: c of each parameter.
    """
    return optax.stateless(lambda grads, _: jax.tree.map(lambda g, f: g / f, grads, eps_factors))


def optimize(optimizer: optax.GradientTransformation) -> optax.GradientTransformation:
    """The direction of each parameter: `optim.name` and `optim.others` map the gradient to it.

    Args:
      optimizer: of all parameters (`partition_by_role`).
    """
    return optimizer


MIN_AGREEMENT = 1e-3  # the smallest share of entries that the rest is scaled for, as in the code


def mask_updates(specs: Any, cautious_updates: bool) -> optax.GradientTransformationExtraArgs:
    """Cautious updates (arXiv:2411.16085): `u <- u m / max(0.001, mean(m)) with m = 1[g u > 0]`.

    An entry of the direction that the gradient `g` disagrees with is not applied, and the others
    grow, so that their mean size stays. The mean is over each matrix or vector: the authors' code
    (github.com/kyleliang919/C-Optim, c_adamw.py) takes it over each tensor, and no tensor of theirs
    stacks layers. The paper adds 1 to the count in its place.

    `g` is the gradient of the loss, without a penalty of weights. For Muon their code masks the
    momentum, before it is orthogonalised; here the orthogonalised direction is masked.

    Args:
      specs: a ParamSpec for each parameter.
      cautious_updates: whether to mask; True.
    """
    del cautious_updates

    def update(updates, state, params=None, **batch):
        def mask(spec, update, grad):
            agrees = (jnp.sign(update) * jnp.sign(grad) > 0).astype(update.dtype)
            axes = tuple(i for i in range(update.ndim) if i not in batch_axes(spec))
            share = jnp.mean(agrees, axes, keepdims=True)
            return update * (agrees / jnp.maximum(share, MIN_AGREEMENT))

        return map_updates(mask, specs, updates, batch['grad']), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


def resize(
    specs: Any,
    matched_roles: tuple[str, ...],
    *,
    match_rms: Any = None,
    match_norm: Any = None,
    match_norm_floor: Any = None,
    update_clip: Any = None,
) -> optax.GradientTransformation:
    """Matched and clipped sizes of updates: `u <- c u / max(1, rms(c u) / d)`.

    `c = match_rms / rms(u)`
    `c = match_norm |W| / |u|`
    `c = max(1, match_norm_floor |W| / |u|)`

    One of the three applies, to each matrix `W` with its Frobenius norm; with `match_rms` to hidden
    matrices, else to matrices of `matched_roles`. For other parameters `c` is 1. All matrices and
    vectors are clipped, at `d`, the option `update_clip`. Each option may be left out. They are a
    single stage because they share a root mean square and round once. A matrix of zeros stays zero.

    With `match_norm=1` the learning rate is the relative size of a step. With
    `model.reparam=normalize_and_project`, which takes `|W|` back, it is the tangent of the angle of
    a step that is orthogonal to `W`: the hyperball forms of all optimizers (arXiv:2606.16899), such
    as AdamH and MuonH. Then `s` of the weight decay only makes the angle larger, by `1 / (1 - s)`.

    Sources: a root mean square of 0.2, at which updates are as large as Adam's, arXiv:2502.16982,
    section 2.2; clipping arXiv:1804.04235, section 6; a floor of 0.35 from modded-nanogpt's track
    3, without weight decay.

    Args:
      specs: a ParamSpec for each parameter.
      matched_roles: roles of the matrices whose norm is matched.
      match_rms: the root mean square that hidden matrices get; None: unchanged.
      match_norm: the norm that updates get, as a multiple of their matrix's; None: unchanged.
      match_norm_floor: the smallest such multiple; larger updates are unchanged. None: any.
      update_clip: the largest root mean square of all; None: any.

    Raises:
      ValueError: if no parameter has one of `matched_roles`.
    """
    is_relative = match_norm is not None or match_norm_floor is not None
    for role in matched_roles if is_relative else ():
        if not any(spec.role == role for spec in jax.tree.leaves(specs)):
            raise ValueError(
                f'optim.match_norm_roles={"+".join(matched_roles)}: no parameter has the role '
                f'{role!r} (with model.tie_embeddings=True the embedding is the readout). Leave '
                'this role out.'
            )

    roles = ('hidden',) if match_rms is not None else matched_roles if is_relative else ()

    def match(spec, rms, weight):
        if match_rms is not None:
            return divide_or_zero(match_rms, rms)
        # Both means are over as many entries, so that this is the ratio of the norms.
        ratio = divide_or_zero(root_mean_square(spec, at_least_float32(weight)), rms)
        if match_norm is not None:
            return match_norm * ratio
        return jnp.maximum(1.0, match_norm_floor * ratio)

    def scale(spec, update, weight):
        is_matched = spec.role in roles
        if not is_matched and update_clip is None:
            return update
        rms = root_mean_square(spec, update)
        factor = match(spec, rms, weight) if is_matched else jnp.ones_like(rms)
        if update_clip is not None:
            factor = factor / jnp.maximum(1.0, factor * rms / update_clip)
        return jnp.broadcast_to(factor, update.shape) * update

    return optax.stateless(lambda updates, params: map_updates(scale, specs, updates, params))


class UpdateNormState(NamedTuple):
    """State of `clip_by_history`. The factor is recorded."""

    update_norms: Recent  #: before they are clipped
    update_clip_factor: jax.Array  #: of the last update


UPDATE_WINDOW, UPDATE_FROM = 128, 64  # update norms, as in the code of `clip_by_history`


def clip_by_history(specs: Any, *, update_clip_sigmas: Any) -> optax.GradientTransformation:
    """Clipping of updates by their history: `u <- u min(1, (m + k s) / |u|)`.

    `|u|` is the norm of the directions of all parameters together, before the learning rate and
    weight decay; `m` and `s` are the mean and the standard deviation of `|u|` over the last
    UPDATE_WINDOW updates, as they were before clipping, and `k` is the option. The first
    UPDATE_FROM updates are not clipped. Source: the code of Levanter
    (github.com/marin-community/levanter, optim/clip_update_norm.py), with `k = 3`; there the
    directions include weight decay.

    Args:
      specs: a ParamSpec for each parameter.
      update_clip_sigmas: k.
    """

    def init(params):
        del params
        recent = init_recent(UPDATE_WINDOW)
        boxed: Any = ParamBox(recent.values, ParamSpec('vector', ('recent',)))
        return UpdateNormState(Recent(boxed, recent.count), jnp.float32(1))

    def update(updates, state, params=None):
        del params
        directions = jax.tree.map(lambda _, u: as_direction(u).value, specs, updates)
        norm = optax.tree.norm(directions)
        limit = find_limit(state.update_norms, update_clip_sigmas, UPDATE_FROM)
        factor = jnp.minimum(1.0, limit / jnp.maximum(norm, MIN_DEVIATION))
        clipped = map_updates(lambda _, u: u * factor.astype(u.dtype), specs, updates)
        next_state = UpdateNormState(push(state.update_norms, norm), jnp.float32(factor))
        return clipped, next_state

    return optax.GradientTransformation(init, update)


def scale_by_learning_rate(learning_rates: Any) -> optax.GradientTransformation:
    """The learning rate: `u <- -eta u`.

    `eta` is the peak times the schedule's fraction and the parametrisation's factor.

    Args:
      learning_rates: the learning rate of each parameter.
    """
    return optax.stateless(
        lambda updates, _: map_updates(lambda lr, u: -lr * u, learning_rates, updates)
    )


def apply_decay(decay_shares: Any) -> optax.GradientTransformation:
    """Weight decay outside the gradient (arXiv:1711.05101): `u <- u - s d w`.

    The decay rule determines `s`. `d` is 1, or the decay share of a Direction. The returned updates
    are arrays.

    Args:
      decay_shares: s of each parameter, NO_DECAY for none.
    """

    def decay(share, update, weight):
        value, decay_share = as_direction(update)
        return value if is_no_decay(share) else value - share * decay_share * weight

    return optax.stateless(
        lambda updates, params: jax.tree.map(decay, decay_shares, updates, params)
    )


class DecayedShareState(NamedTuple):
    """State of `apply_cautious_decay`, which is recorded and not read."""

    decayed_share: jax.Array  #: of the entries that may decay


def apply_cautious_decay(cautious_decay_shares: Any) -> optax.GradientTransformation:
    """Cautious weight decay (arXiv:2510.12402): `u <- u - s d 1[u w <= 0] w`.

    This takes the place of `apply_decay`, whose symbols it has. Here `u` is the change of the
    weight, minus the direction times the learning rate, so that a weight decays only if the
    direction agrees with it: where the change makes it smaller or leaves it. About half of the
    entries do, which `decayed_share` records: compare weight decays at equal strength, not at equal
    `weight_decay`. Source: algorithm 1.

    Args:
      cautious_decay_shares: s of each parameter, NO_DECAY for none.
    """

    def update(updates, state, params=None):
        decayed = []

        def decay(share, update, weight):
            value, decay_share = as_direction(update)
            if is_no_decay(share):
                return value
            # Signs, since a product of small numbers may be 0.
            agrees = (jnp.sign(value) * jnp.sign(weight) <= 0).astype(value.dtype)
            decayed.append((jnp.mean(agrees), weight.size))
            return value - share * decay_share * agrees * weight

        updates = jax.tree.map(decay, cautious_decay_shares, updates, params)
        total = max(1, sum(size for _, size in decayed))
        share = sum((mean * (size / total) for mean, size in decayed), jnp.float32(0))
        return updates, DecayedShareState(share)

    return optax.GradientTransformation(lambda params: DecayedShareState(jnp.float32(0)), update)


NO_DECAY = 0.0  # of a parameter: other shares are arrays


def is_no_decay(share: Any) -> bool:
    """Whether a share is NO_DECAY, which adds nothing to the program."""
    return isinstance(share, float) and share == NO_DECAY


def freeze(trainable: Any) -> optax.GradientTransformation:
    """Parameters that are not trained: `u <- 0`.

    Args:
      trainable: a bool for each parameter.
    """

    def keep(is_trained, update):
        return update if is_trained else jnp.zeros_like(update)

    return optax.stateless(lambda updates, _: jax.tree.map(keep, trainable, updates))


class GhostRadiusState(NamedTuple):
    """State of `limit_ghost_radius`, which is recorded and not read."""

    ghost_radius: jax.Array  #: before the limit


def limit_ghost_radius(*, ghost_radius: Any) -> optax.GradientTransformationExtraArgs:
    """A limit on the change of logits (arXiv:2603.13552): `u <- u min(1, R / r)`.

    `R` is the option `ghost_radius`, and `r` is `measure_ghost_radius` of all updates together.
    Source: the paper and https://github.com/piyush314/ghosts-of-softmax.

    Args:
      ghost_radius: the largest radius.
    """

    def update(updates, state, params=None, **extra):
        functions = BatchFunctions(**{name: extra[name] for name in BatchFunctions._fields})
        radius = measure_ghost_radius(functions, params, updates)
        limited = jax.tree.map(
            lambda u: ghost_radius / jnp.maximum(radius, ghost_radius) * u, updates
        )
        return limited, GhostRadiusState(radius)

    return optax.GradientTransformationExtraArgs(
        lambda params: GhostRadiusState(jnp.float32(0)), update
    )


def measure_ghost_radius(functions: BatchFunctions, params: Any, change: Any) -> jax.Array:
    """Returns r = max over target tokens of (max_v a_v - min_v a_v), over pi.

    a [V] is the derivative of a token's logits along the full change of the parameters, learning
    rate and decay included, by a forward-mode pass of the batch. r is linear in the change; beyond
    1 the cross-entropy's series along it no longer converges. The logits come from the training
    pass; the authors use the evaluation's. Source: as `limit_ghost_radius`.

    Args:
      functions: of the batch.
      params: the stored parameters.
      change: the update of the parameters.

    Returns:
      r, a scalar.

    Raises:
      ValueError: if the model has no forward-mode derivative.
    """

    def microbatch_spread(part):
        rows, weights_BT = part
        (x_BTD, readout), (tangent_BTD, readout_tangent) = jvp_along(
            lambda params: functions.activations_fn(params, rows), params, change
        )

        def chunk_spread(part):
            x_BTD, tangent_BTD, weights_BT = part
            _, a_BTV = jax.jvp(lambda x, r: r(x), (x_BTD, readout), (tangent_BTD, readout_tangent))
            spread_BT = jnp.max(a_BTV, -1) - jnp.min(a_BTV, -1)
            return jnp.max(jnp.where(weights_BT > 0, spread_BT, 0.0))

        count = count_chunks(weights_BT.shape, 1, functions.tokens_at_a_time)
        parts = jax.tree.map(lambda x: split_chunks(x, 1, count), (x_BTD, tangent_BTD, weights_BT))
        return jnp.max(jax.lax.map(chunk_spread, parts))

    return jnp.max(jax.lax.map(microbatch_spread, (functions.rows, functions.weights))) / math.pi


STAGES = {
    'shrink_embedding_gradient': shrink_embedding_gradient,
    'add_penalty': add_penalty,
    'clip': clip,
    'divide_by_eps_factor': divide_by_eps_factor,
    'optimize': optimize,
    'mask_updates': mask_updates,
    'resize': resize,
    'clip_by_history': clip_by_history,
    'scale_by_learning_rate': scale_by_learning_rate,
    'apply_decay': apply_decay,
    'apply_cautious_decay': apply_cautious_decay,
    'freeze': freeze,
    'limit_ghost_radius': limit_ghost_radius,
}
# Stages with a place in the stored state, in order, even if their state is empty. Checkpoints have
# that order: a new stage with state comes last.
STORED_STAGES = ('clip', 'divide_by_eps_factor', 'optimize', 'clip_by_history')
# Fields of a stored state that are recorded too.
RECORDED = {'clip_by_history': ('update_clip_factor',)}

Stages = dict[str, optax.GradientTransformation]


def stage_inputs(stage: Callable[..., Any]) -> tuple[list[str], list[str]]:
    """Returns the names of (the facts, the options) that a row of STAGES takes."""
    parameters = inspect.signature(stage).parameters.values()
    options = [p.name for p in parameters if p.kind is p.KEYWORD_ONLY]
    return [p.name for p in parameters if p.name not in options], options


def build_stages(facts: Mapping[str, Any], numbers: Mapping[str, Any]) -> Stages:
    """Returns the stages of an update by name, in order.

    Args:
      facts: the facts that stages take besides options, by name; None counts as missing.
      numbers: the options by path, such as 'optim.clip_norm': a Hyper.
    """
    stages = {}
    for name, stage in STAGES.items():
        fact_names, options = stage_inputs(stage)
        stage_facts = {fact: facts[fact] for fact in fact_names if facts.get(fact) is not None}
        option_values = {
            n: numbers[f'optim.{n}'] for n in options if numbers.get(f'optim.{n}') is not None
        }
        if len(stage_facts) == len(fact_names) and (option_values or not options):
            stages[name] = stage(**stage_facts, **option_values)
    return stages


def stored_stages(stages: Stages) -> optax.GradientTransformationExtraArgs:
    """Chains the stages with a place in the stored state; `init` of the chain makes that state."""
    return optax.chain(*(stages[name] for name in STORED_STAGES if name in stages))


def apply_stages(
    stages: Stages, grads: Any, stored: tuple[Any, ...], params: Any, **batch: Any
) -> tuple[Any, tuple[Any, ...], dict[str, jax.Array]]:
    """Chains the stages: an `optax.chain` that keeps only the states of STORED_STAGES.

    Args:
      stages: from `build_stages`.
      grads: the gradient of each parameter.
      stored: from the last update, or from the `init` of `stored_stages`.
      params: the parameters.
      **batch: the extra arguments of an optimizer.

    Returns:
      (the change of the parameters, the next stored state, recorded metrics by name).
    """
    stored_names = [name for name in STORED_STAGES if name in stages]
    # Other stages have no state between updates: their states only report metrics.
    before = dict.fromkeys(stages, optax.EmptyState()) | dict(
        zip(stored_names, stored, strict=True)
    )
    chain: Any = optax.chain(*stages.values())
    updates, states = chain.update(grads, tuple(before.values()), params, **batch)
    after = dict(zip(stages, states, strict=True))
    stored = tuple(after.pop(name) for name in stored_names)
    records = [state._asdict() for state in after.values()]
    records += [
        {field: getattr(state, field) for field in RECORDED.get(name, ())}
        for name, state in zip(stored_names, stored, strict=True)
    ]
    return updates, stored, {name: value for record in records for name, value in record.items()}
