"""The state of a run, its numbers (Hyper), and the Learner that holds all decisions about
training.
"""

import collections
import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from lm.config.fields import TrainConfig
from lm.config.groups import check_members
from lm.config.recipe import Recipe
from lm.config.resolve import flatten
from lm.model.kernels import list_attention_kernels
from lm.model.parameters import Description, describe_params, init_params
from lm.model.transformer import Transformer, build_model
from lm.training.update import build_average, build_optimizer
from modules.kernels import ATTENTION_KERNELS, OPERATIONS
from modules.numerics import DTYPES
from modules.optim import unbox_state
from modules.optim.groups import find_group
from modules.params import VALUES, named_leaves, path_name, split_boxes
from modules.recent import Recent, init_recent
from modules.statistics import at_least_float32


class Weights(struct.PyTreeNode):
    """The stored weights, with the state that belongs to them.

    reparam: state of the reparametrisation. stats: state of layers, by collection
    (`modules.statistics`).
    """

    params: Any
    reparam: Any
    stats: Any


class State(struct.PyTreeNode):
    """The arrays that training changes. Gradients are taken at `weights`.

    step: number of updates done. average: state of the weight average (`modules.optim.averages`).
    watched: the last losses and gradient norms (`lm.training.guard`); empty if no step reads them.
    """

    step: jax.Array
    params: Any
    reparam: Any
    stats: Any
    opt_state: Any
    average: Any = struct.field(default_factory=dict)
    watched: Any = struct.field(default_factory=dict)

    @property
    def weights(self) -> Weights:
        """Returns the weights at which gradients are taken."""
        return Weights(self.params, self.reparam, self.stats)


def widen_weights[Holder: (State, Weights)](holder: Holder) -> Holder:
    """Returns a state or weights with parameters of at least float32, in which steps compute."""
    return holder.replace(params=jax.tree.map(at_least_float32, holder.params))


def narrow_weights(recipe: Recipe, state: State) -> State:
    """Returns the state with its parameters in the type of `optim.weight_dtype`."""
    if recipe.optim.weight_dtype == 'float32':
        return state
    dtype = DTYPES[recipe.optim.weight_dtype]
    return state.replace(params=jax.tree.map(lambda x: x.astype(dtype), state.params))


WATCHED = ('loss', 'grad_norm')  # a step with one of them far above the last ones is a spike
SKIP_SPIKE = 'skip'  # of train.on_spike


def init_watched(train: TrainConfig) -> Recent | dict[str, Any]:
    """Returns the window of the watched metrics before the first step; {} if no step reads it."""
    if train.on_spike != SKIP_SPIKE:
        return {}
    return init_recent(train.spike_window, len(WATCHED))


Hyper = dict[str, Any]  # {'optim.lr': scalar, ...}: numbers that may differ between runs


def make_hyper(recipe: Recipe) -> Hyper:
    """Returns the numbers that programs take as float32 scalars and never branch on."""
    return {path: jnp.float32(value) for path, value in recipe.traced_values.items()}


@dataclasses.dataclass(frozen=True, eq=False)
class Learner:
    """A model and all decisions about training it. bos_id begins a document and is never a
    target.
    """

    recipe: Recipe
    model: Transformer
    bos_id: int
    description: Description

    def variables(self, weights: Weights) -> dict[str, Any]:
        """Returns the variables that `model.apply` takes in evaluation."""
        used, _ = self.description.reparam.apply(weights.params, weights.reparam, False)
        return {'params': used, **weights.stats}

    def select_eval_weights(self, weights: Weights, average: Any, hyper: Hyper) -> Weights:
        """Returns the weights to evaluate: the average (optim.average), or `weights` without one.

        Validation and all readers of checkpoints (`lm.inference.load`) use it. Metrics and
        diagnostics of training use `weights`, where gradients are taken. State that layers and
        reparametrisations carry is not averaged; it belongs to `weights`.

        Args:
          weights: the trained weights.
          average: `State.average`; empty without an average.
          hyper: the numbers of the run.

        Returns:
          The weights to evaluate, of at least float32.
        """
        weights = widen_weights(weights)
        if not average:
            return weights
        params = build_average(self.recipe, self.description, hyper).evaluation_weights(
            weights.params, average
        )
        return weights.replace(params=self.description.after_update(params, weights.reparam)[0])


def build_learner(recipe: Recipe, vocab_size: int, bos_id: int, platform: str) -> Learner:
    """Builds the learner of a checked recipe.

    Args:
      recipe: the checked recipe.
      vocab_size: tokens of the vocabulary, V.
      bos_id: the token that begins a document.
      platform: 'cpu', 'gpu' or 'tpu'.

    Returns:
      The learner, with the platform's kernels.
    """
    model = build_model(recipe, vocab_size, platform)
    return Learner(recipe, model, bos_id, describe_params(recipe, model))


def check_learner(learner: Learner) -> None:
    """Raises ValueError if an optimizer, a setting of a group or a kernel does not fit the learner.

    An optimizer may limit its number of parameters, and a kernel of these devices may lack a
    derivative in forward mode. Nothing is computed.
    """
    recipe, description, kernels = learner.recipe, learner.description, learner.model.kernels
    present = {find_group(spec) for spec in named_leaves(description.specs).values()}
    check_members(flatten(recipe), present, recipe.model.tie_embeddings)
    sizes, shapes = collections.Counter(), named_leaves(description.shapes)
    trained = named_leaves(description.trainable)
    for path, spec in named_leaves(description.specs).items():
        name = recipe.find_optimizer(spec).name
        # By name, because optim.name and optim.others may be the same optimizer. Untrained
        # parameters count 0.
        sizes[name] += trained[path] * math.prod(shapes[path].shape)
    for part in recipe.optimizers.values():
        size, max_parameters = sizes[part.name], part.row.needs.max_parameters
        if max_parameters is not None and size > max_parameters:
            raise ValueError(
                f'{part} supports at most {max_parameters:,} parameters; got {size:,}. Make the '
                'model smaller, use it for fewer parameters (optim.name trains hidden matrices, '
                'optim.others the rest), or choose another optimizer.'
            )
    for asker, what in recipe.forward_mode_targets.items():
        names_by_operation = {
            operation: [name for name, row in OPERATIONS[operation].items() if row.is_forward_mode]
            for operation in ('rms_norm', 'softmax', 'cross_entropy')
        }
        rows = ATTENTION_KERNELS.items()
        chosen = [(operation, kernels.kernel_name(operation)) for operation in names_by_operation]
        names_by_operation['attention'] = [name for name, row in rows if what in row.forward_mode]
        chosen += [('attention', n) for n in list_attention_kernels(recipe, kernels).values()]
        for operation, name in chosen:
            names = names_by_operation[operation]
            if name not in names:
                raise ValueError(
                    f'{asker} needs a forward-mode derivative of the {what}, which '
                    f'kernels.{operation}={name} does not have. Choose '
                    f'kernels.{operation}={"|".join(names)}.'
                )


def init_state(learner: Learner, hyper: Hyper, key: jax.Array) -> State:
    """Draws parameters at unit scale and multiplies matrices by init_scale * init_std.

    Args:
      learner: describes the parameters.
      hyper: the numbers of the run.
      key: random key.

    Returns:
      The state before the first step.
    """
    recipe, description = learner.recipe, learner.description
    boxes, stats = init_params(recipe, learner.model, key)
    unit_params, _ = split_boxes(boxes)
    stds, specs = named_leaves(description.init_stds), named_leaves(description.used_specs)

    def scale(path, weight):
        name = path_name(path)
        std = stds.get(name)  # None is missing from the leaves of a tree
        if std is None:
            return weight
        # embedding_std may differ between the runs of a program, so it is traced, and the static
        # description cannot hold it.
        if specs[name].role == 'embedding' and specs[name].part != VALUES:
            std = hyper.get('scaling.embedding_std', std)
        weight = recipe.init.row.arrange(specs[name], weight)
        return weight * (hyper['scaling.init_scale'] * std)

    params, reparam = description.reparam.init(jax.tree_util.tree_map_with_path(scale, unit_params))
    params = description.reparam.draw(params, key)
    opt_state = unbox_state(build_optimizer(recipe, description, hyper).init(params))
    average = build_average(recipe, description, hyper).init(params)
    watched = init_watched(recipe.train)
    state = State(jnp.int32(0), params, reparam, stats, opt_state, average, watched)
    return narrow_weights(recipe, state)
