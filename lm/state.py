"""What training changes (State), what it is told (Hyper), and what it knows of each parameter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from lm.config import (
    Config,
    LossConfig,
    OptimConfig,
    ScalingConfig,
    TrainConfig,
    flatten,
)
from lm.model import Transformer, build_model
from modules.optim import OPTIMIZERS
from modules.params import NORM, named_leaves, path_name, split
from modules.placements import PLACEMENTS
from modules.reparam import REPARAMS, Reparam, chain, shared
from modules.scaling import PARAMETRIZATIONS
from modules.statistics import BACKWARD_STATS, STATS


class Weights(struct.PyTreeNode):
    """What a model is run with. params: the weights stored; reparam: what their map carries;
    stats: what layers carry (`modules.statistics`), by collection; {} where none does.
    """

    params: Any
    reparam: Any
    stats: Any


class State(struct.PyTreeNode):
    """step: updates done; the rest as in Weights."""

    step: jax.Array
    params: Any
    reparam: Any
    stats: Any
    opt_state: Any

    @property
    def weights(self) -> Weights:
        return Weights(self.params, self.reparam, self.stats)


class Hyper(struct.PyTreeNode):
    """Scalars that may differ between runs of one compiled program; never branched on."""

    lr: Any
    weight_decay: Any
    z_loss: Any
    label_smoothing: Any
    balance_loss: Any
    b1: Any
    b2: Any
    eps: Any
    clip_norm: Any
    init_scale: Any
    warmup_steps: Any
    steps: Any
    decay_fraction: Any
    final_lr_fraction: Any


def _config_path(name: str) -> str:
    """'optim.lr' for 'lr': Hyper's names are the config's, and each is in one of these sections."""
    sections = {'optim': OptimConfig, 'loss': LossConfig, 'scaling': ScalingConfig}
    sections |= {'train': TrainConfig}
    (path,) = [
        f'{section}.{name}' for section, cls in sections.items() if name in cls.__dataclass_fields__
    ]
    return path


HYPER_PATHS = {field.name: _config_path(field.name) for field in dataclasses.fields(Hyper)}


def hyper_from(config: Config) -> Hyper:
    """Each field from the config, as a float32 scalar."""
    flat = flatten(config)
    return Hyper(**{name: jnp.float32(flat[path]) for name, path in HYPER_PATHS.items()})


def optimizer(config: Config, hyper: Hyper) -> optax.GradientTransformation:
    """Clipped gradients to a direction; `lm.step` scales it."""
    return optax.chain(
        optax.clip_by_global_norm(hyper.clip_norm), OPTIMIZERS[config.optim.name](hyper)
    )


# What train.trainable can be: which parameters training changes.
TRAINABLE = {'all': lambda spec: True, 'norms': lambda spec: spec.part == NORM}


@dataclasses.dataclass(frozen=True)
class Description:
    """Every stored parameter, in parallel trees: nothing is computed. `reparam` maps them to the
    weights the model uses, whose standard deviations at the start are `init_stds`. `trainable` says
    whether training changes it. used_shapes, used_specs: of those weights, before `reparam` shares
    or splits them.
    """

    shapes: Any
    specs: Any
    scalings: Any
    trainable: Any
    reparam: Reparam
    init_stds: Any
    used_shapes: Any
    used_specs: Any

    def variables(self, weights: Weights) -> dict[str, Any]:
        """What `model.apply` takes, in evaluation."""
        used, _ = self.reparam.apply(weights.params, weights.reparam, False)
        return {'params': used, **weights.stats}


def describe_params(config: Config, model: Transformer) -> Description:
    """From the model's own records (`modules.params`). ValueError where nothing is trainable."""
    drawn = jax.eval_shape(lambda: _draw(config, model, jax.random.key(0))[0])
    used, used_specs = split(drawn)
    parametrization = PARAMETRIZATIONS[config.scaling.name]
    if PLACEMENTS[config.model.placement].shared:
        one_for_all = shared(used_specs, used)
        reparam = chain(one_for_all, REPARAMS[config.model.reparam](one_for_all.specs))
    else:
        reparam = REPARAMS[config.model.reparam](used_specs)
    trainable = jax.tree.map(TRAINABLE[config.train.trainable], reparam.specs)
    if not any(jax.tree.leaves(trainable)):
        raise ValueError(
            f'train.trainable={config.train.trainable} leaves nothing to train: the norms of this '
            f'model (model.norm={config.model.norm}) have no parameters'
        )
    shapes = jax.eval_shape(lambda params: reparam.init(params)[0], used)
    return Description(
        shapes=shapes,
        specs=reparam.specs,
        scalings=jax.tree.map(lambda s, p: parametrization(p, s.shape), shapes, reparam.specs),
        trainable=trainable,
        reparam=reparam,
        init_stds=jax.tree.map(
            lambda s, spec: parametrization(spec, s.shape).init_std, used, used_specs
        ),
        used_shapes=used,
        used_specs=used_specs,
    )


def _draw(config: Config, model: Transformer, key: jax.Array) -> tuple[Any, Any]:
    """(parameters at unit scale, in their boxes; what layers carry)."""
    drawn = model.init(key, jnp.zeros((1, config.data.seq_len), jnp.int32))
    return drawn['params'], {name: drawn[name] for name in (STATS, BACKWARD_STATS) if name in drawn}


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


def build_learner(config: Config, vocab_size: int, bos_id: int, platform: str) -> Learner:
    """For devices of `platform`. `lm.check` has checked the config's names."""
    model = build_model(config, vocab_size, platform)
    return Learner(config, model, bos_id, describe_params(config, model))


def init_state(learner: Learner, hyper: Hyper, key: jax.Array) -> State:
    """Parameters drawn at unit scale, matrices multiplied by init_scale * init_std."""
    described = learner.described
    boxes, stats = _draw(learner.config, learner.model, key)
    unit, _ = split(boxes)
    stds = named_leaves(described.init_stds)

    def scale(path, weight):
        std = stds.get(path_name(path))  # a tree holds no None
        return weight if std is None else weight * (hyper.init_scale * std)

    params, reparam = described.reparam.init(jax.tree_util.tree_map_with_path(scale, unit))
    opt_state = optimizer(learner.config, hyper).init(params)
    return State(jnp.int32(0), params, reparam, stats, opt_state)
