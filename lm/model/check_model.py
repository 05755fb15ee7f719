"""What can be wrong with the model that a recipe describes, where it concerns several parts."""

import dataclasses

from lm.config.recipe import Recipe
from lm.config.resolve import flatten
from lm.model.base_model import base_head_dim
from lm.model.objectives import check_objectives
from modules.attention import ATTENTIONS
from modules.choices import nearest_divisor
from modules.kernels.attention import ATTENTION_KERNELS, Scores, refuse_unserved
from modules.norms import NORMS


def check_model(recipe: Recipe) -> None:
    """ValueError for the first fields of the model that do not fit each other."""
    _check_heads(recipe)
    _check_attention(recipe)
    check_objectives(recipe)
    _check_rms_norm(recipe)
    _check_softmax(recipe)
    _check_placement(recipe)


def _check_heads(recipe: Recipe) -> None:
    model = recipe.model
    if model.d_model % model.n_heads:
        near = nearest_divisor(model.d_model, model.n_heads)
        raise ValueError(
            f'model.n_heads must divide model.d_model; got {model.n_heads} heads for a width of '
            f'{model.d_model}. Nearest that works: {near}.'
        )
    if model.n_heads % model.n_kv_heads:
        near = nearest_divisor(model.n_heads, model.n_kv_heads)
        raise ValueError(
            f'model.n_kv_heads must divide model.n_heads; got {model.n_kv_heads} for '
            f'{model.n_heads} heads. Nearest that works: {near}.'
        )


def _check_attention(recipe: Recipe) -> None:
    """ValueError where positions or the kernel asked for do not go with the attention layer."""
    layer, position = recipe.attention, recipe.position
    if position.row.slopes and not layer.row.takes_slopes:
        able = [name for name, row in ATTENTIONS.items() if row.takes_slopes]
        raise ValueError(
            f'{position} adds to the logits of softmax attention, and {layer} has none. Choose '
            f'model.attention={"|".join(able)}, or another position.'
        )
    scores = scores_of(recipe)
    if scores is not None and any(part.row.has_prefix for part in recipe.objectives):
        scores = dataclasses.replace(scores, prefix=True)
    unused = 'attention' if scores is None else 'linear_attention'
    if unused in recipe.kernels:
        raise ValueError(
            f'{recipe.kernels[unused]} would change nothing: {layer} has another kind of kernel. '
            'Leave it out.'
        )
    name = named_kernel(recipe)
    if scores is not None and name is not None:
        refuse_unserved(name, scores, recipe.model.dtype, recipe.head_dim)


def _check_softmax(recipe: Recipe) -> None:
    softmax, name = recipe.kernels.get('softmax'), named_kernel(recipe)
    is_dense = name is not None and ATTENTION_KERNELS[name].holds_scores
    is_dense = is_dense and recipe.attention.row.has_scores
    if softmax and not is_dense and 'n_experts' not in recipe.mlp.options:
        raise ValueError(
            f'{softmax} would change nothing: it is of attention that has all of its scores at '
            'once, kernels.attention=reference, and of routers, model.mlp=moe. Leave it out.'
        )


def named_kernel(recipe: Recipe) -> str | None:
    """The attention kernel that the config asks for; None: the platform's."""
    if kernel := recipe.kernels.get('attention'):
        return kernel.name
    return recipe.implementation and recipe.implementation.row['attention']


def scores_of(recipe: Recipe) -> Scores | None:
    """What the attention layer asks of its kernel; None where it has no such scores."""
    layer = recipe.attention
    if not layer.row.has_scores:
        return None
    wiring = dict.fromkeys(('n_heads', 'n_kv_heads', 'qk_norm', 'rotate', 'kernels', 'dtype'))
    return layer.build(
        **wiring,
        head_dim=recipe.head_dim,
        slopes=recipe.position.row.slopes,
        base_head_dim=base_head_dim(recipe),
    ).scores()


def _check_rms_norm(recipe: Recipe) -> None:
    kernel, norms = recipe.kernels.get('rms_norm'), recipe.norms.values()
    if kernel and not any(norm.row.over_rms for norm in norms):
        chosen = ', '.join(map(str, norms))
        able = ', '.join(name for name, row in NORMS.items() if row.over_rms)
        raise ValueError(
            f'{kernel} would change nothing: of {chosen} none divides by the root mean square; '
            f'those that do are {able}. Leave it out.'
        )


def _check_placement(recipe: Recipe) -> None:
    """A placement's other choices are a part of the method: ValueError where they are others."""
    placement = recipe.placement
    chosen = {
        'mlp': {recipe.mlp.name},
        'reparam': {part.name for part in recipe.reparam},
        'norm_values': {recipe.attention.options['norm_values']},
    }
    paths = {'mlp': 'model.mlp', 'reparam': 'model.reparam', 'norm_values': 'attention.norm_values'}
    for name, needed in placement.row.needs.items():
        if needed not in chosen[name]:
            raise ValueError(
                f'{placement} needs {paths[name]}={needed}; got {flatten(recipe)[paths[name]]}. '
                'Leave it at its default, or choose another placement.'
            )
