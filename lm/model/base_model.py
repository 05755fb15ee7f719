"""The model that a parametrisation scales against: this one, at the width of the base."""

from lm.config.recipe import Recipe
from lm.config.resolve import replaced


def base_of(recipe: Recipe) -> Recipe:
    """The recipe at scaling.base_width, with scaling.base_heads or with heads as wide as here."""
    width = recipe.config.scaling.base_width
    return recipe if width is None else resized(recipe, width, recipe.config.scaling.base_heads)


def resized(recipe: Recipe, width: int, n_heads: int | None) -> Recipe:
    """The recipe at another width: MLPs, heads, and key and value heads grow alike.

    n_heads: None: as many as are as wide as here. Depth is left: blocks do not differ in their
    shapes. ValueError where a size is then no whole number.
    """
    model = recipe.model

    def scaled(name: str, by: int, over: int) -> int:
        now = vars(model)[name]
        found, rest = divmod(now * by, over)
        if rest or not found:
            raise ValueError(
                f'at a width of {width} this model would have {now * by / over:g} '
                f'for model.{name}={now}, which must be whole. Choose a width '
                'that divides evenly, or the number of heads of the base model '
                '(scaling.base_heads).'
            )
        return found

    heads = scaled('n_heads', width, model.d_model) if n_heads is None else n_heads
    if width % heads:
        raise ValueError(
            'the number of heads (scaling.base_heads) must divide the width; got '
            f'{heads} heads for a width of {width}'
        )
    return replaced(
        recipe,
        {
            'model.d_model': width,
            'model.d_ff': scaled('d_ff', width, model.d_model),
            'model.n_heads': heads,
            'model.n_kv_heads': scaled('n_kv_heads', heads, model.n_heads),
        },
    )


def base_head_dim(recipe: Recipe) -> int | None:
    """The head width at which q k / H is what q k / sqrt(H) is; None where logits are not per H."""
    if not recipe.scaling.row.logits_per_width:
        return None
    if against_one(recipe):
        return 1
    base = base_of(recipe).model
    return base.d_model // base.n_heads


def against_one(recipe: Recipe) -> bool:
    """Whether sizes count, and not growths from those of a base model."""
    return recipe.scaling.row.against_one


def base_blocks(recipe: Recipe) -> int:
    return 1 if against_one(recipe) else recipe.config.scaling.base_depth or recipe.model.n_layers


def width_growth(recipe: Recipe) -> float:
    base = 1 if against_one(recipe) else recipe.config.scaling.base_width or recipe.model.d_model
    return recipe.model.d_model / base
