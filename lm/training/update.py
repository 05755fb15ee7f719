"""Builds the stages of an update (`modules.optim.stages`) from a recipe and a run's numbers."""

import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import optax

from lm.config.recipe import Recipe
from lm.model.parameters import Description, optimizer_field
from modules.optim import Average, mask_untrained, partition_by_role
from modules.optim.stages import NO_DECAY, Stages, build_stages, stored_stages
from modules.scaling import DecayInputs

Numbers = Mapping[str, Any]


def bind_rows(recipe: Recipe, hyper: Numbers) -> dict[str, Callable[..., Any]]:
    """Returns the table rows that an update applies, with their numbers, by config field."""
    parts = (recipe.schedule, *recipe.optimizers.values(), recipe.decay, recipe.average)
    return {part.path: functools.partial(part.row, **part.option_values(hyper)) for part in parts}


def peak_lrs(rates: Numbers) -> dict[str, Any]:
    """Returns the peak learning rate of each optimizer, by the field that names it.

    rates: a Hyper or a flattened config; optim.others_lr may be missing or None.
    """
    others_lr = rates.get('optim.others_lr')
    lr = rates['optim.lr']
    return {'optim.name': lr, 'optim.others': lr if others_lr is None else others_lr}


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
    recipe: Recipe, description: Description, hyper: Numbers, fraction: Any = None
) -> Stages:
    """Builds the stages of an update.

    Args:
      recipe: names optimizers and decay rule.
      description: describes the stored parameters.
      hyper: the numbers of the run.
      fraction: value of the schedule. If None, the stages from the learning rate on are left out;
        they have no stored state.

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
    if fraction is not None:
        rule, peaks = bind_rows(recipe, hyper)['optim.decay_rule'], peak_lrs(hyper)
        shares = decay_shares(description, rule, hyper, fraction, peaks)
        facts['learning_rates'] = jax.tree.map(
            lambda spec, scaling: peaks[optimizer_field(spec)] * fraction * scaling.lr_factor,
            specs,
            scalings,
        )
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
    rows, specs = bind_rows(recipe, hyper), description.specs
    hidden_row, others_row, trainable = (
        rows['optim.name'],
        rows['optim.others'],
        description.trainable,
    )
    roles = {} if recipe.optim.name == recipe.optim.others else {'hidden': hidden_row}
    if all(jax.tree.leaves(trainable)):
        return partition_by_role(specs, others_row, **roles) if roles else hidden_row(specs)
    return partition_by_role(specs, others_row, trainable, **roles)


def build_average(recipe: Recipe, description: Description, hyper: Numbers) -> Average:
    """Builds the average of the trained stored weights (optim.average).

    Args:
      recipe: names the average.
      description: describes the stored parameters.
      hyper: the numbers of the run.

    Returns:
      The average.
    """
    average, trainable = bind_rows(recipe, hyper)['optim.average'](), description.trainable
    return average if all(jax.tree.leaves(trainable)) else mask_untrained(average, trainable)


def decay_shares(
    description: Description, rule: Callable, hyper: Numbers, fraction: Any, peaks: Numbers
) -> Any:
    """Returns the share of each weight that the decay rule removes in a step, or adds to its
    gradient.

    Args:
      description: describes the stored parameters.
      rule: the decay rule, from `bind_rows`.
      hyper: the numbers of the run.
      fraction: value of the schedule, relative to `peaks`.
      peaks: learning rates from `peak_lrs`.

    Returns:
      A tree of scalars, NO_DECAY for weights without decay.
    """

    def share(spec, scaling, growth, is_trained):
        # Decided by static numbers, since a traced share of 0 would still be multiplied by every
        # weight.
        if not (is_trained and scaling.decay_factor):
            return NO_DECAY
        decay = DecayInputs(
            weight_decay=hyper['optim.weight_decay'],
            lr=peaks[optimizer_field(spec)] * scaling.lr_factor,
            fraction=fraction,
            steps=hyper['train.steps'],
            growth=growth,
            factor=scaling.decay_factor,
            hidden=spec.role == 'hidden',
        )
        return rule(decay)

    return jax.tree.map(
        share, description.specs, description.scalings, description.growths, description.trainable
    )
