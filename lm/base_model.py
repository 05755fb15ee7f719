"""The model that a parametrisation scales against: this one, at the width of the base."""

from lm.config import part_at, replaced
from lm.sections import Config
from modules.scaling import PARAMETRIZATIONS
from modules.scaling.parametrization import DEPTH, WIDTH


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


def check_base(config: Config) -> None:
    """ValueError for sizes of a base model that are missing, or that nothing reads."""
    scaling, part = config.scaling, part_at(config, 'scaling.name')
    grows = part.row.grows
    for name, wanted in (('base_width', WIDTH), ('base_depth', DEPTH)):
        value = getattr(scaling, name)
        reads = wanted in grows and not part.row.against_one
        if reads and value is None:
            now = config.model.d_model if wanted == WIDTH else config.model.n_layers
            raise ValueError(
                f'scaling.name={part.name} scales against a base model: set scaling.{name}, the '
                f'{wanted} of the model whose learning rate this one is to have; at {now}, the '
                f"model's own, it is scaling.name=standard"
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
            f'which scaling.name={part.name} does not have, so that it would change nothing. Leave '
            'it out, or None.'
        )
    base_of(config)


def check_parametrization(config: Config) -> None:
    """ValueError where the parametrisation, its base model and the rest do not go together."""
    check_base(config)
    part = part_at(config, 'scaling.name')
    for path in ('optim.name', 'optim.others'):
        chosen = part_at(config, path)
        if chosen.row.family not in part.row.families:
            able = [n for n, row in PARAMETRIZATIONS.items() if chosen.row.family in row.families]
            raise ValueError(
                f'scaling.name={part.name} has no table for {path}={chosen.name}, a '
                f'{chosen.row.family}-like optimizer, only for those like '
                f'{" and ".join(part.row.families)}. Choose scaling.name={"|".join(able)}, or '
                'another optimizer.'
            )
    name = part_at(config, 'optim.name')
    by_size = config.optim.match_rms is not None or config.optim.muon_scale == 'rms'
    if name.row.family == 'spectral' and part.row.grows and by_size:
        raise ValueError(
            f'scaling.name={part.name} is for updates whose singular values do not grow with '
            'width, and optim.match_rms and optim.muon_scale=rms scale them by their size. '
            'Leave these out.'
        )
    if DEPTH not in part.row.grows:
        return
    placement = part_at(config, 'model.placement')
    if placement.row.norms_updates:
        raise ValueError(
            f'scaling.name={part.name} multiplies what blocks add to the stream, which '
            f'model.placement={placement.name} normalizes behind it. Choose another placement, '
            'such as pre.'
        )
    if 'shared' in config.model.reparam.split('+'):
        raise ValueError(
            f'scaling.name={part.name} has rates for each block, and model.reparam='
            f'{config.model.reparam} has one matrix for all. Leave one of them out.'
        )
