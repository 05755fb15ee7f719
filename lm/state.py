"""What training changes (State), its numbers (Hyper), and what it knows of each parameter."""

import dataclasses
import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from lm.config import FIELDS, Config, Part, flatten, given, part_at, parts_of, readers_of
from lm.model import Transformer, build_model
from modules.optim import Average, by_role, unboxed
from modules.options import options
from modules.params import NORM, ParamSpec, named_leaves, path_name, split
from modules.reparam import Reparam, chain, multiplied, reparametrise
from modules.scaling import growth_of
from modules.statistics import BACKWARD_STATS, STATS


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


def hyper_from(config: Config) -> Hyper:
    """The traced options of the config and of the parts it has chosen, as float32 scalars.

    Programs take them as data and never branch on them. What is None is none: an option whose parts
    have different defaults, or what is not asked for.
    """
    readers, flat = readers_of(config), flatten(config)
    return {
        path: jnp.float32(flat[path])
        for path, field in FIELDS.items()
        if field.option and field.option.traced and (not field.of_parts or path in readers)
        if flat[path] is not None
    }


def numbers(config: Config, part: Part, hyper: Hyper) -> dict[str, Any]:
    """The options of a part: from `hyper` those that are traced, the rest as given."""
    paths = {name: f'{part.section}.{name}' for name in options(part.row)}
    traced = {name: hyper[path] for name, path in paths.items() if path in hyper}
    return given(config, part) | traced


def schedule_fraction(config: Config, step: jax.Array, hyper: Hyper) -> jax.Array:
    """What the schedule makes of the peak at `step`, from 0."""
    schedule = part_at(config, 'optim.schedule')
    return schedule.row(step, hyper['train.steps'], **numbers(config, schedule, hyper))


def optimizer_of(spec: ParamSpec) -> str:
    """The field that names the optimizer of a parameter."""
    return 'optim.name' if spec.role == 'hidden' else 'optim.others'


def peaks_of(rates: Mapping[str, Any]) -> dict[str, Any]:
    """The peak learning rate of each optimizer, by the field that names it, from what `rates` (a
    Hyper, or a flattened config) has as optim.lr and, where it is given, as optim.others_lr.
    """
    others = rates.get('optim.others_lr')
    lr = rates['optim.lr']
    return {'optim.name': lr, 'optim.others': lr if others is None else others}


def optimizer(
    config: Config, described: 'Description', hyper: Hyper
) -> optax.GradientTransformationExtraArgs:
    """Clipped gradients to a direction, in the same units for all; `lm.updates` scales it.

    An epsilon f times as large for a parameter is a gradient 1 / f times as large: a direction in
    which epsilon is compared with the gradient does not change otherwise.
    """

    def row(path):
        part = part_at(config, path)
        return functools.partial(part.row, **numbers(config, part, hyper))

    if config.optim.name == config.optim.others:
        chosen = row('optim.name')(described.specs)
    else:
        chosen = by_role(described.specs, row('optim.others'), hidden=row('optim.name'))
    factors = jax.tree.map(lambda scaling: scaling.eps_factor, described.scalings)
    stages = [optax.clip_by_global_norm(hyper['optim.clip_norm'])]
    if any(factor != 1.0 for factor in jax.tree.leaves(factors)):
        divide = optax.stateless(
            lambda grads, _: jax.tree.map(lambda g, factor: g / factor, grads, factors)
        )
        stages.append(divide)
    return optax.with_extra_args_support(optax.chain(*stages, chosen))


def average_of(config: Config, hyper: Hyper) -> Average:
    """What is averaged of the stored weights, with its numbers."""
    part = part_at(config, 'optim.average')
    return part.row(**numbers(config, part, hyper))


# What train.trainable can be: which parameters training changes.
TRAINABLE = {'all': lambda spec: True, 'norms': lambda spec: spec.part == NORM}


@dataclasses.dataclass(frozen=True)
class Description:
    """Every stored parameter, in parallel trees: nothing is computed. `reparam` maps them to the
    weights that the model uses, which `used_shapes` and `used_specs` describe and whose standard
    deviations at the start are `init_stds`. `trainable` says whether training changes it.
    """

    used_shapes: Any
    used_specs: Any
    shapes: Any
    specs: Any
    scalings: Any
    growths: Any
    trainable: Any
    reparam: Reparam
    init_stds: Any

    def variables(self, weights: Weights) -> dict[str, Any]:
        """What `model.apply` takes, in evaluation."""
        used, _ = self.reparam.apply(weights.params, weights.reparam, False)
        return {'params': used, **weights.stats}

    def after_update(self, params: Any, reparam: Any) -> tuple[Any, Any]:
        """The map of the reparametrisation after an update, but for what is not trained."""
        mapped, reparam = self.reparam.after_update(params, reparam)
        params = jax.tree.map(
            lambda new, old, trained: new if trained else old, mapped, params, self.trainable
        )
        return params, reparam


def describe_params(config: Config, model: Transformer) -> Description:
    """From the model's own records (`modules.params`). ValueError where nothing is trainable."""
    initial = jax.eval_shape(lambda: _initial(config, model, jax.random.key(0))[0])
    used, used_specs = split(initial)
    parametrization = part_at(config, 'scaling.name').row

    def scale(shapes, specs):
        # No parametrisation has a base model yet: a parameter has grown from itself.
        growths = jax.tree.map(lambda s, spec: growth_of(spec, s.shape, s.shape), shapes, specs)
        scalings = jax.tree.map(
            lambda s, spec, growth: parametrization(
                spec, s.shape, growth, part_at(config, optimizer_of(spec)).row.family
            ),
            shapes,
            specs,
            growths,
        )
        return growths, scalings

    _, used_scalings = scale(used, used_specs)
    rows = [part for part in parts_of(config) if part.path == 'model.reparam']
    chosen = {part.name: given(config, part) for part in rows}
    reparam = reparametrise(list(chosen), used_specs, used, chosen)
    factors = jax.tree.map(lambda scaling: scaling.forward_factor, used_scalings)
    if any(factor != 1.0 for factor in jax.tree.leaves(factors)):
        reparam = chain(multiplied(used_specs, factors), reparam)
    trainable = jax.tree.map(TRAINABLE[config.train.trainable], reparam.specs)
    if not any(jax.tree.leaves(trainable)):
        raise ValueError(
            f'train.trainable={config.train.trainable} leaves nothing to train: the norms of this '
            f'model (model.norm={config.model.norm}) have no parameters'
        )
    shapes = jax.eval_shape(lambda params: reparam.init(params)[0], used)
    growths, scalings = scale(shapes, reparam.specs)
    return Description(
        used_shapes=used,
        used_specs=used_specs,
        shapes=shapes,
        specs=reparam.specs,
        scalings=scalings,
        growths=growths,
        trainable=trainable,
        reparam=reparam,
        init_stds=jax.tree.map(
            lambda scaling: (
                None if scaling.init_std is None else scaling.init_std * scaling.forward_factor
            ),
            used_scalings,
        ),
    )


def _initial(config: Config, model: Transformer, key: jax.Array) -> tuple[Any, Any]:
    """(parameters at unit scale, in their boxes; what layers carry)."""
    found = model.init(key, jnp.zeros((1, config.data.seq_len), jnp.int32))
    return found['params'], {name: found[name] for name in (STATS, BACKWARD_STATS) if name in found}


@dataclasses.dataclass(frozen=True)
class Learner:
    """A model and all that is decided about training it; nothing here is an array.

    bos_id: the token that begins a document and is no target.
    """

    config: Config
    model: Transformer
    bos_id: int
    described: Description

    def variables(self, weights: Weights) -> dict[str, Any]:
        """What `model.apply` takes, in evaluation."""
        return self.described.variables(weights)

    def evaluated(self, weights: Weights, average: Any, hyper: Hyper) -> Weights:
        """The weights that stand for a model that has trained to `weights`: those of its average
        (optim.average), where there is one.

        All that evaluates goes through here: validation, and whatever reads a checkpoint
        (`lm.record.load`), so also the best one, generation, folding and train.init_from. The
        diagnostics of training, its loss among them, are of `weights`, where its gradients are
        taken. What layers and reparametrisations carry is that of `weights` too: statistics of
        activations are those seen on the way, not those that the average would see.
        """
        if not average:
            return weights
        params = average_of(self.config, hyper).averaged(weights.params, average)
        return weights.replace(params=self.described.after_update(params, weights.reparam)[0])


def build_learner(config: Config, vocab_size: int, bos_id: int, platform: str) -> Learner:
    """For devices of `platform`. `lm.check` has checked the config's names."""
    model = build_model(config, vocab_size, platform)
    return Learner(config, model, bos_id, describe_params(config, model))


def init_state(learner: Learner, hyper: Hyper, key: jax.Array) -> State:
    """Parameters drawn at unit scale, matrices multiplied by init_scale * init_std."""
    described = learner.described
    boxes, stats = _initial(learner.config, learner.model, key)
    unit, _ = split(boxes)
    stds = named_leaves(described.init_stds)

    def scale(path, weight):
        std = stds.get(path_name(path))  # a tree holds no None
        return weight if std is None else weight * (hyper['scaling.init_scale'] * std)

    params, reparam = described.reparam.init(jax.tree_util.tree_map_with_path(scale, unit))
    opt_state = unboxed(optimizer(learner.config, described, hyper).init(params))
    average = average_of(learner.config, hyper).init(params)
    return State(jnp.int32(0), params, reparam, stats, opt_state, average)
