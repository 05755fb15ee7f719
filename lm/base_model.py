"""The model that a parametrisation scales against: this one, at the width of the base."""

from lm.config import Config, part_at, replaced
from modules.scaling.parametrization import DEPTH, WIDTH


def base_of(config: Config) -> Config:
    """The config at scaling.base_width: heads, key and value heads and MLPs grow alike.

    The number of heads is scaling.base_heads, or that with which heads are as wide as here. Depth
    is left: blocks do not differ in their shapes. ValueError where a size of the base model is no
    whole number.
    """
    model, base = config.model, config.scaling.base_width
    if base is None:
        return config
    if config.scaling.base_heads is None:
        heads = _scaled(config, 'n_heads', base, model.d_model)
    else:
        heads = config.scaling.base_heads
    if base % heads:
        raise ValueError(
            f'scaling.base_heads must divide scaling.base_width; got {heads} heads for {base}'
        )
    return replaced(
        config,
        {
            'model.d_model': base,
            'model.d_ff': _scaled(config, 'd_ff', base, model.d_model),
            'model.n_heads': heads,
            'model.n_kv_heads': _scaled(config, 'n_kv_heads', heads, model.n_heads),
        },
    )


def _scaled(config: Config, name: str, by: int, over: int) -> int:
    found, rest = divmod(getattr(config.model, name) * by, over)
    if rest or not found:
        raise ValueError(
            f'scaling.base_width={config.scaling.base_width}: a base model of that width would '
            f'have {getattr(config.model, name) * by / over:g} for model.{name}='
            f'{getattr(config.model, name)}, which must be whole. Choose a base_width that divides '
            'evenly, or the number of heads of the base model (scaling.base_heads).'
        )
    return found


def base_head_dim(config: Config) -> int | None:
    """The head width at which q k / H is what q k / sqrt(H) is; None where logits are not per H."""
    if not part_at(config, 'scaling.name').row.logits_per_width:
        return None
    base = base_of(config).model
    return base.d_model // base.n_heads


def depth_growth(config: Config) -> float:
    return config.model.n_layers / (config.scaling.base_depth or config.model.n_layers)


def width_growth(config: Config) -> float:
    return config.model.d_model / (config.scaling.base_width or config.model.d_model)


def check_base(config: Config) -> None:
    """ValueError for sizes of a base model that are missing, or that nothing reads."""
    scaling, part = config.scaling, part_at(config, 'scaling.name')
    grows = part.row.grows
    for name, wanted in (('base_width', WIDTH), ('base_depth', DEPTH)):
        value = getattr(scaling, name)
        if wanted in grows and value is None:
            now = config.model.d_model if wanted == WIDTH else config.model.n_layers
            raise ValueError(
                f'scaling.name={part.name} scales against a base model: set scaling.{name}, the '
                f'{wanted} of the model whose learning rate this one is to have; at {now}, the '
                f"model's own, it is scaling.name=standard"
            )
        if value is not None and wanted not in grows:
            raise ValueError(
                f'scaling.{name}={value} is read by no part of this config (scaling.name='
                f'{part.name}), so that it would change nothing. Leave it out, or None.'
            )
    if scaling.base_heads is not None and not part.row.logits_per_width:
        raise ValueError(
            f'scaling.base_heads={scaling.base_heads} is for logits q k / H, which scaling.name='
            f'{part.name} does not have, so that it would change nothing. Leave it out, or None.'
        )
    base_of(config)
