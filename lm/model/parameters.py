"""Parameters before they exist: the shape, role, scale and learning-rate factor of each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lm.config.recipe import Recipe
from lm.model.base_size import base_depth, width_growth
from lm.model.transformer import Transformer
from modules.params import LORA, NORM, ParamSpec, named_leaves, path_name, split_boxes
from modules.reparam import Reparam, chain, multiply_weights, reparametrise
from modules.scaling import compute_growth, compute_scaling, one_channel_shape
from modules.statistics import BACKWARD_STATS, STATS

QUERY = 'query'  # the name of its matrix in modules/attention/base.py


def norm_mask(specs: Any, used: Any) -> Any:
    """Returns whether each parameter is a norm's."""
    return jax.tree.map(lambda spec: spec.part == NORM, specs)


def lora_mask(specs: Any, used: Any) -> Any:
    """Returns whether each parameter is a factor of lora, or a gain that another reparametrisation
    has for the same matrix, such as DoRA's magnitudes.
    """
    weights = named_leaves(used).keys()
    paths = [path for path, spec in named_leaves(specs).items() if spec.part == LORA]
    adapted = {weight for weight in weights if any(p.startswith(f'{weight}/') for p in paths)}

    def is_trained(path, spec):
        is_gain = spec.role == 'vector' and path_name(path).rpartition('/')[0] in adapted
        return spec.part == LORA or is_gain

    return jax.tree_util.tree_map_with_path(is_trained, specs)


# What train.trainable can be: (stored specs, used specs) -> which parameters training changes.
TRAINABLE = {
    'all': lambda specs, used: jax.tree.map(lambda spec: not spec.frozen, specs),
    'norms': norm_mask,
    LORA: lora_mask,
}
NOTHING_TRAINABLE = {
    'norms': 'the norms of this model (model.norm={0.norm}) have no parameters',
    LORA: 'model.reparam={0.reparam} has no lora; add --config.model.reparam=lora, or '
    'weight_norm+lora for DoRA',
}


@dataclasses.dataclass(frozen=True)
class Description:
    """Descriptions of every stored parameter, in parallel trees without arrays.

    reparam: the map to the weights that the model uses. used_shapes, used_specs, init_stds: those
    weights, and their standard deviations at the start. trainable: whether training changes it.
    stats: the shapes of what layers carry beside the parameters, by collection.
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
    stats: Any

    def after_update(self, params: Any, reparam: Any) -> tuple[Any, Any]:
        """Applies the map of the reparametrisation after an update to what is trained."""
        mapped, reparam = self.reparam.after_update(params, reparam)
        kept = jax.tree.map(lambda new, old, t: new if t else old, mapped, params, self.trainable)
        return kept, reparam


def describe_params(recipe: Recipe, model: Transformer) -> Description:
    """Describes the parameters of a model from the records of its layers (`modules.params`).

    Raises ValueError where nothing is trainable, or a matrix has no rule of the parametrisation.
    """
    used, used_specs, stats = _abstract_params(recipe, model)
    base = _base_shapes(recipe, model, used, used_specs)
    chosen = {part.name: part.options for part in recipe.reparam}

    _, used_scalings = _compute_scalings(recipe, used_specs, used, base)
    reparam = reparametrise(list(chosen), used_specs, used, chosen)
    shapes, base_shapes = (
        jax.eval_shape(lambda params: reparam.init(params)[0], weights) for weights in (used, base)
    )
    factors = jax.tree.map(lambda scaling: scaling.forward_factor, used_scalings)
    if any(factor != 1.0 for factor in jax.tree.leaves(factors)):
        reparam = chain(multiply_weights(used_specs, factors), reparam)
    trainable = TRAINABLE[recipe.train.trainable](reparam.specs, used_specs)
    if not any(jax.tree.leaves(trainable)):
        raise ValueError(
            f'train.trainable={recipe.train.trainable} leaves nothing to train: '
            + NOTHING_TRAINABLE[recipe.train.trainable].format(recipe.model)
        )
    growths, scalings = _compute_scalings(recipe, reparam.specs, shapes, base_shapes)

    def initial_std(path, spec, scaling):
        if scaling.init_std is None:
            return None
        std = scaling.init_std * scaling.forward_factor
        return std * (not is_zero_init(recipe, path_name(path), spec))

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
        stats=stats,
    )


def _abstract_params(recipe: Recipe, model: Transformer) -> tuple[Any, Any, Any]:
    """Returns (shapes, specs) of the weights that a model uses, and the shapes of what its layers
    carry.
    """
    key = jax.random.key(0)
    boxes, stats = jax.eval_shape(lambda: init_params(recipe, model, key))
    return *split_boxes(boxes), stats


def _base_shapes(recipe: Recipe, model: Transformer, shapes: Any, specs: Any) -> Any:
    """Returns the shapes in the base model; `shapes` themselves where there is none."""
    if recipe.scaling.row.against_one:
        return jax.tree.map(
            lambda s, spec: s.update(shape=one_channel_shape(spec, s.shape)), shapes, specs
        )
    if recipe.config.scaling.base_width is None:
        return shapes
    base = recipe.base
    return _abstract_params(base, Transformer(base, model.vocab_size, model.kernels))[0]


def _compute_scalings(recipe: Recipe, specs: Any, shapes: Any, base_shapes: Any) -> tuple[Any, Any]:
    """Returns (growths, scalings) of each parameter. Raises ValueError for one without a rule."""
    part, blocks = recipe.scaling, recipe.model.n_layers
    larger = blocks / base_depth(recipe), width_growth(recipe)
    growths = jax.tree.map(
        lambda spec, s, base: compute_growth(spec, s.shape, base.shape, *larger),
        specs,
        shapes,
        base_shapes,
    )

    def scale(path, spec, shape, base, growth):
        chosen = recipe.optimizers[optimizer_field(spec)]
        if chosen.row.family == 'spectral' and growth.fan_in != growth.fan_out:
            what = f'{path_name(path)}, of which one side alone grows'
            instead = 'Choose another optimizer, or a model without such matrices.'
            if spec.part == LORA:
                what = f'the factors of model.reparam={recipe.model.reparam} ({path_name(path)}): '
                what += 'one of their sides is reparam.rank, which does not grow'
                instead = f'Choose another {optimizer_field(spec)}, or scaling.name=standard.'
            raise ValueError(
                f'{part} has no rule for {what}, with {chosen}, whose updates have singular values '
                f'of one size. {instead}'
            )
        return compute_scaling(
            part.row,
            recipe.init.row,
            spec,
            (shape.shape, base.shape),
            (blocks, base_depth(recipe)),
            growth,
            chosen.row.family,
            **part.options,
        )

    return growths, jax.tree_util.tree_map_with_path(scale, specs, shapes, base_shapes, growths)


def is_zero_init(recipe: Recipe, path: str, spec: ParamSpec) -> bool:
    """Whether this matrix is one of `Recipe.zero_starts`."""
    name = QUERY if path.split('/')[-1] == QUERY else spec.role
    return name in recipe.zero_starts


def init_params(recipe: Recipe, model: Transformer, key: jax.Array) -> tuple[Any, Any]:
    """Returns (boxed parameters at unit scale, the collections that layers carry)."""
    tokens_1T = jnp.zeros((1, recipe.data.seq_len), jnp.int32)
    variables = model.init(key, tokens_1T, method='activations')  # logits make no parameters
    stats = {name: variables[name] for name in (STATS, BACKWARD_STATS) if name in variables}
    return variables['params'], stats


def optimizer_field(spec: ParamSpec) -> str:
    """Returns the field that names the optimizer of a parameter."""
    return 'optim.name' if spec.role == 'hidden' else 'optim.others'
