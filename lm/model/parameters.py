"""Describes parameters before they exist: shape, role, scale and learning-rate factor of each."""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp

from lm.config.groups import WEIGHT_DECAY, has_setting
from lm.config.recipe import Recipe
from lm.config.resolve import flatten
from lm.model.base_size import base_depth, width_growth
from lm.model.transformer import Transformer
from modules.params import LORA, NORM, ParamSpec, named_leaves, path_name, split_boxes
from modules.reparam import Reparam, chain, multiply_weights, reparametrise
from modules.scaling import compute_growth, compute_scaling, one_channel_shape
from modules.statistics import BACKWARD_STATS, STATS

QUERY = 'query'  # the matrix's name in modules/attention/base.py


def norm_mask(specs: Any, used: Any) -> Any:
    """Returns a tree of bools: whether each parameter belongs to a norm."""
    return jax.tree.map(lambda spec: spec.part == NORM, specs)


def lora_mask(specs: Any, used: Any) -> Any:
    """Returns a tree of bools: whether each parameter belongs to an adapter.

    These are the factors of lora, and the gains that another reparametrisation has for the same
    matrix, such as DoRA's magnitudes.
    """
    weights = named_leaves(used).keys()
    paths = [path for path, spec in named_leaves(specs).items() if spec.part == LORA]
    adapted = {weight for weight in weights if any(p.startswith(f'{weight}/') for p in paths)}

    def is_trained(path, spec):
        is_gain = spec.role == 'vector' and path_name(path).rpartition('/')[0] in adapted
        return spec.part == LORA or is_gain

    return jax.tree_util.tree_map_with_path(is_trained, specs)


# Choices of train.trainable: (stored specs, used specs) -> whether each parameter is trained.
TRAINABLE = {
    'all': lambda specs, used: jax.tree.map(lambda spec: not spec.frozen, specs),
    'norms': norm_mask,
    LORA: lora_mask,
}
# The error's text if a choice leaves nothing to train, formatted with the model config.
NOTHING_TRAINABLE = {
    'norms': 'the norms of this model (model.norm={0.norm}) have no parameters',
    LORA: (
        'model.reparam={0.reparam} does not include lora. Add --config.model.reparam=lora, or '
        'weight_norm+lora for DoRA.'
    ),
}


@dataclasses.dataclass(frozen=True)
class Description:
    """Describes every stored parameter, in parallel trees without arrays.

    used_shapes, used_specs, init_stds: the weights that the model uses, and their standard
    deviations at the start. reparam: the map from stored to used weights. trainable: whether
    training changes a parameter. stats: shapes of the collections that layers carry beside the
    parameters.
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
        """Applies the reparametrisation's map after an update to the trained parameters."""
        mapped, reparam = self.reparam.after_update(params, reparam)
        trained = jax.tree.map(
            lambda after, before, is_trained: after if is_trained else before,
            mapped,
            params,
            self.trainable,
        )
        return trained, reparam


def describe_params(recipe: Recipe, model: Transformer) -> Description:
    """Describes the parameters of a model from the declarations of its layers (`modules.params`).

    Raises ValueError if nothing is trainable, or if the parametrisation has no rule for a matrix.
    """
    used_shapes, used_specs, stats = _abstract_params(recipe, model)
    used_base_shapes = _base_shapes(recipe, model, used_shapes, used_specs)
    options_by_name = {part.name: part.options for part in recipe.reparam}

    _, used_scalings = _compute_scalings(recipe, used_specs, used_shapes, used_base_shapes)
    reparam = reparametrise(list(options_by_name), used_specs, used_shapes, options_by_name)
    shapes, base_shapes = (
        jax.eval_shape(lambda params: reparam.init(params)[0], weights)
        for weights in (used_shapes, used_base_shapes)
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
        used_shapes=used_shapes,
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
    """Returns (shapes, specs, stats): weights of a model, and collections that its layers carry."""
    key = jax.random.key(0)
    boxes, stats = jax.eval_shape(lambda: init_params(recipe, model, key))
    return *split_boxes(boxes), stats


def _base_shapes(recipe: Recipe, model: Transformer, shapes: Any, specs: Any) -> Any:
    """Returns the shapes in the base model, or `shapes` if there is no base model."""
    if recipe.scaling.row.is_absolute:
        return jax.tree.map(
            lambda s, spec: s.update(shape=one_channel_shape(spec, s.shape)), shapes, specs
        )
    if recipe.config.scaling.base_width is None:
        return shapes
    base = recipe.base
    return _abstract_params(base, Transformer(base, model.vocab_size, model.kernels))[0]


def _compute_scalings(recipe: Recipe, specs: Any, shapes: Any, base_shapes: Any) -> tuple[Any, Any]:
    """Returns (growths, scalings) of each parameter. Raises ValueError if one has no rule."""
    part, blocks, flat = recipe.scaling, recipe.model.n_layers, flatten(recipe)
    growth_factors = blocks / base_depth(recipe), width_growth(recipe)
    growths = jax.tree.map(
        lambda spec, s, base: compute_growth(spec, s.shape, base.shape, *growth_factors),
        specs,
        shapes,
        base_shapes,
    )

    def scale(path, spec, shape, base, growth):
        optimizer, family = recipe.find_optimizer(spec), recipe.find_family(spec)
        if has_setting(flat, spec, WEIGHT_DECAY):  # vectors decay too, if their group asks for it
            spec = dataclasses.replace(spec, decayed=True)
        if family == 'spectral' and growth.fan_in != growth.fan_out:
            subject = f'{path_name(path)}, because only one of its sides grows,'
            advice = 'Choose another optimizer, or a model without such matrices.'
            if spec.part == LORA:
                subject = (
                    f'the factors of model.reparam={recipe.model.reparam} ({path_name(path)}), '
                )
                subject += 'because reparam.rank does not grow,'
                advice = f'Choose another {optimizer.path}, or scaling.name=standard.'
            raise ValueError(
                f'{part} has no rule for {subject} with {optimizer}, whose updates have equal '
                f'singular values. {advice}'
            )
        return compute_scaling(
            part.row,
            recipe.init.row,
            spec,
            (shape.shape, base.shape),
            (blocks, base_depth(recipe)),
            growth,
            family,
            **part.options,
        )

    return growths, jax.tree_util.tree_map_with_path(scale, specs, shapes, base_shapes, growths)


def is_zero_init(recipe: Recipe, path: str, spec: ParamSpec) -> bool:
    """Whether a matrix starts at zero (`Recipe.zero_starts`).

    Args:
      recipe: names the roles that start at zero.
      path: path of the parameter, by which queries are recognised.
      spec: the parameter's spec.
    """
    name = QUERY if path.split('/')[-1] == QUERY else spec.role
    return name in recipe.zero_starts


def init_params(recipe: Recipe, model: Transformer, key: jax.Array) -> tuple[Any, Any]:
    """Initialises parameters.

    Args:
      recipe: gives the sequence length.
      model: the Linen module.
      key: random key.

    Returns:
      (boxed parameters at unit scale, the collections that layers carry).
    """
    tokens_1T = jnp.zeros((1, recipe.data.seq_len), jnp.int32)
    variables = model.init(key, tokens_1T, method='activations')  # logits make no parameters
    stats = {name: variables[name] for name in (STATS, BACKWARD_STATS) if name in variables}
    return variables['params'], stats
