"""Everything that can be wrong with a config, found before anything is traced or read."""

import dataclasses
from typing import Any

from lm.base_model import base_head_dim, check_base
from lm.config import (
    AUTO,
    FIELDS,
    Config,
    Part,
    flatten,
    given,
    part_at,
    parts_of,
    readers_of,
)
from lm.objectives import check_objectives, has_prefix
from modules.attention import ATTENTIONS
from modules.choices import nearest_divisor
from modules.kernels import IMPLEMENTATIONS
from modules.kernels.attention import Scores, refuse_unserved
from modules.norms import NORMS
from modules.options import options
from modules.params import ROLES
from modules.positions import rotated_features
from modules.reparam.matrices import parse_roles
from modules.scaling import PARAMETRIZATIONS
from modules.scaling.parametrization import DEPTH

NORM_SITES = ('model.norm', 'model.embedding_norm', 'model.final_norm', 'model.qk_norm')


def check(config: Config) -> None:
    """ValueError for the first number out of range, or for fields that do not fit each other.

    Names and types have been checked by `lm.config.resolve`. What is read from disk is not looked
    at: `lm.data.check` and `lm.run.start.check_init_from` do that.
    """
    for path, value in flatten(config).items():
        if FIELDS[path].option is not None and value is not None:
            FIELDS[path].option.check(path, value)
    _check_heads(config)
    _check_rope(config)
    _check_attention(config)
    check_objectives(config)
    _check_norms(config)
    _check_placement(config)
    _check_experts(config)
    _check_init_scale(config)
    _check_parametrization(config)
    _check_roles(config)
    _check_optimizers(config)
    _check_average(config)
    _check_products(config)
    _check_loss(config)
    _check_schedule(config)
    _check_batch(config)


def check_devices(config: Config, n_devices: int, n_processes: int) -> None:
    """ValueError where a microbatch cannot be cut evenly over the devices."""
    rows, parts = config.data.batch_size, config.train.microbatches
    if rows % (parts * n_devices):
        fitting = max(1, round(rows / (parts * n_devices))) * parts * n_devices
        raise ValueError(
            f'data.batch_size must be a multiple of train.microbatches * devices = {parts} * '
            f'{n_devices}; got {rows}. Nearest that works: {fitting}.'
        )
    if n_devices % n_processes:
        raise ValueError(f'{n_devices} devices do not spread evenly over {n_processes} processes')


def stream_width(config: Config) -> int:
    """Coordinates of the residual stream: model.d_model, less what the norm does without."""
    return config.model.d_model - part_at(config, 'model.norm').row.drops


def _check_heads(config: Config) -> None:
    model = config.model
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


def _check_rope(config: Config) -> None:
    """ValueError where the features to be turned make no pairs, or a scaling is half given."""
    if config.model.position != 'rope':
        return
    model, attention = config.model, config.attention
    head_width = model.d_model // model.n_heads
    if attention.rope_fraction == 1 and head_width % 2:
        raise ValueError(
            f'model.position=rope turns pairs: the head width d_model / n_heads must be even; got '
            f'{head_width}. Change n_heads, or use position=learned.'
        )
    rotated_features(head_width, attention.rope_fraction)
    rope, scaling = part_at(config, 'model.position'), attention.rope_scaling
    scalings_that_read = {
        'rope_factor': ('linear', 'llama3'),
        'rope_original_length': ('llama3',),
        'rope_low_frequency_factor': ('llama3',),
        'rope_high_frequency_factor': ('llama3',),
    }
    for name, scalings in scalings_that_read.items():
        value = getattr(attention, name)
        if scaling not in scalings and value != options(rope.row)[name].default:
            raise ValueError(
                f'attention.{name}={value} is read with attention.rope_scaling='
                f'{"|".join(scalings)} alone, and that is {scaling}. Leave it out, or None.'
            )
    if scaling != 'none' and attention.rope_factor == 1:
        raise ValueError(
            f'attention.rope_scaling={scaling} divides frequencies by attention.rope_factor, which '
            'is 1: nothing would change. Set it to how much longer rows are, or leave both out.'
        )
    low, high = attention.rope_low_frequency_factor, attention.rope_high_frequency_factor
    if scaling == 'llama3' and low >= high:
        raise ValueError(
            'attention.rope_low_frequency_factor must be below '
            f'attention.rope_high_frequency_factor; got {low} and {high}'
        )


def _check_attention(config: Config) -> None:
    """ValueError where positions or the kernel asked for do not go with the attention layer."""
    layer, position = part_at(config, 'model.attention'), part_at(config, 'model.position')
    wired = getattr(layer.row, '__dataclass_fields__', {})
    if position.row.slopes and 'slopes' not in wired:
        able = [name for name, row in ATTENTIONS.items() if 'slopes' in row.__dataclass_fields__]
        raise ValueError(
            f'model.position={position.name} adds to the logits of softmax attention, and '
            f'model.attention={layer.name} has none. Choose model.attention={"|".join(able)}, or '
            'another position.'
        )
    if config.attention.full_every and config.attention.window is None:
        raise ValueError(
            f'attention.full_every={config.attention.full_every} says which layers have no window, '
            'and attention.window is None: all have none. Set the window, or leave it out.'
        )
    if config.attention.qk_norm_over == 'model' and config.model.qk_norm == 'none':
        raise ValueError(
            'attention.qk_norm_over=model is about model.qk_norm, which is none; set it, to '
            'rmsnorm as in OLMo 2'
        )
    scores, head_dim = scores_of(config), config.model.d_model // config.model.n_heads
    if scores is not None and has_prefix(config):
        scores = dataclasses.replace(scores, prefix=True)
    unused = 'attention' if scores is None else 'linear_attention'
    if getattr(config.kernels, unused) != AUTO:
        raise ValueError(
            f'kernels.{unused}={getattr(config.kernels, unused)} would change nothing: '
            f'model.attention={layer.name} has another kind of kernel. Leave it out.'
        )
    for name in (config.kernels.attention, implied_kernel(config)):
        if scores is not None and name != AUTO:
            refuse_unserved(name, scores, config.model.dtype, head_dim)


def implied_kernel(config: Config) -> str:
    """That of kernels.implementation, where nothing else is asked for; 'auto': the platform's."""
    if config.kernels.attention != AUTO or config.kernels.implementation == AUTO:
        return AUTO
    return IMPLEMENTATIONS[config.kernels.implementation]['attention']


def scores_of(config: Config) -> Scores | None:
    """What the attention layer asks of its kernel; None where it has no such scores."""
    layer, model = part_at(config, 'model.attention'), config.model
    if not hasattr(layer.row, 'scores'):
        return None
    wiring = dict.fromkeys(('n_heads', 'n_kv_heads', 'qk_norm', 'rotate', 'kernels', 'dtype'))
    return layer.row(
        **wiring,
        **given(config, layer),
        head_dim=model.d_model // model.n_heads,
        slopes=part_at(config, 'model.position').row.slopes,
        base_head_dim=base_head_dim(config),
    ).scores()


def _check_norms(config: Config) -> None:
    model = config.model
    norm = part_at(config, 'model.norm')
    if norm.row.drops and model.d_model % 2:
        raise ValueError(
            f'model.norm={norm.name} keeps d_model - {norm.row.drops} coordinates of a stream '
            f'whose width model.d_model must be even; got {model.d_model}. Nearest that works: '
            f'{model.d_model + 1}.'
        )
    head_width, sequences = model.d_model // model.n_heads, sequences_of_a_microbatch(config)
    stream = {stream_width(config)}
    of_heads = {head_width}
    if config.attention.qk_norm_over == 'model':
        of_heads = {head_width * model.n_heads, head_width * model.n_kv_heads}
    for path in NORM_SITES:
        site = part_at(config, path)
        _check_divides(config, site, 'ghost_batches', sequences, 'the sequences of a microbatch')
        for width in sorted(of_heads if path == 'model.qk_norm' else stream):
            what = f'the width {width} that {{}} normalizes'
            _check_divides(config, site, 'groups', width, what)
            _check_divides(config, site, 'heads', width, what)
            if 'groups' in options(site.row) and given(config, site).get('groups') == width:
                raise ValueError(
                    f'norm.groups={width} leaves {path}={site.name} groups of one feature each, '
                    'which have no spread; give fewer'
                )


def sequences_of_a_microbatch(config: Config) -> int:
    return config.data.batch_size // config.train.microbatches


def _check_divides(config: Config, site: Part, name: str, whole: int, what: str) -> None:
    """ValueError where the option `name` of a norm does not divide `whole`."""
    n = option_of(config, site, name)
    if n is not None and whole % n:
        raise ValueError(
            f'norm.{name} must divide {what.format(f"{site.path}={site.name}")}; got {n} for '
            f'{whole}. Nearest that works: {nearest_divisor(whole, n)}.'
        )


def option_of(config: Config, part: Part, name: str) -> Any:
    """As given, or else as published; None where the part has no such option."""
    if name not in options(part.row):
        return None
    return given(config, part).get(name, options(part.row)[name].default)


def _check_placement(config: Config) -> None:
    """A placement's other choices are a part of the method: ValueError where they are others."""
    placement = part_at(config, 'model.placement')
    chosen = {
        'mlp': {part.name for part in parts_of(config) if part.path == 'model.mlp'},
        'reparam': {part.name for part in parts_of(config) if part.path == 'model.reparam'},
        'norm_values': {config.attention.norm_values},
    }
    paths = {'mlp': 'model.mlp', 'reparam': 'model.reparam', 'norm_values': 'attention.norm_values'}
    for name, needed in placement.row.needs.items():
        if needed not in chosen[name]:
            raise ValueError(
                f'model.placement={placement.name} needs {paths[name]}={needed}; got '
                f'{flatten(config)[paths[name]]}. Leave it at its default, or choose another '
                'placement.'
            )
    if config.attention.norm_values and config.model.qk_norm == 'none':
        raise ValueError(
            f'attention.norm_values normalizes values by model.qk_norm, which is none '
            f'(model.placement={placement.name}); set it, to rmsnorm as published'
        )


def _check_experts(config: Config) -> None:
    if 'mlp.n_experts' not in readers_of(config):
        return
    if config.model.bias:
        raise ValueError(f'model.bias=True: experts (model.mlp={config.model.mlp}) have no biases')
    if config.mlp.experts_per_token > config.mlp.n_experts:
        raise ValueError(
            f'mlp.experts_per_token must be at most mlp.n_experts; got '
            f'{config.mlp.experts_per_token} of {config.mlp.n_experts}'
        )


def _check_init_scale(config: Config) -> None:
    for part in parts_of(config):
        least = getattr(part.row, 'least_init_scale', 0.0)
        if config.scaling.init_scale < least:
            raise ValueError(
                f'{part.path}={part.name} divides by the norms of the initial matrices, so that '
                f'scaling.init_scale must be at least {least}; got {config.scaling.init_scale}'
            )


def _check_parametrization(config: Config) -> None:
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


def _check_roles(config: Config) -> None:
    for part in parts_of(config):
        if part.path == 'model.reparam' and 'roles' in options(part.row):
            parse_roles(option_of(config, part, 'roles'))


def _check_optimizers(config: Config) -> None:
    if config.optim.embedding_gradient_shrink is not None and config.model.tie_embeddings:
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
    for path in ('optim.name', 'optim.others'):
        part = part_at(config, path)
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


def _check_average(config: Config) -> None:
    """ValueError where weights would be mapped away from the points that an average is made of."""
    average = part_at(config, 'optim.average')
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
    for name in ('data', 'run'):
        if getattr(config.mesh, name) == 0:
            raise ValueError(f'mesh.{name} must be a number of devices, or -1 for all; got 0')
