"""Everything that can be wrong with a config, found before anything is traced or read."""

from lm.check_model import NORM_SITES, check_model
from lm.check_scaling import check_parametrization
from lm.config import AUTO, Part, flatten, option_of, part_at, parts_of
from lm.sections import FIELDS, Config
from modules.choices import nearest_divisor
from modules.losses import LOSSES
from modules.norms import NORMS
from modules.params import ROLES
from modules.scaling.decay import in_gradient


def check(config: Config) -> None:
    """ValueError for the first number out of range, or for fields that do not fit each other.

    Names and types have been checked by `lm.config.resolve`. What is read from disk is not looked
    at: `lm.data.check` and `lm.run.start.check_init_from` do that.
    """
    for path, value in flatten(config).items():
        if FIELDS[path].option is not None and value is not None:
            FIELDS[path].option.check(path, value)
    check_model(config)
    _check_init_scale(config)
    check_parametrization(config)
    _check_optimizers(config)
    _check_average(config)
    _check_products(config)
    _check_loss(config)
    _check_schedule(config)
    _check_batch(config)


def _check_init_scale(config: Config) -> None:
    for part in parts_of(config):
        least = getattr(part.row, 'least_init_scale', 0.0)
        if config.scaling.init_scale < least:
            raise ValueError(
                f'{part.path}={part.name} divides by the norms of the initial matrices, so that '
                f'scaling.init_scale must be at least {least}; got {config.scaling.init_scale}'
            )


def _check_optimizers(config: Config) -> None:
    shrinks = config.optim.embedding_gradient_shrink is not None
    if shrinks and config.model.tie_embeddings:
        raise ValueError(
            'optim.embedding_gradient_shrink is of the embedding that words are looked up in; with '
            'model.tie_embeddings=True its gradient is that of the readout too, which is not '
            'meant. Leave one of them out.'
        )
    others = part_at(config, 'optim.others')
    if missing := sorted(set(ROLES) - {'hidden'} - set(others.row.roles)):
        raise ValueError(
            f'optim.others={others.name} is not for parameters of the roles {", ".join(missing)}, '
            f'only {", ".join(others.row.roles)}. Give it to the hidden matrices, '
            f'optim.name={others.name}, and the others another, such as optim.others=adamw.'
        )

    _check_forward_mode(config)
    penalised = in_gradient(part_at(config, 'optim.decay_rule').row) and config.optim.weight_decay
    for path in ('optim.name', 'optim.others'):
        part = part_at(config, path)
        if penalised:
            _check_decay_in_gradient(config, part)
        if path == 'optim.others' and part.row.needs.own_loss and shrinks:
            raise ValueError(
                f'optim.embedding_gradient_shrink makes a gradient smaller, and {path}={part.name} '
                'measures the loss itself, which stays as it is. Leave one of them out.'
            )
        if part.row.needs.cross_entropy and config.loss.name != 'cross_entropy':
            raise ValueError(
                f'{path}={part.name} needs a loss that is convex in the logits: '
                f'loss.name=cross_entropy; got {config.loss.name}'
            )
        group, rows = option_of(config, part, 'sven_group'), config.data.batch_size
        if group is not None and rows % group:
            raise ValueError(
                f'optim.sven_group must divide data.batch_size; got {group} for {rows} sequences. '
                f'Nearest that works: {nearest_divisor(rows, group)}.'
            )


def _check_decay_in_gradient(config: Config, part: Part) -> None:
    """ValueError for an optimizer that a penalty in the gradient does not reach as it should."""
    if part.row.needs.own_loss:
        raise ValueError(
            f'optim.decay_rule=l2 adds weight decay to the gradient, and {part.path}={part.name} '
            'measures the loss itself, without it. Choose optim.decay_rule=decoupled.'
        )
    if option_of(config, part, 'adamp_decay_ratio') not in (None, 1.0):
        raise ValueError(
            f'optim.decay_rule=l2 adds weight decay to the gradient, so that {part.path}='
            f'{part.name} cannot take less of it off. Choose optim.decay_rule=decoupled, or '
            'optim.adamp_decay_ratio=1.0.'
        )


def _check_average(config: Config) -> None:
    """ValueError where weights would be mapped away from the points that an average is made of, or
    moved by more than was measured.
    """
    average = part_at(config, 'optim.average')
    if config.optim.ghost_radius is not None:
        after = [part for part in parts_of(config) if hasattr(part.row, 'maps_after_update')]
        after += [average] if getattr(average.row, 'moves_weights', False) else []
        for part in after:
            raise ValueError(
                f'optim.ghost_radius limits what an update does to the logits, and {part.path}='
                f'{part.name} moves the weights after it. Leave one of them out.'
            )
    for part in parts_of(config):
        if getattr(average.row, 'moves_weights', False) and hasattr(part.row, 'maps_after_update'):
            raise ValueError(
                f'optim.average={average.name} steers the weights between two points that it keeps '
                f'and {part.path}={part.name} maps them after each update: they would part. Choose '
                'optim.average=ema, which is mapped where it is used, or another reparametrisation.'
            )


def _check_products(config: Config) -> None:
    """ValueError where gradients of weights are estimated, and are not asked for or asked for more
    than an estimate has.
    """
    if config.kernels.matmul != 'wta_crs':
        return
    if config.train.trainable != 'all':
        raise ValueError(
            f'kernels.matmul=wta_crs estimates the gradients of matrices, and train.trainable='
            f'{config.train.trainable} trains none: it would change nothing. Leave one of them out.'
        )
    for asker, what in asks_forward_mode(config).items():
        raise ValueError(
            f'{asker} differentiates the {what}, and kernels.matmul=wta_crs makes gradients of a '
            'few tokens as if these were constants: its derivative would be another, or none. '
            'Leave kernels.matmul=auto, or leave the other out.'
        )


def asks_forward_mode(config: Config) -> dict[str, str]:
    """{what was chosen: what it differentiates in forward mode, 'logits' or 'gradient'}."""
    parts = [part_at(config, path) for path in ('optim.name', 'optim.others')]
    asked = {f'{part.path}={part.name}': part.row.needs.forward_mode for part in parts}
    if config.optim.ghost_radius is not None:
        asked['optim.ghost_radius'] = 'logits'
    return {asker: what for asker, what in asked.items() if what}


def _check_forward_mode(config: Config) -> None:
    """ValueError for norms without it; `lm.updates` knows the kernel of the devices."""
    for asker, what in asks_forward_mode(config).items():
        for path in NORM_SITES:
            norm = part_at(config, path)
            if not norm.row.forward_mode:
                able = [name for name, row in NORMS.items() if row.forward_mode]
                raise ValueError(
                    f'{asker} differentiates the {what} in forward mode, and {path}={norm.name} '
                    f'has a backward pass of its own; choose one of {", ".join(able)}'
                )


def _check_loss(config: Config) -> None:
    loss = part_at(config, 'loss.name')
    if config.model.logit_softcap and getattr(loss.row, 'linear_readout', False):
        raise ValueError(
            f'loss.name={loss.name} is computed from sums of logits, which a softcap bends; it '
            f'needs model.logit_softcap=0, got {config.model.logit_softcap}'
        )
    kernel = config.kernels.cross_entropy
    if kernel != AUTO and loss.row is not LOSSES['cross_entropy']:
        raise ValueError(
            f'kernels.cross_entropy={kernel} would change nothing: loss.name={loss.name} is '
            'another loss. Leave it out.'
        )


def _check_schedule(config: Config) -> None:
    """ValueError for a decay that cannot be: by a factor to 0, or in cycles of a step each."""
    schedule = part_at(config, 'optim.schedule')
    if schedule.name == 'exponential' and option_of(config, schedule, 'final_lr_fraction') == 0:
        raise ValueError(
            'optim.schedule=exponential multiplies the learning rate by one factor each step and '
            'never gets to 0: optim.final_lr_fraction must be above 0; got 0. Leave it out, give '
            'another such as 0.01, or choose optim.schedule=linear, which gets there.'
        )
    cycles = option_of(config, schedule, 'cycles')
    steps = config.train.steps - (option_of(config, schedule, 'warmup_steps') or 0)
    if cycles is not None and 2 * cycles > max(steps, 2):
        raise ValueError(
            f'optim.cycles must leave each cycle two steps or more; got {cycles} for the {steps} '
            f'steps after the warm-up. The most that works: {max(steps // 2, 1)}.'
        )


def _check_batch(config: Config) -> None:
    rows, parts = config.data.batch_size, config.train.microbatches
    if rows % parts:
        raise ValueError(
            f'train.microbatches must divide data.batch_size; got {parts} for {rows} sequences. '
            f'Nearest that works: {nearest_divisor(rows, parts)}.'
        )
    for name, size in vars(config.mesh).items():
        if size == 0:
            raise ValueError(f'mesh.{name} must be a number of devices, or -1 for all; got 0')
