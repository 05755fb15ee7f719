"""What training changes (State), what it is told (Hyper), and what it knows of each parameter."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import optax
from flax import struct

from lm.config import Config
from lm.model import Transformer
from modules.optim import OPTIMIZERS
from modules.params import split
from modules.scaling import PARAMETRIZATIONS


class State(struct.PyTreeNode):
    """step counts the updates done; params and opt_state are plain trees."""

    step: jax.Array
    params: Any
    opt_state: Any


class Hyper(struct.PyTreeNode):
    """Scalars that may differ between runs of one compiled program; never branched on."""

    lr: Any
    weight_decay: Any
    z_loss: Any
    label_smoothing: Any
    b1: Any
    b2: Any
    eps: Any
    clip_norm: Any
    init_scale: Any
    warmup_steps: Any
    steps: Any
    decay_fraction: Any
    final_lr_fraction: Any


def hyper_from(config: Config) -> Hyper:
    """Each field from the config section that has it, as a float32 scalar."""
    sections = (config.optim, config.loss, config.scaling, config.train)
    values = {}
    for field in dataclasses.fields(Hyper):
        (section,) = [s for s in sections if hasattr(s, field.name)]
        values[field.name] = jnp.float32(getattr(section, field.name))
    return Hyper(**values)


def optimizer(config: Config, hyper: Hyper) -> optax.GradientTransformation:
    """Clipped gradients to a direction; `lm.step` scales it."""
    return optax.chain(
        optax.clip_by_global_norm(hyper.clip_norm), OPTIMIZERS[config.optim.name](hyper)
    )


def describe_params(config: Config, model: Transformer) -> tuple[Any, Any, Any]:
    """(shapes, specs, scalings) of every parameter: three parallel trees, nothing computed."""
    tokens = jax.ShapeDtypeStruct((1, config.data.seq_len), jnp.int32)
    described = jax.eval_shape(model.init, jax.random.key(0), tokens)['params']
    shapes, specs = split(described)
    parametrization = PARAMETRIZATIONS[config.scaling.name]
    scalings = jax.tree.map(lambda s, spec: parametrization(spec, s.shape), shapes, specs)
    return shapes, specs, scalings


def init_params(config: Config, model: Transformer, hyper: Hyper, key: jax.Array) -> Any:
    """Parameters drawn at unit scale, matrices multiplied by init_scale * init_std."""
    tokens = jnp.zeros((1, config.data.seq_len), jnp.int32)
    params, _ = split(model.init(key, tokens)['params'])
    _, _, scalings = describe_params(config, model)

    def scale(unit, scaling):
        if scaling.init_std is None:
            return unit
        return unit * (hyper.init_scale * scaling.init_std)

    return jax.tree.map(scale, params, scalings)


def init_state(config: Config, model: Transformer, hyper: Hyper, key: jax.Array) -> State:
    params = init_params(config, model, hyper, key)
    return State(jnp.int32(0), params, optimizer(config, hyper).init(params))
