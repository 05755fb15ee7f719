"""What is recorded of each layer, by a program of its own; the training step has none of it."""

import collections
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.model.transformer import groups_of_blocks
from lm.training.state import Hyper, Learner, State
from lm.training.step import (
    Batch,
    activations,
    asked_of,
    differentiated,
    loss_sums,
    microbatched,
    target_weights,
    token_sums,
)
from lm.training.update import optimizer_step
from modules.params import LAYER, NORM, ParamSpec, as_matrices, matrix_axes, named_leaves
from modules.spectrum import largest_singular_value
from modules.statistics import DIAGNOSTICS

Found = dict[str, jax.Array]


def make_diagnose(learner: Learner) -> Callable[[State, Batch, Hyper], Found]:
    """`diagnose(state, batch, hyper)`: by name a number, one a layer [L], or one a head [L, N].

    - What layers sow in the collection `diagnostics`: `residual_*` of the stream behind each block,
      `attention_output_*` and `mlp_output_*` of what its sublayers return (`modules.stream`), and
      by head what attention says of itself (`modules.kernels.attention.observed`).
    - Of the readout `logit_mean`, `logit_largest` (of |logit|), `log_z_mean` and `log_z_largest`
      (of |log Z|), over the tokens that the loss counts.
    - By role and layer what the optimizer would do with this batch's gradient: `by_role`.
    - Of the spread between the gradients of the rows with even and with odd numbers, where the
      rows are even: `gradient_noise`.
    - Of the weights that each layer uses their norm (`layer_param_norm`), that of the gradient of
      the mean token loss (`layer_grad_norm`), and `singular_value_NAME` of each hidden matrix, the
      largest of its experts; `sigma_NAME` and `gamma_NAME` where a reparametrisation has them.

    Layers are as in evaluation. Nothing of it is kept.
    """
    described = learner.described

    def diagnose(state: State, batch: Batch, hyper: Hyper) -> Found:
        total = jnp.maximum(jnp.sum(target_weights(batch, learner.bos_id)), 1.0)

        def loss(used):
            variables = {'params': used, **state.stats}
            (x_BTD, readout), filled = activations(learner, variables, batch, (DIAGNOSTICS,))
            sums = loss_sums(learner, x_BTD, readout, filled, batch, hyper)
            seen = of_readout(x_BTD, readout, target_weights(batch, learner.bos_id))
            means = {name: value / total for name, value in sums.items()}
            return means['objective'], (filled[DIAGNOSTICS], seen, means)

        def use(params):
            return described.reparam.apply(differentiated(learner, params), state.reparam, False)

        used, to_stored, _ = jax.vjp(use, state.params, has_aux=True)
        grads, (sown, seen, means) = jax.grad(loss, has_aux=True)(used)
        (stored_grads,) = to_stored(grads)
        parts = microbatched(batch, learner.recipe.train.microbatches)
        asked = asked_of(learner, state, hyper, parts, total)
        step = optimizer_step(learner, state, hyper, stored_grads, means, asked)
        changes = jax.tree.map(jnp.subtract, step.state.params, state.params)
        found = {
            **of_layers(learner, sown, used, grads),
            **seen,
            **by_role(learner, state.params, stored_grads, changes),
            **measured(learner, state),
        }
        if len(batch['tokens']) % 2 == 0:
            half = jax.tree.map(lambda rows: rows[0], microbatched(batch, 2))
            tokens = jnp.sum(target_weights(half, learner.bos_id))

            def of_half(used):
                variables = {'params': used, **state.stats}
                sums = token_sums(learner, variables, half, hyper)
                return sums['objective'] / jnp.maximum(tokens, 1.0)

            (half_grads,) = to_stored(jax.grad(of_half)(used))
            found |= gradient_noise(stored_grads, half_grads, total, tokens)
        return found

    return diagnose


def gradient_noise(grads: Any, of_part: Any, total: jax.Array, tokens: jax.Array) -> Found:
    """What the spread between two parts of a batch says of the batch size, from the gradient of
    the mean loss of `total` tokens and that of the first `tokens` of them, about half.

    With |G|^2 of all n tokens and s the mean of |G|^2 of the two parts, of n / 2 tokens each:
    `gradient_noise_signal` = 2 |G|^2 - s estimates the squared norm of the gradient of all text,
    `gradient_noise_trace` = n (s - |G|^2) the variance of a token's gradient, and their quotient
    `gradient_noise_scale` is the number of tokens a batch beyond which more help little. Each is a
    single draw and may be negative: average the first two over steps before dividing. Source:
    arXiv:1812.06162, appendix A.1.
    """
    rest = jnp.maximum(total - tokens, 1.0)
    others = jax.tree.map(lambda g, part: (total * g - tokens * part) / rest, grads, of_part)
    all_of_it, *parts = (optax.tree.norm(tree, squared=True) for tree in (grads, of_part, others))
    small = sum(parts) / 2
    signal, trace = 2 * all_of_it - small, total * (small - all_of_it)
    return {
        'gradient_noise_signal': signal,
        'gradient_noise_trace': trace,
        'gradient_noise_scale': trace / signal,
    }


def of_layers(learner: Learner, sown: Any, used: Any, grads: Any) -> Found:
    """What layers have sown, and what is seen of the weights they use."""
    names = short_names(learner)
    found = []
    for group in groups_of_blocks(learner.recipe):
        own = sown_in(sown, group.name)
        own['layer_param_norm'] = norm_by_layer(used[group.name])
        own['layer_grad_norm'] = norm_by_layer(grads[group.name])
        specs = named_leaves(learner.described.used_specs[group.name])
        for path, weight in named_leaves(used[group.name]).items():
            if path in names:
                values = largest_singular_value(as_matrices(specs[path], weight))
                own[f'singular_value_{names[path]}'] = jnp.max(values.reshape(len(values), -1), 1)
        found.append((group.count, own))
    return joined(found)


def sown_in(sown: Any, group: str) -> Found:
    """What the layers of one group of blocks have recorded, [L, ...] each, by name."""
    return {path.split('/')[-2]: values for path, values in named_leaves(sown[group]).items()}


def sown_by_layers(learner: Learner, sown: Any) -> Found:
    """The same of all blocks."""
    groups = groups_of_blocks(learner.recipe)
    return joined([(group.count, sown_in(sown, group.name)) for group in groups])


def short_names(learner: Learner) -> dict[str, str]:
    """path within a block -> name, for each hidden matrix that blocks use: its last part, or all of
    it where two would have the same. That of a norm's is always whole.
    """
    specs: dict[str, ParamSpec] = {}
    for group in groups_of_blocks(learner.recipe):
        own = named_leaves(learner.described.used_specs[group.name])
        specs |= {path: spec for path, spec in own.items() if spec.role == 'hidden'}
    counts = collections.Counter(p.split('/')[-1] for p, s in specs.items() if s.part != NORM)
    return {
        path: path.replace('/', '_')
        if spec.part == NORM or counts[path.split('/')[-1]] > 1
        else path.split('/')[-1]
        for path, spec in specs.items()
    }


def joined(groups: Iterable[tuple[int, Found]]) -> Found:
    """[L, ...] of what groups of so many layers have by name; NaN for a group without it."""
    groups = list(groups)
    names = dict.fromkeys(name for _, own in groups for name in own)
    found = {}
    for name in names:
        ends = next(own[name].shape[1:] for _, own in groups if name in own)
        parts = [own.get(name, jnp.full((count, *ends), jnp.nan)) for count, own in groups]
        found[name] = jnp.concatenate([part.astype(jnp.float32) for part in parts])
    return found


def of_readout(x_BTD: jax.Array, readout: Any, weights_BT: jax.Array) -> Found:
    """Row after row of the batch, so that no array [B, T, V] is made for it."""
    x_BTD, readout = jax.lax.stop_gradient((x_BTD, readout))

    def of_row(row):
        x_TD, weights_T = row
        logits_TV = readout(x_TD)
        log_z_T = jax.nn.logsumexp(logits_TV, axis=-1)
        counts_T = weights_T > 0

        def largest(values, where):
            return jnp.max(jnp.where(where, jnp.abs(values), 0.0))

        return {
            'logit_mean': jnp.sum(jnp.where(counts_T, jnp.mean(logits_TV, -1), 0.0)),
            'logit_largest': largest(logits_TV, counts_T[:, None]),
            'log_z_mean': jnp.sum(jnp.where(counts_T, log_z_T, 0.0)),
            'log_z_largest': largest(log_z_T, counts_T),
        }

    rows = jax.lax.map(of_row, (x_BTD, weights_BT))
    tokens = jnp.maximum(jnp.sum(weights_BT > 0), 1)
    return {
        name: jnp.sum(values_B) / tokens if name.endswith('mean') else jnp.max(values_B)
        for name, values_B in rows.items()
    }


def by_role(learner: Learner, params: Any, grads: Any, changes: Any) -> Found:
    """gradient_rms_ROLE, update_rms_ROLE, weight_rms_ROLE and update_ratio_ROLE of the stored
    parameters: root mean squares over all of a role in a layer, and update over weight.

    The update is what one optimizer step from here adds, maps after it included; the gradient is
    that before clipping. [L] for those that layers hold; for the others a number each, of vectors
    and of hidden matrices as ROLE_outside.
    """
    described, trees = learner.described, {'gradient': grads, 'update': changes, 'weight': params}
    groups, outside = [], named_leaves(described.specs)
    for group in groups_of_blocks(learner.recipe):
        of_group = named_leaves(described.specs[group.name])
        layered = {f'{group.name}/{p}': s for p, s in of_group.items() if LAYER in s.axes}
        outside = {path: spec for path, spec in outside.items() if path not in layered}
        groups.append((group.count, _rms_by_role(trees, layered, is_layered=True)))
    alone = _rms_by_role(trees, outside, is_layered=False)
    return _with_ratios(joined(groups)) | {
        f'{name}_outside' if name.endswith(('hidden', 'vector')) else name: value
        for name, value in _with_ratios(alone).items()
    }


def _rms_by_role(trees: Mapping[str, Any], specs: Mapping[str, Any], is_layered: bool) -> Found:
    found = {}
    for what, tree in trees.items():
        leaves = named_leaves(tree)
        for role in dict.fromkeys(spec.role for spec in specs.values()):
            squares, count = 0.0, 0
            for path, spec in specs.items():
                if spec.role != role:
                    continue
                leaf = jnp.square(leaves[path].astype(jnp.float32))
                if is_layered:
                    leaf = jnp.moveaxis(leaf, spec.axes.index(LAYER), 0)
                    leaf = leaf.reshape(len(leaf), -1)
                squares += jnp.sum(leaf, -1 if is_layered else None)
                count += leaf.shape[-1] if is_layered else leaf.size
            found[f'{what}_rms_{role}'] = jnp.sqrt(squares / count)
    return found


def _with_ratios(found: Found) -> Found:
    weights = {name: value for name, value in found.items() if name.startswith('weight_rms_')}
    ratios = {
        name.replace('weight_rms', 'update_ratio'): found[name.replace('weight', 'update')] / value
        for name, value in weights.items()
    }
    return found | ratios


def measured(learner: Learner, state: State) -> Found:
    """What reparametrisations know of the matrices of layers, such as their spectral norm (the
    `measures` of `modules.reparam`): [L], the largest of the experts.
    """
    names, by_group = short_names(learner), []
    found = learner.described.reparam.measures(state.params, state.reparam)
    for group in groups_of_blocks(learner.recipe):
        own = {}
        specs = named_leaves(learner.described.used_specs[group.name])
        for what, values in found.items():
            for path, name in names.items():
                value = values.get(f'{group.name}/{path}')
                if value is None:
                    continue
                batch, *_ = matrix_axes(specs[path])
                if value.ndim < len(batch):  # one for all layers
                    value = jnp.broadcast_to(value[None], (group.count, *value.shape))
                own[f'{what}_{name}'] = jnp.max(value.reshape(group.count, -1), 1)
        by_group.append((group.count, own))
    return joined(by_group)


def norm_by_layer(tree: Any) -> jax.Array:
    """[L]: the norm of all that a layer holds, of leaves stacked along their first axis."""
    squares = [
        jnp.sum(jnp.square(leaf.astype(jnp.float32)).reshape(len(leaf), -1), 1)
        for leaf in jax.tree.leaves(tree)
    ]
    return jnp.sqrt(sum(squares))
