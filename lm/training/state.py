"""A run's State, its numbers (Hyper), and the Learner that holds all decisions about training."""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from lm.config.recipe import Recipe
from lm.model.parameters import Description, describe_params, init_params, optimizer_field
from lm.model.transformer import Transformer, build_model
from lm.training.update import build_average, build_optimizer
from modules.kernels import ATTENTION_KERNELS, OPERATIONS
from modules.optim import unbox_state
from modules.params import named_leaves, path_name, split_boxes


class Weights(struct.PyTreeNode):
    """The stored weights, what their map carries (reparam), and what layers carry, by collection
    (stats, `modules.statistics`).
    """

    params: Any
    reparam: Any
    stats: Any


class State(struct.PyTreeNode):
    """The arrays that training changes; gradients are taken at `weights`. step: updates done.
    average: what is kept of earlier weights (`modules.optim.averages`).
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


def make_hyper(recipe: Recipe) -> Hyper:
    """Returns the numbers that programs take as data, and never branch on, as float32 scalars."""
    return {path: jnp.float32(value) for path, value in recipe.traced_values.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
    """A model and all decisions about training it. bos_id begins a document and is no target."""

    recipe: Recipe
    model: Transformer
    bos_id: int
    description: Description

    def variables(self, weights: Weights) -> dict[str, Any]:
        """Returns the argument of `model.apply` in evaluation."""
        used, _ = self.description.reparam.apply(weights.params, weights.reparam, False)
        return {'params': used, **weights.stats}

    def select_eval_weights(self, weights: Weights, average: Any, hyper: Hyper) -> Weights:
        """Returns the weights to evaluate: the average (optim.average), where there is one.

        Validation and all readers of checkpoints (`lm.inference.load`) go through here; metrics
        and diagnostics of training are of `weights`, where its gradients are taken. What layers and
        reparametrisations carry stays that of `weights`, and not what the average would see.
        """
        if not average:
            return weights
        params = build_average(self.recipe, self.description, hyper).evaluation_weights(
            weights.params, average
        )
        return weights.replace(params=self.description.after_update(params, weights.reparam)[0])


def build_learner(recipe: Recipe, vocab_size: int, bos_id: int, platform: str) -> Learner:
    """Builds the learner of a checked recipe for devices of `platform`."""
    model = build_model(recipe, vocab_size, platform)
    return Learner(recipe, model, bos_id, describe_params(recipe, model))


def check_learner(learner: Learner) -> None:
    """Raises ValueError where an optimizer has more parameters than it serves, or where a kernel of
    these devices lacks a derivative in forward mode. Nothing is computed.
    """
    recipe, described, kernels = learner.recipe, learner.description, learner.model.kernels
    sizes, shapes = collections.Counter(), named_leaves(described.shapes)
    trained = named_leaves(described.trainable)
    for path, spec in named_leaves(described.specs).items():
        name = recipe.optimizers[optimizer_field(spec)].name
        sizes[name] += trained[path] * math.prod(shapes[path].shape)
    for part in recipe.optimizers.values():
        size, most = sizes[part.name], part.row.needs.max_parameters
        if most is not None and size > most:
            raise ValueError(
                f'{part} is for at most {most:,} parameters; got {size:,}. Make the '
                'model smaller, give it to fewer (optim.name has the hidden matrices, optim.others '
                'the rest), or choose another optimizer.'
            )
    for asker, what in recipe.forward_mode_targets.items():
        able = {
            operation: [name for name, row in OPERATIONS[operation].items() if row.is_forward_mode]
            for operation in ('rms_norm', 'softmax', 'cross_entropy')
        }
        if recipe.attention.row.has_scores:
            rows = ATTENTION_KERNELS.items()
            able['attention'] = [name for name, row in rows if what in row.forward_mode]
        for operation, names in able.items():
            if (name := kernels.kernel_name(operation)) not in names:
                raise ValueError(
                    f'{asker} differentiates the {what} in forward mode, and kernels.{operation}='
                    f'{name} has no such derivative; choose kernels.{operation}={"|".join(names)}'
                )


def init_state(learner: Learner, hyper: Hyper, key: jax.Array) -> State:
    """Draws parameters at unit scale and multiplies matrices by init_scale * init_std."""
    recipe, described = learner.recipe, learner.description
    boxes, stats = init_params(recipe, learner.model, key)
    unit, _ = split_boxes(boxes)
    stds, specs = named_leaves(described.init_stds), named_leaves(described.used_specs)

    def scale(path, weight):
        name = path_name(path)
        std = stds.get(name)  # a tree holds no None
        if std is None:
            return weight
        if specs[name].role == 'embedding':
            std = hyper.get('scaling.embedding_std', std)
        weight = recipe.init.row.arranged(specs[name], weight)
        return weight * (hyper['scaling.init_scale'] * std)

    params, reparam = described.reparam.init(jax.tree_util.tree_map_with_path(scale, unit))
    params = described.reparam.draw(params, key)
    opt_state = unbox_state(build_optimizer(recipe, described, hyper).init(params))
    average = build_average(recipe, described, hyper).init(params)
    return State(jnp.int32(0), params, reparam, stats, opt_state, average)
