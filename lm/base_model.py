"""The model that a parametrisation scales against: this one, at the width of the base."""

from lm.config import part_at, replaced
from lm.sections import Config


def base_of(config: Config) -> Config:
    """The config at scaling.base_width, with scaling.base_heads or with heads as wide as here."""
    width = config.scaling.base_width
    return config if width is None else resized(config, width, config.scaling.base_heads)


def resized(config: Config, width: int, n_heads: int | None) -> Config:
    """The config at another width: MLPs, heads, and key and value heads grow alike.

    n_heads: None: as many as are as wide as here. Depth is left: blocks do not differ in their
    shapes. ValueError where a size is then no whole number.
    """
    model = config.model

    def scaled(name: str, by: int, over: int) -> int:
        found, rest = divmod(getattr(model, name) * by, over)
        if rest or not found:
            raise ValueError(
                f'at a width of {width} this model would have {getattr(model, name) * by / over:g} '
                f'for model.{name}={getattr(model, name)}, which must be whole. Choose a width '
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
        config,
        {
            'model.d_model': width,
            'model.d_ff': scaled('d_ff', width, model.d_model),
            'model.n_heads': heads,
            'model.n_kv_heads': scaled('n_kv_heads', heads, model.n_heads),
        },
    )


def base_head_dim(config: Config) -> int | None:
    """The head width at which q k / H is what q k / sqrt(H) is; None where logits are not per H."""
    if not part_at(config, 'scaling.name').row.logits_per_width:
        return None
    if against_one(config):
        return 1
    base = base_of(config).model
    return base.d_model // base.n_heads


def against_one(config: Config) -> bool:
    """Whether sizes count, and not growths from those of a base model."""
    return part_at(config, 'scaling.name').row.against_one


def base_blocks(config: Config) -> int:
    return 1 if against_one(config) else config.scaling.base_depth or config.model.n_layers


def width_growth(config: Config) -> float:
    base = 1 if against_one(config) else config.scaling.base_width or config.model.d_model
    return config.model.d_model / base
