"""Whether a parametrisation, its base model, the optimizers and the model go together."""

from lm.config.recipe import Part, Recipe
from lm.model.base_model import base_of
from modules.params import ParamSpec
from modules.scaling import PARAMETRIZATIONS, Growth
from modules.scaling.parametrization import DEPTH, WIDTH

MATRIX = ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',))  # what rows are asked of


def check_base(recipe: Recipe) -> None:
    """ValueError for sizes of a base model that are missing, or that nothing reads."""
    scaling, part = recipe.config.scaling, recipe.scaling
    grows = part.row.grows
    for name, wanted in (('base_width', WIDTH), ('base_depth', DEPTH)):
        value = vars(scaling)[name]
        reads = wanted in grows and not part.row.against_one
        if reads and value is None:
            now = recipe.model.d_model if wanted == WIDTH else recipe.model.n_layers
            but_zero = f', but that each {part.row.zero[0]} starts at 0' if part.row.zero else ''
            raise ValueError(
                f'{part} scales against a base model: set scaling.{name}, the '
                f'{wanted} of the model whose learning rate this one is to have; at {now}, the '
                f"model's own, it is scaling.name=standard{but_zero}"
            )
        if value is not None and not reads:
            raise ValueError(
                f'scaling.{name}={value} is read by no part of this config (scaling.name='
                f'{part.name}), so that it would change nothing. Leave it out, or None.'
            )
    reads_heads = part.row.logits_per_width and not part.row.against_one
    if scaling.base_heads is not None and not reads_heads:
        raise ValueError(
            f'scaling.base_heads={scaling.base_heads} is for logits q k / H against a base model, '
            f'which {part} does not have, so that it would change nothing. Leave '
            'it out, or None.'
        )
    base_of(recipe)


def check_parametrization(recipe: Recipe) -> None:
    """ValueError where the parametrisation, its base model and the rest do not go together."""
    check_base(recipe)
    part = recipe.scaling
    for chosen in recipe.optimizers.values():
        if chosen.row.family not in part.row.families:
            able = [n for n, row in PARAMETRIZATIONS.items() if chosen.row.family in row.families]
            raise ValueError(
                f'{part} has no table for {chosen}, a '
                f'{chosen.row.family}-like optimizer, only for those like '
                f'{" and ".join(part.row.families)}. Choose scaling.name={"|".join(able)}, or '
                'another optimizer.'
            )
        _check_size_of_updates(recipe, part, chosen)
        _check_epsilon(part, chosen)
    _check_tied(recipe, part)
    if part.row.against_one and recipe.init.row(MATRIX, (1, 1, 1), 1) != 1:
        raise ValueError(
            f'{part} draws weights with deviation 1 and scales them where they '
            f'are used, and {recipe.init} has its own deviation. Leave '
            'scaling.init=fan_in.'
        )
    _check_depth(recipe, part)


def _check_size_of_updates(recipe: Recipe, part: Part, chosen: Part) -> None:
    """ValueError where updates do not have the size that the row scales."""
    if not part.row.grows:
        return
    for option, value in chosen.row.other_sizes.items():
        if chosen.options.get(option) == value:
            raise ValueError(
                f'{part} scales updates of {chosen} as those '
                f'of a {chosen.row.family}-like optimizer, and with optim.{option}={value} they '
                'are of another size. Choose another value, or scaling.name=standard.'
            )
    is_matched = chosen is recipe.optimizer and recipe.optim.match_rms is not None
    if is_matched and chosen.row.family != 'adam':
        raise ValueError(
            f'{part} scales updates of {chosen} as those of a '
            f'{chosen.row.family}-like optimizer, and optim.match_rms gives them one root mean '
            'square, as those of an adam-like one have. Leave it out.'
        )


def _check_epsilon(part: Part, chosen: Part) -> None:
    """ValueError where a scaled gradient is not all that an epsilon is compared with."""
    scaled = part.row(MATRIX, Growth(2.0, 2.0, 2.0, 2.0), chosen.row.family).eps != 1
    if scaled and chosen.row.needs.own_loss:
        raise ValueError(
            f'{part} scales epsilons, and {chosen} compares '
            'gradients with what it measures of the loss itself. Choose another optimizer, or '
            'another parametrisation, such as mup.'
        )


def _check_tied(recipe: Recipe, part: Part) -> None:
    """ValueError where a table of embeddings cannot be what the row makes of a readout.

    Used as a readout, the table can have another factor in the forward pass (lm/model/transformer.py); its
    deviation and its rate are those of an embedding.
    """
    if not (recipe.model.tie_embeddings and part.row.grows):
        return
    family = recipe.others.row.family
    readout = ParamSpec('readout', ('embed', 'vocab'), ('embed',))
    embedding = ParamSpec('embedding', ('vocab', 'embed'))
    as_readout = part.row(readout, Growth(2.0, 1.0, 2.0, 2.0), family)
    as_input = part.row(embedding, Growth(1.0, 2.0, 2.0, 2.0), family)
    if (as_readout.init, as_readout.lr) != (as_input.init, as_input.lr):
        raise ValueError(
            f'{part} has other deviations or rates for a readout than for '
            'embeddings, which are one with model.tie_embeddings=True. Choose scaling.name=mup, '
            'which scales the readout where it is used, or leave the embeddings untied.'
        )


def _check_depth(recipe: Recipe, part: Part) -> None:
    if DEPTH not in part.row.grows:
        return
    placement = recipe.placement
    if placement.row.norms_updates:
        raise ValueError(
            f'{part} multiplies what blocks add to the stream, which '
            f'{placement} normalizes behind it. Choose another placement, '
            'such as pre.'
        )
    if any(one.row.shares_blocks for one in recipe.reparam):
        raise ValueError(
            f'{part} has rates for each block, and model.reparam={recipe.model.reparam} has one '
            'matrix for all. Leave one of them out.'
        )
