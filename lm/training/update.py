"""Builds the stages of an update (`modules.optim.stages`) from a recipe and a run's numbers."""

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import optax

from lm.config.groups import SCHEDULE_OPTIONS, WEIGHT_DECAY, find_setting, group_lr
from lm.config.recipe import Recipe
from lm.config.stages import TrainingStage, is_one, schedule_step, stage_factor
from lm.model.parameters import Description
from modules.numerics import DTYPES
from modules.optim import Average, mask_untrained, partition
from modules.optim.groups import GROUPS, HIDDEN, OTHERS, find_group
from modules.optim.stages import NO_DECAY, Stages, build_stages, stored_stages
from modules.optim.storage import MOMENTUM, SECOND, narrow_moments
from modules.scaling import DecayInputs

Numbers = Mapping[str, Any]


def bind_rows(recipe: Recipe, hyper: Numbers) -> dict[str, Callable[..., Any]]:
    """Returns the table rows that an update applies, with their numbers, by config field."""
    parts = (recipe.schedule, *recipe.optimizers.values(), recipe.decay, recipe.average)
    return {part.path: functools.partial(part.row, **part.option_values(hyper)) for part in parts}


def peak_lrs(rates: Numbers) -> dict[str, Any]:
    """Returns the peak learning rate of each group of parameters (`modules.optim.groups`).

    rates: a Hyper or a flattened config; rates of groups may be missing or None.
    """
    return {group: group_lr(rates, group) for group in (HIDDEN, *GROUPS)}


def group_fractions(recipe: Recipe, hyper: Numbers, step: Any) -> dict[str, Any]:
    """Returns the share of its peak learning rate that each group has.

    Args:
      recipe: names the schedule.
      hyper: the numbers of the run.
      step: number of updates done, one or an array.

    Returns:
      {group: fraction}; groups without settings of the schedule share the same array. Fractions
      have the factors of the stages of the run.
    """
    schedule, steps = bind_rows(recipe, hyper)[recipe.schedule.path], hyper['train.steps']
    rates = [stage.factors.lr for stage in recipe.stages]
    factor, step = stage_factor(recipe.stages, step, rates), schedule_step(recipe.stages, step)
    fractions = {HIDDEN: schedule(step, steps)}
    for group, (_, parent) in GROUPS.items():
        replaced = {
            option: hyper[path]
            for option in SCHEDULE_OPTIONS
            if (path := find_setting(hyper, group, option)[0]) in hyper
            and option in recipe.schedule.options
            and path != recipe.schedule.option_path(option)
        }
        fractions[group] = schedule(step, steps, **replaced) if replaced else fractions[parent]
    return fractions if is_one(factor) else {g: factor * f for g, f in fractions.items()}


def numbers_at_step(
    hyper: Numbers, step: Any, stages: Sequence[TrainingStage] = ()
) -> dict[str, Any]:
    """Returns the numbers of a run at a step, at which momentum and weight decay may differ.

        mu_t = s + (mu - s) min(1, (t + 1) / w)     lambda_t = lambda (1 + (e - 1) (t + 1) / T)

    s is optim.momentum_start, w optim.momentum_warmup_steps and e optim.weight_decay_end, if they
    are set. T is the number of steps, and t counts from 0. Each group's weight decay changes alike.
    With stages of other batches, t counts tokens, and train.stage_rule may change weight decay, b2
    and eps (`lm.config.stages`).

    Args:
      hyper: the numbers of the run.
      step: t, the number of updates done.
      stages: the stages of the run.
    """
    values = {
        'weight_decay': [stage.factors.weight_decay for stage in stages],
        'memory': [stage.factors.memory for stage in stages],
        'eps': [stage.factors.eps for stage in stages],
    }
    factors = {
        name: factor
        for name, by_stage in values.items()
        if not is_one(factor := stage_factor(stages, step, by_stage))
    }
    step, changed = schedule_step(stages, step), {}
    if (start := hyper.get('optim.momentum_start')) is not None:
        share = jnp.minimum(1.0, (step + 1) / hyper['optim.momentum_warmup_steps'])
        changed['optim.momentum'] = start + (hyper['optim.momentum'] - start) * share
    if (end := hyper.get('optim.weight_decay_end')) is not None:
        share = 1 + (end - 1) * (step + 1) / hyper['train.steps']
        paths = [
            path for path in hyper if path.startswith('optim.') and path.endswith('weight_decay')
        ]
        changed |= {path: hyper[path] * share for path in paths}
    numbers = {**hyper, **changed}
    return {**numbers, **_scale_settings(numbers, factors)} if factors else numbers


def _scale_settings(numbers: Numbers, factors: Numbers) -> dict[str, Any]:
    """Returns the settings of all groups that the factors of a stage change, by path."""
    changed = {}
    for path, value in numbers.items():
        if not path.startswith('optim.'):
            continue
        if path.endswith('weight_decay') and 'weight_decay' in factors:
            changed[path] = value * factors['weight_decay']
        elif path.endswith(('.b2', '_b2')) and 'memory' in factors:
            changed[path] = 1 - (1 - value) * factors['memory']
        elif path.endswith(('.eps', '_eps')) and 'eps' in factors:
            changed[path] = value * factors['eps']
    return changed


def build_optimizer(
    recipe: Recipe, description: Description, hyper: Numbers
) -> optax.GradientTransformationExtraArgs:
    """Builds the stages from clipped gradients to a direction, as one transformation.

    Args:
      recipe: names the optimizers.
      description: describes the stored parameters.
      hyper: the numbers of the run.

    Returns:
      The transformation, whose state is stored in checkpoints.
    """
    return stored_stages(update_stages(recipe, description, hyper))


def update_stages(
    recipe: Recipe, description: Description, hyper: Numbers, fractions: Numbers | None = None
) -> Stages:
    """Builds the stages of an update.

    Args:
      recipe: names optimizers and decay rule.
      description: describes the stored parameters.
      hyper: the numbers of the run.
      fractions: values of the schedule (`group_fractions`). If None, the stages from the
        learning rate on are left out; they have no stored state.

    Returns:
      The stages by name.
    """
    specs, scalings, trainable = description.specs, description.scalings, description.trainable
    eps_factors = jax.tree.map(lambda scaling: scaling.eps_factor, scalings)
    facts = {
        'specs': specs,
        'optimizer': _build_optimizers(recipe, description, hyper),
        'trainable': None if all(jax.tree.leaves(trainable)) else trainable,
        'cautious_updates': recipe.optim.cautious_updates or None,
        'matched_roles': tuple(recipe.optim.match_norm_roles.split('+')),
    }
    # A stage exists only if it has something to do: one that divides by 1 would still be a pass
    # over all gradients.
    if any(factor != 1.0 for factor in jax.tree.leaves(eps_factors)):
        facts['eps_factors'] = eps_factors
    if fractions is not None:
        rule, peaks = bind_rows(recipe, hyper)['optim.decay_rule'], peak_lrs(hyper)
        shares = decay_shares(description, rule, hyper, fractions, peaks)

        def learning_rate(spec, scaling):
            group = find_group(spec)
            return peaks[group] * fractions[group] * scaling.lr_factor

        facts['learning_rates'] = jax.tree.map(learning_rate, specs, scalings)
        facts['decay_shares'] = shares
        if recipe.decay.row.in_gradient:
            # As L2 regularisation, decay enters the gradient before the optimizer
            # (arXiv:1711.05101, section 2), and nothing is taken off the weights afterwards.
            facts['penalty_shares'] = shares
            facts['decay_shares'] = jax.tree.map(lambda _: NO_DECAY, specs)
        if recipe.optim.cautious_decay:
            facts['cautious_decay_shares'] = facts.pop('decay_shares')
    return build_stages(facts, hyper)


def _build_optimizers(recipe: Recipe, description: Description, hyper: Numbers) -> Any:
    """Returns the optimizers of all parameters as one transformation."""
    rows, specs, trainable = bind_rows(recipe, hyper), description.specs, description.trainable
    optimizers = recipe.group_optimizers
    # Both fields may name the same optimizer with the same options, which is then one.
    is_same = recipe.optimizer.name == recipe.others.name and not recipe.others.group_paths

    def find_label(spec):
        group = find_group(spec)
        if optimizers[group] is recipe.optimizer:
            return OTHERS if is_same else HIDDEN
        return OTHERS if optimizers[group] is recipe.others else group

    labels = jax.tree.map(find_label, specs)
    present = {*jax.tree.leaves(labels)}
    makers = {g: rows[optimizers[g].path] for g in (HIDDEN, *GROUPS) if g in present}
    if recipe.optim.momentum_dtype != 'float32':
        narrow = {MOMENTUM: DTYPES[recipe.optim.momentum_dtype]}
        makers = {
            group: functools.partial(_make_narrow, make, narrow, str(optimizers[group]))
            for group, make in makers.items()
        }
    is_all_trained = all(jax.tree.leaves(trainable))
    if is_all_trained and len(makers) == 1:
        (make,) = makers.values()
        optimizer = make(specs)
    else:
        optimizer = partition(specs, labels, makers, None if is_all_trained else trainable)
    if recipe.optim.second_moment_dtype == 'float32':
        return optimizer
    # Of all groups at once, since only some optimizers have second moments.
    names = ' and '.join(dict.fromkeys(str(optimizers[group]) for group in makers))
    return narrow_moments(optimizer, {SECOND: DTYPES[recipe.optim.second_moment_dtype]}, names)


def _make_narrow(make: Callable, dtypes: Numbers, name: str, *args: Any) -> Any:
    """Returns the optimizer that `make` makes, with narrow moments."""
    return narrow_moments(make(*args), dtypes, name)


def build_average(recipe: Recipe, description: Description, hyper: Numbers) -> Average:
    """Builds the average of the trained stored weights (optim.average).

    Args:
      recipe: names the average.
      description: describes the stored parameters.
      hyper: the numbers of the run.

    Returns:
      The average.
    """
    row, trainable = bind_rows(recipe, hyper)['optim.average'], description.trainable
    specs, steps = description.specs, hyper['train.steps']
    if all(jax.tree.leaves(trainable)):
        return row(specs, steps)
    specs = jax.tree.map(lambda t, spec: spec if t else optax.MaskedNode(), trainable, specs)
    return mask_untrained(row(specs, steps), trainable)


def decay_shares(
    description: Description, rule: Callable, hyper: Numbers, fractions: Numbers, peaks: Numbers
) -> Any:
    """Returns the share of each weight that the decay rule removes in a step, or adds to its
    gradient.

    Args:
      description: describes the stored parameters.
      rule: the decay rule, from `bind_rows`.
      hyper: the numbers of the run.
      fractions: values of the schedule, relative to `peaks`, by group.
      peaks: learning rates from `peak_lrs`.

    Returns:
      A tree of scalars, NO_DECAY for weights without decay.
    """

    def share(spec, scaling, growth, is_trained):
        # Decided by static numbers, since a traced share of 0 would still be multiplied by every
        # weight.
        if not (is_trained and scaling.decay_factor):
            return NO_DECAY
        group = find_group(spec)
        decay = DecayInputs(
            weight_decay=find_setting(hyper, group, WEIGHT_DECAY)[1],
            lr=peaks[group] * scaling.lr_factor,
            fraction=fractions[group],
            steps=hyper['train.steps'],
            growth=growth,
            factor=scaling.decay_factor,
            hidden=spec.role == 'hidden',
        )
        return rule(decay)

    return jax.tree.map(
        share, description.specs, description.scalings, description.growths, description.trainable
    )
