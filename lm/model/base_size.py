"""The base model that a parametrisation scales against: the same model with other sizes."""

from lm.config.fields import Config
from lm.config.recipe import Recipe, build_recipe
from lm.config.resolve import list_unread_options, resolve_auto
from modules.scaling.parametrization import DEPTH, WIDTH


def base_head_dim(recipe: Recipe) -> int | None:
    """Returns the head width at which q k / H equals q k / sqrt(H); None for logits not per H."""
    if not recipe.scaling.row.logits_per_width:
        return None
    return 1 if recipe.scaling.row.against_one else recipe.base.head_dim


def base_depth(recipe: Recipe) -> int:
    if recipe.scaling.row.against_one:
        return 1
    return recipe.config.scaling.base_depth or recipe.model.n_layers


def width_growth(recipe: Recipe) -> float:
    """Returns d_model over that of the base model, or over 1 where there is none."""
    base = recipe.config.scaling.base_width or recipe.model.d_model
    return recipe.model.d_model / (1 if recipe.scaling.row.against_one else base)


def unused_base_sizes(recipe: Recipe) -> list[str]:
    """Returns the paths of sizes of a base model that are given and change nothing."""
    scaling, row = recipe.config.scaling, recipe.scaling.row
    reads = {f'base_{size}': size in row.grows for size in (WIDTH, DEPTH)}
    reads['base_heads'] = row.logits_per_width
    return [
        f'scaling.{name}'
        for name, is_read in reads.items()
        if vars(scaling)[name] is not None and (row.against_one or not is_read)
    ]


def unused_fields(config: Config) -> list[str]:
    """Returns the paths of options, and of sizes of a base model, that are given and not read."""
    recipe = build_recipe(resolve_auto(config))
    return list_unread_options(recipe) + unused_base_sizes(recipe)


def check_base(recipe: Recipe) -> None:
    """Raises ValueError for sizes of a base model that are missing, unread or not whole."""
    scaling, part, row = recipe.config.scaling, recipe.scaling, recipe.scaling.row
    for wanted, now in ((WIDTH, recipe.model.d_model), (DEPTH, recipe.model.n_layers)):
        name, reads = f'base_{wanted}', wanted in row.grows and not row.against_one
        value = vars(scaling)[name]
        if reads and value is None:
            but_zero = f', but that each {row.zero[0]} starts at 0' if row.zero else ''
            raise ValueError(
                f'{part} scales against a base model: set scaling.{name}, the {wanted} of the '
                f"model whose learning rate this one is to have; at {now}, the model's own, it is "
                f'scaling.name=standard{but_zero}'
            )
    for path in unused_base_sizes(recipe):
        why = f'is read by no part of this config ({part})'
        if path == 'scaling.base_heads':
            why = f'is for logits q k / H against a base model, which {part} does not have'
        raise ValueError(
            f'{path}={vars(scaling)[path.split(".")[1]]} {why}, so that it would change nothing. '
            'Leave it out, or None.'
        )
    _ = recipe.base  # refuses sizes that are not whole
