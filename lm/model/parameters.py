"""What training knows of each parameter before there is one: its role, its scale, its rates."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lm.config.recipe import Recipe
from lm.model.base_model import against_one, base_blocks, base_of, width_growth
from lm.model.transformer import Transformer
from modules.params import NORM, ParamSpec, path_name, split
from modules.reparam import Reparam, chain, multiplied, reparametrise
from modules.scaling import growth_of, of_one_channel, scaling_of
from modules.statistics import BACKWARD_STATS, STATS

QUERY = 'query'  # the name of its matrix in modules/attention/base.py

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

    def after_update(self, params: Any, reparam: Any) -> tuple[Any, Any]:
        """The map of the reparametrisation after an update, but for what is not trained."""
        mapped, reparam = self.reparam.after_update(params, reparam)
        params = jax.tree.map(
            lambda new, old, trained: new if trained else old, mapped, params, self.trainable
        )
        return params, reparam


def describe_params(recipe: Recipe, model: Transformer) -> Description:
    """From the model's own records (`modules.params`). ValueError where nothing is trainable."""
    initial = jax.eval_shape(lambda: initial_parameters(recipe, model, jax.random.key(0))[0])
    used, used_specs = split(initial)
    base = shapes_in_base(recipe, model, used, used_specs)
    chosen = {part.name: part.options for part in recipe.reparam}

    def mapped(shapes):
        reparam = reparametrise(list(chosen), used_specs, shapes, chosen)
        return reparam, jax.eval_shape(lambda params: reparam.init(params)[0], shapes)

    _, used_scalings = scaled(recipe, used_specs, used, base)
    reparam, shapes = mapped(used)
    _, base_shapes = mapped(base)
    factors = jax.tree.map(lambda scaling: scaling.forward_factor, used_scalings)
    if any(factor != 1.0 for factor in jax.tree.leaves(factors)):
        reparam = chain(multiplied(used_specs, factors), reparam)
    trainable = jax.tree.map(TRAINABLE[recipe.train.trainable], reparam.specs)
    if not any(jax.tree.leaves(trainable)):
        raise ValueError(
            f'train.trainable={recipe.train.trainable} leaves nothing to train: the norms of this '
            f'model (model.norm={recipe.model.norm}) have no parameters'
        )
    growths, scalings = scaled(recipe, reparam.specs, shapes, base_shapes)

    def initial_std(path, spec, scaling):
        if scaling.init_std is None:
            return None
        std = scaling.init_std * scaling.forward_factor
        return std * (not starts_at_0(recipe, path_name(path), spec))

    return Description(
        used_shapes=used,
        used_specs=used_specs,
        shapes=shapes,
        specs=reparam.specs,
        scalings=scalings,
        growths=growths,
        trainable=trainable,
        reparam=reparam,
        init_stds=jax.tree_util.tree_map_with_path(initial_std, used_specs, used_scalings),
    )


def shapes_in_base(recipe: Recipe, model: Transformer, shapes: Any, specs: Any) -> Any:
    """Of the parameters in the base model; `shapes` themselves where there is none."""
    if against_one(recipe):
        return jax.tree.map(
            lambda s, spec: jax.ShapeDtypeStruct(of_one_channel(spec, s.shape), s.dtype),
            shapes,
            specs,
        )
    if recipe.config.scaling.base_width is None:
        return shapes
    small = Transformer(base_of(recipe), model.vocab_size, model.kernels)
    initial = jax.eval_shape(lambda: initial_parameters(small.recipe, small, jax.random.key(0))[0])
    return split(initial)[0]


def scaled(recipe: Recipe, specs: Any, shapes: Any, base_shapes: Any) -> tuple[Any, Any]:
    """(growths, scalings): what the parametrisation makes of each parameter.

    ValueError for a matrix that it has no rule for, with the optimizer it is given to.
    """
    part, blocks = recipe.scaling, recipe.model.n_layers
    deeper, wider = blocks / base_blocks(recipe), width_growth(recipe)
    growths = jax.tree.map(
        lambda s, base, spec: growth_of(spec, s.shape, base.shape, deeper, wider),
        shapes,
        base_shapes,
        specs,
    )

    def scale(path, spec, shape, base, growth):
        chosen = recipe.optimizers[optimizer_of(spec)]
        if chosen.row.family == 'spectral' and growth.fan_in != growth.fan_out:
            raise ValueError(
                f'{part} has no rule for {path_name(path)}, of which one side '
                f'alone grows, with {chosen}, whose updates have singular '
                'values of one size. Choose another optimizer, or a model without such matrices.'
            )
        return scaling_of(
            part.row,
            recipe.init.row,
            spec,
            (shape.shape, base.shape),
            (blocks, base_blocks(recipe)),
            growth,
            chosen.row.family,
            **part.options,
        )

    scalings = jax.tree_util.tree_map_with_path(scale, specs, shapes, base_shapes, growths)
    return growths, scalings


def starts_at_0(recipe: Recipe, path: str, spec: ParamSpec) -> bool:
    """Whether scaling.zero_init, or the parametrisation, has this matrix begin at 0."""
    asked = {recipe.config.scaling.zero_init, *recipe.scaling.row.zero}
    if path.split('/')[-1] == QUERY:
        return bool(asked & {'query', 'both'})
    return spec.role == 'readout' and bool(asked & {'readout', 'both'})


def initial_parameters(recipe: Recipe, model: Transformer, key: jax.Array) -> tuple[Any, Any]:
    """(parameters at unit scale, in their boxes; what layers carry)."""
    found = model.init(key, jnp.zeros((1, recipe.data.seq_len), jnp.int32))
    return found['params'], {name: found[name] for name in (STATS, BACKWARD_STATS) if name in found}


def optimizer_of(spec: ParamSpec) -> str:
    """The field that names the optimizer of a parameter."""
    return 'optim.name' if spec.role == 'hidden' else 'optim.others'
