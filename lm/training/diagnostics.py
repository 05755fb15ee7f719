"""Diagnostics of each layer, computed by a separate program beside the training step."""

import collections
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax.traverse_util import flatten_dict, unflatten_dict

from lm.model.kernels import rounds_products
from lm.model.pattern import Stack, block_stacks, join_stacks
from lm.training.state import Hyper, Learner, State, widen_weights
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
from modules.spectrum import largest_singular_value
from modules.statistics import DIAGNOSTICS, GRADIENT_ERRORS

Diagnostics = dict[str, jax.Array]
SHARPNESS_REACH = 5e-4


def make_diagnose_step(learner: Learner) -> Callable[[State, Batch, Hyper], Diagnostics]:
    """Returns `diagnose(state, batch, hyper)`, which computes diagnostics by name.

    Each is a scalar, an array over layers [L], or one over layers and heads [L, N]. They come from
    `layer_diagnostics`, `readout_diagnostics`, `role_diagnostics` and `reparam_diagnostics`; if the
    number of rows is even, `gradient_noise` compares even with odd rows. Layers run as in
    evaluation, and the state is not changed.
    """
    description = learner.description

    def diagnose(state: State, batch: Batch, hyper: Hyper) -> Diagnostics:
        state = widen_weights(state)
        n_targets = jnp.maximum(jnp.sum(target_weights(batch, learner.bos_id)), 1.0)

        def loss(used, errors):
            variables = {'params': used, **state.stats, GRADIENT_ERRORS: errors}
            (x_BTD, readout), collections = compute_activations(
                learner, variables, batch, (DIAGNOSTICS,), hyper
            )
            sums = loss_sums(learner, x_BTD, readout, collections, batch, hyper)
            readout_values = readout_diagnostics(
                x_BTD, readout, batch['tokens'][:, 1:], target_weights(batch, learner.bos_id)
            )
            means = {name: value / n_targets for name, value in sums.items()}
            return means['objective'], (collections[DIAGNOSTICS], readout_values, means)

        def apply_reparam(params):
            return description.reparam.apply(
                # False: as in evaluation, so that reparametrisations do not advance their state.
                stop_frozen_gradients(learner, params),
                state.reparam,
                False,
            )

        used, to_stored, _ = jax.vjp(apply_reparam, state.params, has_aux=True)
        errors = init_gradient_errors(learner, {'params': used, **state.stats}, batch, hyper)
        (grads, errors), (sown, readout_values, means) = jax.grad(loss, (0, 1), has_aux=True)(
            used, errors
        )
        # As layers sow: a tuple of one value.
        errors = jax.tree.map(lambda value: (value,), errors)
        sown = unflatten_dict(flatten_dict(sown) | flatten_dict(errors))
        (stored_grads,) = to_stored(grads)
        microbatches = split_microbatches(batch, learner.recipe.train.microbatches)
        functions = batch_functions(learner, state, hyper, microbatches, n_targets)
        next_state, *_ = optimizer_step(learner, state, hyper, stored_grads, means, functions)
        changes = jax.tree.map(jnp.subtract, next_state.params, state.params)
        diagnostics = {
            **layer_diagnostics(learner, sown, used, grads),
            **readout_values,
            **role_diagnostics(learner, state.params, stored_grads, changes),
            **reparam_diagnostics(learner, state),
        }
        if len(batch['tokens']) % 2 == 0:
            half_batch = jax.tree.map(lambda rows: rows[0], split_microbatches(batch, 2))
            half_targets = jnp.sum(target_weights(half_batch, learner.bos_id))

            def half_loss(used):
                variables = {'params': used, **state.stats}
                sums = token_sums(learner, variables, half_batch, hyper)
                return sums['objective'] / jnp.maximum(half_targets, 1.0)

            (half_grads,) = to_stored(jax.grad(half_loss)(used))
            diagnostics |= gradient_noise(stored_grads, half_grads, n_targets, half_targets)
        return diagnostics

    return diagnose


def init_gradient_errors(learner: Learner, variables: Any, batch: Batch, hyper: Hyper) -> Any:
    """Returns zeros for each rounded gradient of a product; {} if none is rounded.

    Their own gradients are the errors of rounding (`modules.precision.products.record_gradient`).

    Args:
      learner: the learner.
      variables: as `model.apply` takes them.
      batch: tokens and segments.
      hyper: the numbers of the run.
    """
    if not rounds_products(learner.recipe):
        return {}

    def trace_errors():
        return compute_activations(learner, variables, batch, (GRADIENT_ERRORS,), hyper)[1]

    shapes = jax.eval_shape(trace_errors).get(GRADIENT_ERRORS, {})
    return jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)


def gradient_noise(
    grads: Any, half_grads: Any, total_tokens: jax.Array, half_tokens: jax.Array
) -> Diagnostics:
    """Estimates the useful batch size from the spread between the gradients of two half batches.

    With |G|^2 for all n tokens and s the mean of |G|^2 over two halves of n / 2 tokens:
    `gradient_noise_signal` = 2 |G|^2 - s estimates the squared norm of the gradient over all text,
    `gradient_noise_trace` = n (s - |G|^2) estimates the variance of a token's gradient, and their
    quotient `gradient_noise_scale` is the batch size in tokens beyond which more tokens help
    little. Each is a single draw and may be negative: average the first two over steps before
    dividing. Source: arXiv:1812.06162, appendix A.1.

    Args:
      grads: gradient of the mean loss of all tokens.
      half_grads: gradient of the mean loss of the first half.
      total_tokens: number of target tokens.
      half_tokens: number of target tokens in the first half.

    Returns:
      The three diagnostics by name.
    """
    other_tokens = jnp.maximum(total_tokens - half_tokens, 1.0)
    # The batch's gradient is the token-weighted mean of the halves', so the second half needs no
    # backward pass.
    other_grads = jax.tree.map(
        lambda g, half: (total_tokens * g - half_tokens * half) / other_tokens, grads, half_grads
    )
    full_norm, *half_norms = (
        optax.tree.norm(tree, squared=True) for tree in (grads, half_grads, other_grads)
    )
    # The halves need not have equal numbers of targets; their plain mean takes them as n / 2 each.
    mean_half_norm = sum(half_norms) / 2
    signal, trace = 2 * full_norm - mean_half_norm, total_tokens * (mean_half_norm - full_norm)
    return {
        'gradient_noise_signal': signal,
        'gradient_noise_trace': trace,
        'gradient_noise_scale': trace / signal,
    }


def layer_diagnostics(learner: Learner, sown: Any, used: Any, grads: Any) -> Diagnostics:
    """Returns the diagnostics that layers sow, and norms of the weights that each layer uses.

    Layers sow moments of the stream and of sublayer outputs (`modules.stream`), and values of the
    heads (`modules.kernels.attention.observed`). `singular_value_NAME` is the largest singular
    value of a hidden matrix, over all experts. `layer_grad_norm` belongs to the gradient of the
    mean token loss.

    Args:
      learner: describes the parameters.
      sown: the collection `diagnostics`.
      used: the weights that layers use.
      grads: gradient of the mean token loss in `used`.

    Returns:
      [L, ...] by name.
    """
    names = matrix_names(learner)

    def diagnose_stack(stack):
        diagnostics = flatten_sown(sown, stack)
        diagnostics['layer_param_norm'] = norm_by_layer(stack.find(used))
        diagnostics['layer_grad_norm'] = norm_by_layer(stack.find(grads))
        specs = named_leaves(stack.find(learner.description.used_specs))
        for path, weight in named_leaves(stack.find(used)).items():
            if path in names:
                values = largest_singular_value(as_matrices(specs[path], weight))
                diagnostics[f'singular_value_{names[path]}'] = jnp.max(
                    values.reshape(len(values), -1), 1
                )
        return diagnostics

    return join_values(learner, diagnose_stack)


def flatten_sown(sown: Any, stack: Stack) -> Diagnostics:
    """Returns the diagnostics that the blocks of a stack have sown, [L, ...] by name.

    A name that several layers of a block give is that of the whole path.
    """
    leaves = {tuple(path.split('/')[:-1]): v for path, v in named_leaves(stack.find(sown)).items()}
    counts = collections.Counter(path[-1] for path in leaves)
    return {
        path[-1] if counts[path[-1]] == 1 else '_'.join(path): values
        for path, values in leaves.items()
    }


def join_sown(learner: Learner, sown: Any) -> Diagnostics:
    """Returns the diagnostics that all blocks have sown, [L, ...] by name."""
    return join_values(learner, lambda stack: flatten_sown(sown, stack))


def join_values(learner: Learner, compute: Callable[[Stack], Diagnostics]) -> Diagnostics:
    """Joins compute(stack) over stacks of blocks, [L, ...] by name in the order of the blocks; NaN
    where a stack has none.
    """
    stacks = block_stacks(learner.recipe)
    values_by_stack, joined = [compute(stack) for stack in stacks], {}
    for name in dict.fromkeys(name for values in values_by_stack for name in values):
        shape = next(values[name].shape[1:] for values in values_by_stack if name in values)
        arrays = [
            values.get(name, jnp.full((stack.count, *shape), jnp.nan))
            for stack, values in zip(stacks, values_by_stack, strict=True)
        ]
        joined[name] = join_stacks(stacks, [values.astype(jnp.float32) for values in arrays])
    return joined


def matrix_names(learner: Learner) -> dict[str, str]:
    """Returns {path within a block: name} for each hidden matrix that blocks use.

    The name is the last part of the path. A norm's matrix, or one whose last part is not unique, is
    named by its whole path.
    """
    specs = {}
    for stack in block_stacks(learner.recipe):
        stack_specs = named_leaves(stack.find(learner.description.used_specs))
        specs |= {path: spec for path, spec in stack_specs.items() if spec.role == 'hidden'}
    last_parts = {path: path.split('/')[-1] for path in specs}
    counts = collections.Counter(last_parts[path] for path in specs if specs[path].part != NORM)
    return {
        path: path.replace('/', '_')
        if spec.part == NORM or counts[last_parts[path]] > 1
        else last_parts[path]
        for path, spec in specs.items()
    }


def logit_sharpness(logits_TV: jax.Array, labels_T: jax.Array) -> jax.Array:
    """Returns the sharpness of the cross-entropy in the logits, in percent, [T].

    `100 (max_d f(z + d) - f(z)) / (1 + f(z))` over `|d_i| <= 5e-4 (|z_i| + 1)`, where `f` is the
    loss. As `f` falls with the label's logit and grows with all others, the largest value is at
    the corner of the box. The measure of arXiv:2405.18710, which searches the corner.

    Args:
      logits_TV: z.
      labels_T: the label of each token.
    """
    reach_TV = SHARPNESS_REACH * (jnp.abs(logits_TV) + 1)
    is_label_TV = jax.nn.one_hot(labels_T, logits_TV.shape[-1], dtype=jnp.bool_)

    def loss(z_TV):
        label_logit_T = jnp.sum(jnp.where(is_label_TV, z_TV, 0.0), -1)
        return jax.nn.logsumexp(z_TV, axis=-1) - label_logit_T

    loss_T = loss(logits_TV)
    largest_T = loss(logits_TV + jnp.where(is_label_TV, -reach_TV, reach_TV))
    return 100 * (largest_T - loss_T) / (1 + loss_T)


def readout_diagnostics(
    x_BTD: jax.Array, readout: Any, labels_BT: jax.Array, weights_BT: jax.Array
) -> Diagnostics:
    """Returns mean and largest magnitude of the logits and of log Z, and the mean sharpness, over
    target tokens.

    Rows are processed in turn, so that no array [B, T, V] is held.

    Args:
      x_BTD: the last activations.
      readout: maps activations to logits.
      labels_BT: the next tokens.
      weights_BT: above 0 for target tokens.

    Returns:
      Five scalars by name.
    """
    x_BTD, readout = jax.lax.stop_gradient((x_BTD, readout))

    def row_statistics(row):
        x_TD, labels_T, weights_T = row
        logits_TV = readout(x_TD)
        log_z_T = jax.nn.logsumexp(logits_TV, axis=-1)
        is_target_T = weights_T > 0

        def masked_max(values, mask):
            return jnp.max(jnp.where(mask, jnp.abs(values), 0.0))

        return {
            'logit_mean': jnp.sum(jnp.where(is_target_T, jnp.mean(logits_TV, -1), 0.0)),
            'logit_largest': masked_max(logits_TV, is_target_T[:, None]),
            'log_z_mean': jnp.sum(jnp.where(is_target_T, log_z_T, 0.0)),
            'log_z_largest': masked_max(log_z_T, is_target_T),
            'logit_sharpness': jnp.sum(
                jnp.where(is_target_T, logit_sharpness(logits_TV, labels_T), 0.0)
            ),
        }

    row_values = jax.lax.map(row_statistics, (x_BTD, labels_BT, weights_BT))
    n_targets = jnp.maximum(jnp.sum(weights_BT > 0), 1)
    return {
        name: jnp.max(values_B) if name.endswith('largest') else jnp.sum(values_B) / n_targets
        for name, values_B in row_values.items()
    }


def role_diagnostics(learner: Learner, params: Any, grads: Any, changes: Any) -> Diagnostics:
    """Returns gradient_rms_ROLE, update_rms_ROLE, weight_rms_ROLE and update_ratio_ROLE.

    These are root mean squares over the stored parameters of a role in a layer, and the ratio of
    update to weight. Parameters of layers give [L], the others a scalar each; vectors and hidden
    matrices outside layers are named ROLE_outside.

    Args:
      learner: describes the parameters.
      params: the stored parameters.
      grads: their gradient, before clipping.
      changes: the change by one optimizer step, including maps after it.

    Returns:
      Diagnostics by name.
    """
    trees = {'gradient': grads, 'update': changes, 'weight': params}
    trees = {kind: named_leaves(tree) for kind, tree in trees.items()}
    specs, rms_by_stack = named_leaves(learner.description.specs), {}
    for stack in block_stacks(learner.recipe):
        stack_specs = {
            p: s for p, s in specs.items() if p.startswith(f'{stack.path}/') and LAYER in s.axes
        }
        rms_by_stack[stack.path] = _rms_by_role(trees, stack_specs, is_layered=True)
    outside_specs = {path: spec for path, spec in specs.items() if LAYER not in spec.axes}
    outside_rms = _rms_by_role(trees, outside_specs, is_layered=False)
    return _add_update_ratios(join_values(learner, lambda stack: rms_by_stack[stack.path])) | {
        f'{name}_outside' if name.endswith(('hidden', 'vector')) else name: value
        for name, value in _add_update_ratios(outside_rms).items()
    }


def _rms_by_role(
    trees: Mapping[str, Diagnostics], specs: Mapping[str, Any], is_layered: bool
) -> Diagnostics:
    rms = {}
    for kind, leaves in trees.items():
        for role in dict.fromkeys(spec.role for spec in specs.values()):
            squares, count = 0.0, 0
            for path in (path for path, spec in specs.items() if spec.role == role):
                leaf = jnp.square(leaves[path].astype(jnp.float32))
                if is_layered:
                    leaf = jnp.moveaxis(leaf, specs[path].axes.index(LAYER), 0)
                    leaf = leaf.reshape(len(leaf), -1)
                squares += jnp.sum(leaf, -1 if is_layered else None)
                count += leaf.shape[-1] if is_layered else leaf.size
            rms[f'{kind}_rms_{role}'] = jnp.sqrt(squares / count)
    return rms


def _add_update_ratios(rms: Diagnostics) -> Diagnostics:
    return rms | {
        name.replace('weight_rms', 'update_ratio'): rms[name.replace('weight', 'update')] / value
        for name, value in rms.items()
        if name.startswith('weight_rms_')
    }


def reparam_diagnostics(learner: Learner, state: State) -> Diagnostics:
    """Returns the `measures` of reparametrisations (`modules.reparam`) as `sigma_NAME`, [L].

    A matrix with experts gives the largest value of them.
    """
    names = matrix_names(learner)
    measures = learner.description.reparam.measures(state.params, state.reparam)

    def measure_stack(stack):
        specs, diagnostics = named_leaves(stack.find(learner.description.used_specs)), {}
        for measure, sigmas in measures.items():
            for path, name in names.items():
                if (value := sigmas.get(f'{stack.path}/{path}')) is None:
                    continue
                batch, *_ = matrix_axes(specs[path])
                if value.ndim < len(batch):  # shared by all layers
                    value = jnp.broadcast_to(value[None], (stack.count, *value.shape))
                diagnostics[f'{measure}_{name}'] = jnp.max(value.reshape(stack.count, -1), 1)
        return diagnostics

    return join_values(learner, measure_stack)


def norm_by_layer(tree: Any) -> jax.Array:
    """Returns the norm of all parameters of a layer, [L]; leaves are stacked along their first
    axis.
    """
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32)).reshape(len(leaf), -1), 1)
        for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares))
