"""Diagnostics of each layer, computed by a program of their own beside the training step."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.model.transformer import block_groups
from lm.training.state import Hyper, Learner, State
from lm.training.step import (
    Batch,
    batch_functions,
    compute_activations,
    loss_sums,
    optimizer_step,
    split_microbatches,
    stop_frozen_gradients,
    target_weights,
    token_sums,
)
from modules.params import LAYER, NORM, as_matrices, matrix_axes, named_leaves
from modules.placements import Blocks
from modules.spectrum import largest_singular_value
from modules.statistics import DIAGNOSTICS

Diagnostics = dict[str, jax.Array]


def make_diagnose_step(learner: Learner) -> Callable[[State, Batch, Hyper], Diagnostics]:
    """Returns `diagnose(state, batch, hyper)`: by name a number, one a layer [L], or a head [L, N].

    It joins `of_layers`, `of_readout`, `by_role`, `measured`, and, where the number of rows is
    even, the `gradient_noise` between rows with even and with odd numbers. Layers run as in
    evaluation, and nothing of it is kept.
    """
    described = learner.description

    def diagnose(state: State, batch: Batch, hyper: Hyper) -> Diagnostics:
        total = jnp.maximum(jnp.sum(target_weights(batch, learner.bos_id)), 1.0)

        def loss(used):
            variables = {'params': used, **state.stats}
            (x_BTD, readout), filled = compute_activations(
                learner, variables, batch, (DIAGNOSTICS,), hyper
            )
            sums = loss_sums(learner, x_BTD, readout, filled, batch, hyper)
            seen = readout_diagnostics(x_BTD, readout, target_weights(batch, learner.bos_id))
            means = {name: value / total for name, value in sums.items()}
            return means['objective'], (filled[DIAGNOSTICS], seen, means)

        def apply_reparam(params):
            return described.reparam.apply(
                stop_frozen_gradients(learner, params), state.reparam, False
            )

        used, to_stored, _ = jax.vjp(apply_reparam, state.params, has_aux=True)
        grads, (sown, seen, means) = jax.grad(loss, has_aux=True)(used)
        (stored_grads,) = to_stored(grads)
        parts = split_microbatches(batch, learner.recipe.train.microbatches)
        functions = batch_functions(learner, state, hyper, parts, total)
        new, *_ = optimizer_step(learner, state, hyper, stored_grads, means, functions)
        changes = jax.tree.map(jnp.subtract, new.params, state.params)
        found = {
            **layer_diagnostics(learner, sown, used, grads),
            **seen,
            **role_diagnostics(learner, state.params, stored_grads, changes),
            **reparam_diagnostics(learner, state),
        }
        if len(batch['tokens']) % 2 == 0:
            half = jax.tree.map(lambda rows: rows[0], split_microbatches(batch, 2))
            tokens = jnp.sum(target_weights(half, learner.bos_id))

            def half_loss(used):
                variables = {'params': used, **state.stats}
                sums = token_sums(learner, variables, half, hyper)
                return sums['objective'] / jnp.maximum(tokens, 1.0)

            (half_grads,) = to_stored(jax.grad(half_loss)(used))
            found |= gradient_noise(stored_grads, half_grads, total, tokens)
        return found

    return diagnose


def gradient_noise(
    grads: Any, half_grads: Any, total_tokens: jax.Array, half_tokens: jax.Array
) -> Diagnostics:
    """Estimates the useful batch size from the spread between the gradients of two half batches.

    With |G|^2 of all n tokens and s the mean of |G|^2 of the two parts, of n / 2 tokens each:
    `gradient_noise_signal` = 2 |G|^2 - s estimates the squared norm of the gradient of all text,
    `gradient_noise_trace` = n (s - |G|^2) the variance of a token's gradient, and their quotient
    `gradient_noise_scale` is the number of tokens a batch beyond which more help little. Each is a
    single draw and may be negative: average the first two over steps before dividing. grads is of
    the mean loss of `total` tokens, of_part of the first `tokens`. Source: arXiv:1812.06162,
    appendix A.1.
    """
    rest = jnp.maximum(total_tokens - half_tokens, 1.0)
    others = jax.tree.map(
        lambda g, part: (total_tokens * g - half_tokens * part) / rest, grads, half_grads
    )
    all_of_it, *parts = (
        optax.tree.norm(tree, squared=True) for tree in (grads, half_grads, others)
    )
    small = sum(parts) / 2
    signal, trace = 2 * all_of_it - small, total_tokens * (small - all_of_it)
    return {
        'gradient_noise_signal': signal,
        'gradient_noise_trace': trace,
        'gradient_noise_scale': trace / signal,
    }


def layer_diagnostics(learner: Learner, sown: Any, used: Any, grads: Any) -> Diagnostics:
    """Returns what layers sow in `diagnostics`, and norms of the weights that each uses.

    Sown are moments of the stream and of what sublayers return (`modules.stream`), and numbers of
    the heads (`modules.kernels.attention.observed`). `singular_value_NAME` of a hidden matrix is
    the largest of its experts; `layer_grad_norm` is of the gradient of the mean token loss.
    """
    names = matrix_names(learner)

    def diagnose_group(group):
        found = flatten_sown(sown, group.name)
        found['layer_param_norm'] = norm_by_layer(used[group.name])
        found['layer_grad_norm'] = norm_by_layer(grads[group.name])
        specs = named_leaves(learner.description.used_specs[group.name])
        for path, weight in named_leaves(used[group.name]).items():
            if path in names:
                values = largest_singular_value(as_matrices(specs[path], weight))
                found[f'singular_value_{names[path]}'] = jnp.max(values.reshape(len(values), -1), 1)
        return found

    return join_groups(learner, diagnose_group)


def flatten_sown(sown: Any, group: str) -> Diagnostics:
    """Returns what the layers of one group of blocks have recorded, [L, ...] each, by name."""
    return {path.split('/')[-2]: values for path, values in named_leaves(sown[group]).items()}


def join_sown(learner: Learner, sown: Any) -> Diagnostics:
    """Returns what all layers have recorded, [L, ...] each, by name."""
    return join_groups(learner, lambda group: flatten_sown(sown, group.name))


def join_groups(learner: Learner, compute_group: Callable[[Blocks], Diagnostics]) -> Diagnostics:
    """Joins own(group) of each group of blocks to [L, ...] by name; NaN for a group without it."""
    groups = [(group.count, compute_group(group)) for group in block_groups(learner.recipe)]
    found = {}
    for name in dict.fromkeys(name for _, of_group in groups for name in of_group):
        ends = next(of_group[name].shape[1:] for _, of_group in groups if name in of_group)
        parts = [part.get(name, jnp.full((count, *ends), jnp.nan)) for count, part in groups]
        found[name] = jnp.concatenate([part.astype(jnp.float32) for part in parts])
    return found


def matrix_names(learner: Learner) -> dict[str, str]:
    """Returns {path within a block: name} for each hidden matrix that blocks use.

    The name is the last part of the path, or all of it for a norm's and where two would be equal.
    """
    specs = {}
    for group in block_groups(learner.recipe):
        own = named_leaves(learner.description.used_specs[group.name])
        specs |= {path: spec for path, spec in own.items() if spec.role == 'hidden'}
    last = {path: path.split('/')[-1] for path in specs}
    counts = collections.Counter(last[path] for path in specs if specs[path].part != NORM)
    return {
        path: path.replace('/', '_') if spec.part == NORM or counts[last[path]] > 1 else last[path]
        for path, spec in specs.items()
    }


def readout_diagnostics(x_BTD: jax.Array, readout: Any, weights_BT: jax.Array) -> Diagnostics:
    """Returns the means of logits and log Z, and the largest |logit| and |log Z|, over the tokens
    that the loss counts, row by row: no array [B, T, V] is made for them.
    """
    x_BTD, readout = jax.lax.stop_gradient((x_BTD, readout))

    def row_statistics(row):
        x_TD, weights_T = row
        logits_TV = readout(x_TD)
        log_z_T = jax.nn.logsumexp(logits_TV, axis=-1)
        counts_T = weights_T > 0

        def masked_max(values, mask):
            return jnp.max(jnp.where(mask, jnp.abs(values), 0.0))

        return {
            'logit_mean': jnp.sum(jnp.where(counts_T, jnp.mean(logits_TV, -1), 0.0)),
            'logit_largest': masked_max(logits_TV, counts_T[:, None]),
            'log_z_mean': jnp.sum(jnp.where(counts_T, log_z_T, 0.0)),
            'log_z_largest': masked_max(log_z_T, counts_T),
        }

    rows = jax.lax.map(row_statistics, (x_BTD, weights_BT))
    tokens = jnp.maximum(jnp.sum(weights_BT > 0), 1)
    return {
        name: jnp.sum(values_B) / tokens if name.endswith('mean') else jnp.max(values_B)
        for name, values_B in rows.items()
    }


def role_diagnostics(learner: Learner, params: Any, grads: Any, changes: Any) -> Diagnostics:
    """Returns gradient_rms_ROLE, update_rms_ROLE, weight_rms_ROLE and update_ratio_ROLE of the
    stored parameters: root mean squares over all of a role in a layer, and update over weight.

    The update is what one optimizer step adds, maps after it included; the gradient is that before
    clipping. [L] for parameters of layers; a number each for the others, whose vectors and hidden
    matrices are named ROLE_outside.
    """
    trees = {'gradient': grads, 'update': changes, 'weight': params}
    trees = {what: named_leaves(tree) for what, tree in trees.items()}
    specs, found = named_leaves(learner.description.specs), {}
    for group in block_groups(learner.recipe):
        own = {p: s for p, s in specs.items() if p.startswith(f'{group.name}/') and LAYER in s.axes}
        found[group.name] = _rms_by_role(trees, own, is_layered=True)
    outside = {path: spec for path, spec in specs.items() if LAYER not in spec.axes}
    alone = _rms_by_role(trees, outside, is_layered=False)
    return _add_update_ratios(join_groups(learner, lambda group: found[group.name])) | {
        f'{name}_outside' if name.endswith(('hidden', 'vector')) else name: value
        for name, value in _add_update_ratios(alone).items()
    }


def _rms_by_role(
    trees: Mapping[str, Diagnostics], specs: Mapping[str, Any], is_layered: bool
) -> Diagnostics:
    found = {}
    for what, leaves in trees.items():
        for role in dict.fromkeys(spec.role for spec in specs.values()):
            squares, count = 0.0, 0
            for path in (path for path, spec in specs.items() if spec.role == role):
                leaf = jnp.square(leaves[path].astype(jnp.float32))
                if is_layered:
                    leaf = jnp.moveaxis(leaf, specs[path].axes.index(LAYER), 0)
                    leaf = leaf.reshape(len(leaf), -1)
                squares += jnp.sum(leaf, -1 if is_layered else None)
                count += leaf.shape[-1] if is_layered else leaf.size
            found[f'{what}_rms_{role}'] = jnp.sqrt(squares / count)
    return found


def _add_update_ratios(rms: Diagnostics) -> Diagnostics:
    return rms | {
        name.replace('weight_rms', 'update_ratio'): rms[name.replace('weight', 'update')] / value
        for name, value in rms.items()
        if name.startswith('weight_rms_')
    }


def reparam_diagnostics(learner: Learner, state: State) -> Diagnostics:
    """Returns the `measures` of reparametrisations (`modules.reparam`), as `sigma_NAME`: [L], of
    each matrix of layers the largest of its experts.
    """
    names = matrix_names(learner)
    measures = learner.description.reparam.measures(state.params, state.reparam)

    def measure_group(group):
        specs, found = named_leaves(learner.description.used_specs[group.name]), {}
        for what, values in measures.items():
            for path, name in names.items():
                if (value := values.get(f'{group.name}/{path}')) is None:
                    continue
                batch, *_ = matrix_axes(specs[path])
                if value.ndim < len(batch):  # one for all layers
                    value = jnp.broadcast_to(value[None], (group.count, *value.shape))
                found[f'{what}_{name}'] = jnp.max(value.reshape(group.count, -1), 1)
        return found

    return join_groups(learner, measure_group)


def norm_by_layer(tree: Any) -> jax.Array:
    """Returns [L]: the norm of all that a layer holds, of leaves stacked along their first axis."""
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32)).reshape(len(leaf), -1), 1)
        for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares))
