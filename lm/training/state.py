"""What training changes (State), its numbers (Hyper), and what is decided about it (Learner)."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from flax import struct

from lm.config.recipe import Recipe
from lm.model.parameters import Description, describe_params, initial_parameters
from lm.model.transformer import Transformer, build_model
from modules.optim import Average, by_role, unboxed
from modules.params import named_leaves, path_name, split


class Weights(struct.PyTreeNode):
    """What a model is run with. params: the weights stored; reparam: what their map carries;
    stats: what layers carry (`modules.statistics`), by collection; {} where none does.
    """

    params: Any
    reparam: Any
    stats: Any


class State(struct.PyTreeNode):
    """step: updates done; average: what is kept of earlier weights (`modules.optim.averages`); the
    rest as in Weights. Gradients are taken at `weights`; what evaluation uses, `evaluated` says.
    """

    step: jax.Array
    params: Any
    reparam: Any
    stats: Any
    opt_state: Any
    average: Any = struct.field(default_factory=dict)

    @property
    def weights(self) -> Weights:
        return Weights(self.params, self.reparam, self.stats)


Hyper = dict[str, Any]  # {'optim.lr': scalar, ...}: what may differ between runs of one program


def hyper_from(recipe: Recipe) -> Hyper:
    """The numbers that programs take as data, and never branch on, as float32 scalars."""
    return {path: jnp.float32(value) for path, value in recipe.traced.items()}


def schedule_fraction(recipe: Recipe, step: jax.Array, hyper: Hyper) -> jax.Array:
    """What the schedule makes of the peak at `step`, from 0."""
    schedule = recipe.schedule
    return schedule.row(step, hyper['train.steps'], **schedule.numbers(hyper))


def peaks_of(rates: Mapping[str, Any]) -> dict[str, Any]:
    """The peak learning rate of each optimizer, by the field that names it, from what `rates` (a
    Hyper, or a flattened config) has as optim.lr and, where it is given, as optim.others_lr.
    """
    others = rates.get('optim.others_lr')
    lr = rates['optim.lr']
    return {'optim.name': lr, 'optim.others': lr if others is None else others}


def optimizer(
    recipe: Recipe, described: Description, hyper: Hyper
) -> optax.GradientTransformationExtraArgs:
    """Clipped gradients to a direction, in the same units for all; `lm.training.update` scales it.

    An epsilon f times as large for a parameter is a gradient 1 / f times as large: a direction in
    which epsilon is compared with the gradient does not change otherwise.
    """

    own, others = (
        functools.partial(part.row, **part.numbers(hyper)) for part in recipe.optimizers.values()
    )
    if recipe.optim.name == recipe.optim.others:
        chosen = own(described.specs)
    else:
        chosen = by_role(described.specs, others, hidden=own)
    factors = jax.tree.map(lambda scaling: scaling.eps_factor, described.scalings)
    stages = [optax.clip_by_global_norm(hyper['optim.clip_norm'])]
    if any(factor != 1.0 for factor in jax.tree.leaves(factors)):
        divide = optax.stateless(
            lambda grads, _: jax.tree.map(lambda g, factor: g / factor, grads, factors)
        )
        stages.append(divide)
    return optax.with_extra_args_support(optax.chain(*stages, chosen))


def average_of(recipe: Recipe, hyper: Hyper) -> Average:
    """What is averaged of the stored weights, with its numbers."""
    return recipe.average.row(**recipe.average.numbers(hyper))


class StepNumbers(NamedTuple):
    """What the numbers of a run make of one step.

    fraction: of the peak learning rate, by the schedule. peaks: `peaks_of`. optimizer, average:
    those of the recipe, with their numbers.
    """

    fraction: jax.Array
    peaks: dict[str, Any]
    optimizer: optax.GradientTransformationExtraArgs
    average: Average


def step_numbers(
    recipe: Recipe, described: Description, step: jax.Array, hyper: Hyper
) -> StepNumbers:
    """All that the step at `step`, from 0, takes from the numbers of its run."""
    return StepNumbers(
        schedule_fraction(recipe, step, hyper),
        peaks_of(hyper),
        optimizer(recipe, described, hyper),
        average_of(recipe, hyper),
    )


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model and all that is decided about training it; nothing here is an array.

    bos_id: the token that begins a document and is no target.
    """

    recipe: Recipe
    model: Transformer
    bos_id: int
    described: Description

    def variables(self, weights: Weights) -> dict[str, Any]:
        """What `model.apply` takes, in evaluation."""
        used, _ = self.described.reparam.apply(weights.params, weights.reparam, False)
        return {'params': used, **weights.stats}

    def evaluated(self, weights: Weights, average: Any, hyper: Hyper) -> Weights:
        """The weights that stand for a model that has trained to `weights`: those of its average
        (optim.average), where there is one.

        All that evaluates goes through here: validation, and whatever reads a checkpoint
        (`lm.inference.load`), so also the best one, generation, folding and train.init_from. The
        diagnostics of training, its loss among them, are of `weights`, where its gradients are
        taken. What layers and reparametrisations carry is that of `weights` too: statistics of
        activations are those seen on the way, not those that the average would see.
        """
        if not average:
            return weights
        params = average_of(self.recipe, hyper).averaged(weights.params, average)
        return weights.replace(params=self.described.after_update(params, weights.reparam)[0])


def build_learner(recipe: Recipe, vocab_size: int, bos_id: int, platform: str) -> Learner:
    """For devices of `platform`. `lm.model.check` has checked the config's names."""
    model = build_model(recipe, vocab_size, platform)
    return Learner(recipe, model, bos_id, describe_params(recipe, model))


def init_state(learner: Learner, hyper: Hyper, key: jax.Array) -> State:
    """Parameters drawn at unit scale, matrices multiplied by init_scale * init_std."""
    described = learner.described
    boxes, stats = initial_parameters(learner.recipe, learner.model, key)
    unit, _ = split(boxes)
    stds, specs = named_leaves(described.init_stds), named_leaves(described.used_specs)

    def scale(path, weight):
        name = path_name(path)
        std = stds.get(name)  # a tree holds no None
        if std is None:
            return weight
        if specs[name].role == 'embedding':
            std = hyper.get('scaling.embedding_std', std)
        weight = learner.recipe.init.row.arranged(specs[name], weight)
        return weight * (hyper['scaling.init_scale'] * std)

    params, reparam = described.reparam.init(jax.tree_util.tree_map_with_path(scale, unit))
    opt_state = unboxed(optimizer(learner.recipe, described, hyper).init(params))
    average = average_of(learner.recipe, hyper).init(params)
    return State(jnp.int32(0), params, reparam, stats, opt_state, average)
