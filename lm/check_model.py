"""What can be wrong with the model that a config describes."""

import dataclasses

from lm.base_model import base_head_dim
from lm.config import AUTO, Part, flatten, given, option_of, part_at, parts_at, readers_of
from lm.objectives import check_objectives, has_prefix
from lm.sections import Config
from modules.attention import ATTENTIONS
from modules.choices import nearest_divisor
from modules.kernels import IMPLEMENTATIONS
from modules.kernels.attention import Scores, refuse_unserved
from modules.norms import NORMS
from modules.norms.rmsnorm import OverRMS
from modules.options import options
from modules.positions import rotated_features
from modules.reparam.matrices import parse_roles

NORM_SITES = ('model.norm', 'model.embedding_norm', 'model.final_norm', 'model.qk_norm')


def check_model(config: Config) -> None:
    """ValueError for the first fields of the model that do not fit each other."""
    _check_heads(config)
    _check_rope(config)
    _check_attention(config)
    check_objectives(config)
    _check_norms(config)
    _check_rms_norm(config)
    _check_softmax(config)
    _check_placement(config)
    _check_experts(config)
    _check_roles(config)


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


def _check_softmax(config: Config) -> None:
    named = config.kernels.softmax
    is_dense = 'reference' in (config.kernels.attention, implied_kernel(config))
    is_dense = is_dense and scores_of(config) is not None
    if named != AUTO and not is_dense and 'mlp.n_experts' not in readers_of(config):
        raise ValueError(
            f'kernels.softmax={named} would change nothing: it is of attention that has all of its '
            'scores at once, kernels.attention=reference, and of routers, model.mlp=moe. Leave it '
            'out.'
        )


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


def _check_rms_norm(config: Config) -> None:
    named = config.kernels.rms_norm
    norms = {path: part_at(config, path) for path in NORM_SITES}
    if named != AUTO and not any(issubclass(norm.row, OverRMS) for norm in norms.values()):
        chosen = ', '.join(f'{path}={norm.name}' for path, norm in norms.items())
        able = ', '.join(name for name, row in NORMS.items() if issubclass(row, OverRMS))
        raise ValueError(
            f'kernels.rms_norm={named} would change nothing: of {chosen} none divides by the root '
            f'mean square; those that do are {able}. Leave it out.'
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


def _check_placement(config: Config) -> None:
    """A placement's other choices are a part of the method: ValueError where they are others."""
    placement = part_at(config, 'model.placement')
    chosen = {
        'mlp': {part.name for part in parts_at(config, 'model.mlp')},
        'reparam': {part.name for part in parts_at(config, 'model.reparam')},
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


def _check_roles(config: Config) -> None:
    for part in parts_at(config, 'model.reparam'):
        if 'roles' in options(part.row):
            parse_roles(option_of(config, part, 'roles'))
