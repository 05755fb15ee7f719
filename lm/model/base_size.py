"""The base model that a parametrisation scales against: the same model with other sizes."""

from lm.config.fields import Config
from lm.config.recipe import Recipe, build_recipe
from lm.config.resolve import list_unread_options, resolve_auto
from modules.scaling.parametrization import DEPTH, WIDTH


def base_head_dim(recipe: Recipe) -> int | None:
    """Returns the head width at which q k / H equals q k / sqrt(H); None if logits are not divided
    by H.
    """
    if not recipe.scaling.row.logits_per_width:
        return None
    return 1 if recipe.scaling.row.is_absolute else recipe.base.head_dim


def base_depth(recipe: Recipe) -> int:
    """Returns the number of blocks of the base model, or 1 if the parametrisation has none."""
    if recipe.scaling.row.is_absolute:
        return 1
    return recipe.config.scaling.base_depth or recipe.model.n_layers


def width_growth(recipe: Recipe) -> float:
    """Returns d_model over the base model's d_model, which is 1 if there is no base model."""
    base = recipe.config.scaling.base_width or recipe.model.d_model
    return recipe.model.d_model / (1 if recipe.scaling.row.is_absolute else base)


def unused_base_sizes(recipe: Recipe) -> list[str]:
    """Returns the paths of base sizes that are set and change nothing."""
    scaling, row = recipe.config.scaling, recipe.scaling.row
    reads = {f'base_{size}': size in row.grows for size in (WIDTH, DEPTH)}
    reads['base_heads'] = row.logits_per_width
    return [
        f'scaling.{name}'
        for name, is_read in reads.items()
        if vars(scaling)[name] is not None and (row.is_absolute or not is_read)
    ]


def unused_fields(config: Config) -> list[str]:
    """Returns the paths of options and base sizes that are set and not read."""
    recipe = build_recipe(resolve_auto(config))
    return list_unread_options(recipe) + unused_base_sizes(recipe)


def check_base(recipe: Recipe) -> None:
    """Raises ValueError if a size of the base model is missing, unread or not an integer."""
    scaling, part, row = recipe.config.scaling, recipe.scaling, recipe.scaling.row
    for size, own_size in ((WIDTH, recipe.model.d_model), (DEPTH, recipe.model.n_layers)):
        name, is_read = f'base_{size}', size in row.grows and not row.is_absolute
        value = vars(scaling)[name]
        if is_read and value is None:
            but_zero = f', except that each {row.zero[0]} starts at 0' if row.zero else ''
            raise ValueError(
                f'{part} scales relative to a base model. Set scaling.{name} to the {size} of the '
                f'model whose learning rate this model should use. Its own {size}, {own_size}, is '
                f'equivalent to scaling.name=standard{but_zero}.'
            )
    for path in unused_base_sizes(recipe):
        why = f'is not used by this config ({part})'
        if path == 'scaling.base_heads':
            why = f'applies to logits q k / H relative to a base model, which {part} does not have'
        raise ValueError(
            f'{path}={vars(scaling)[path.split(".")[1]]} {why}, so it would have no effect. Leave '
            'it out, or set it to None.'
        )
    _ = recipe.base  # raises ValueError if a scaled size is not an integer
