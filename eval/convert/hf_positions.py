"""Converts RoPE and the windows of attention in a config.json to our fields, and back.

These are entries of a family, like the entries of `eval.convert.hf_config`, that depend on the
layer.
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from eval.convert.hf_config import FILE, ConfigFields, Flat
from eval.convert.hf_files import format_value

SLIDING, FULL = 'sliding_attention', 'full_attention'
# Default number of the first layers without a window in Qwen.
MAX_WINDOW_LAYERS = 28
FACTOR, ORIGINAL = 'rope_factor', 'rope_original_length'
LENGTH_OPTIONS = {'factor': FACTOR, 'original_max_position_embeddings': ORIGINAL}
# Options of a scaling of RoPE: their names -> ours.
SCALING_OPTIONS = {
    'default': {},
    'linear': {'factor': FACTOR},
    'dynamic': {'factor': FACTOR},  # and max_position_embeddings, see `read_rope`
    'llama3': LENGTH_OPTIONS
    | {
        'low_freq_factor': 'rope_low_frequency_factor',
        'high_freq_factor': 'rope_high_frequency_factor',
    },
    'longrope': LENGTH_OPTIONS
    | {
        'short_factor': 'rope_short_factor',
        'long_factor': 'rope_long_factor',
        'attention_factor': 'rope_attention_factor',
    },
    'yarn': LENGTH_OPTIONS
    | {
        'beta_fast': 'rope_beta_fast',
        'beta_slow': 'rope_beta_slow',
        'truncate': 'rope_truncate',
        'attention_factor': 'rope_attention_factor',
    },
}
# Options that may be missing: our defaults then have the same value, or compute it.
OMITTABLE = ('attention_factor', 'beta_fast', 'beta_slow', 'truncate')


@dataclasses.dataclass(frozen=True)
class Rope:
    """rope_parameters (transformers 5), or rope_theta and rope_scaling (4), which take precedence.

    base, fraction: defaults of their class. base_name, fraction_name: names in version 4.
    is_partial: whether the model's code rotates only partial_rotary_factor of a head's features.
    The code of most models ignores that field and rotates all features, and fails if frequencies
    are scaled too. kinds: the scalings of their class. kind_aliases: names that their class
    replaces by one of these. default_parameters: rope_parameters of their class. original_length:
    original_max_position_embeddings of their class, which takes precedence over the length in
    rope_parameters. ignored: parameters that only apply to images.
    """

    base: float = 10_000.0
    fraction: float = 1.0
    fraction_name: str = 'partial_rotary_factor'
    base_name: str = 'rope_theta'
    is_partial: bool = False
    kinds: tuple[str, ...] = tuple(SCALING_OPTIONS)
    kind_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    default_parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    original_length: int | None = None
    ignored: tuple[str, ...] = ()

    def read(self, fields: ConfigFields) -> Flat:
        base = fields.take(self.base_name, None) or self.base
        fraction = fields.take(self.fraction_name, self.fraction)
        fraction = 1.0 if fraction is None else fraction  # null is no default of the class
        scaling_v4, parameters_v5 = (
            fields.take('rope_scaling', None),
            fields.take('rope_parameters', None),
        )
        parameters = scaling_v4 or parameters_v5 or self.default_parameters
        for name, used in (('rope_theta', base), ('partial_rotary_factor', fraction)):
            if name not in (self.base_name, self.fraction_name):
                fields.ignore(name, parameters.get(name, used))
        original_length = fields.raw.get('original_max_position_embeddings', self.original_length)
        parameters = {n: value for n, value in parameters.items() if n not in self.ignored}
        kind = parameters.get('rope_type') or parameters.get('type')
        if kind and kind in self.kind_aliases:
            parameters = {**parameters, 'rope_type': self.kind_aliases[kind]}
        return read_rope(
            parameters, base, fraction, fields, original_length, self.is_partial, self.kinds
        )

    def write(self, flat: Flat) -> Flat:
        parameters = write_rope(flat)
        fields_v4 = {self.base_name: parameters['rope_theta']}
        if parameters['rope_type'] != 'default':
            fields_v4['rope_scaling'] = {k: v for k, v in parameters.items() if k != 'rope_theta'}
        fraction = flat['attention.rope_fraction']
        if self.is_partial and (self.fraction != 1 or fraction != 1):
            parameters['partial_rotary_factor'] = fields_v4[self.fraction_name] = fraction
            if 'rope_scaling' in fields_v4:
                fields_v4['rope_scaling']['partial_rotary_factor'] = fraction
        return {'rope_parameters': parameters} | fields_v4 | write_original_length(parameters)


class OptionalRope(Rope):
    """RoPE, or no positions if rope_parameters has a rope_theta of null (OLMo Hybrid).

    transformers replaces a rope_parameters of null by its default.
    """

    def read(self, fields: ConfigFields) -> Flat:
        parameters = fields.take('rope_parameters', None) or {}
        theta, scaling = fields.take('rope_theta', None), fields.take('rope_scaling', None)
        if 'rope_theta' in parameters and (parameters['rope_theta'], theta, scaling) == (None,) * 3:
            return {'model.position': 'none'}
        return super().read(fields)

    def write(self, flat: Flat) -> Flat:
        if flat['model.position'] == 'none':
            return {'rope_parameters': {'rope_type': 'default', 'rope_theta': None}}
        return super().write(flat)


@dataclasses.dataclass(frozen=True)
class RotaryDim:
    """rotary_dim, the number of rotated features of a head (GPT-J). The base is fixed."""

    default: int = 64
    base: float = 10_000.0

    def read(self, fields: ConfigFields) -> Flat:
        rotated = fields.take('rotary_dim', self.default)
        head_dim = fields.take('n_embd') // fields.take('n_head')
        if rotated > head_dim or rotated % 2:
            raise ValueError(
                f'{FILE} has rotary_dim={rotated}; it must be even and at most {head_dim}, the '
                'number of features of a head'
            )
        return {
            'attention.rope_base': self.base,
            'attention.rope_fraction': rotated / head_dim,
        }

    def write(self, flat: Flat) -> Flat:
        fraction = flat['attention.rope_fraction']
        # Of models with other positions there is no fraction.
        return {'rotary_dim': round((fraction or 1) * flat['model.head_dim'])}


@dataclasses.dataclass(frozen=True)
class RopeByKind:
    """RoPE with a base for windowed layers and another for full layers (Gemma 3, OLMo 3).

    window: the entry that decides which layers have one. base, local_base: defaults of their class.
    local_name: of the local base in version 4; without it, files of version 4 have the default.
    """

    window: 'Window'
    base: float = 1_000_000.0
    local_base: float = 10_000.0
    local_name: str = 'rope_local_base_freq'

    def read(self, fields: ConfigFields) -> Flat:
        base = fields.take('rope_theta', None) or self.base
        local = fields.take(self.local_name, None) if self.local_name else None
        local = local or self.local_base
        parameters = fields.take('rope_parameters', None) or {}
        if not parameters.keys() <= {FULL, SLIDING}:
            raise ValueError(f'the keys of rope_parameters in {FILE} must be {FULL} and {SLIDING}')
        full = dict(parameters.get(FULL) or {}) | (fields.take('rope_scaling', None) or {})
        fields.ignore('truncate', True, full)  # their code looks for it beside FULL and SLIDING
        full.pop('truncate', None)
        fraction = fields.take('partial_rotary_factor', None) or 1.0
        window_fields = read_rope(parameters.get(SLIDING) or {}, local, fraction, fields)
        if 'attention.rope_scaling' in window_fields:
            raise ValueError(f'{FILE} scales the RoPE of {SLIDING}, which is not supported')
        full_fields = read_rope(full, base, fraction, fields)
        kinds = self.window.list_kinds(fields)
        if len({*kinds}) == 1:  # fewer layers than a period may all have a window
            return full_fields if FULL in kinds else window_fields
        if 'attention.rope_scaling' in full_fields or full_fields != window_fields:
            full_fields['attention.rope_local_base'] = window_fields['attention.rope_base']
        return full_fields

    def write(self, flat: Flat) -> Flat:
        full_parameters = write_rope(flat)
        full_parameters.pop('truncate', None)
        local = flat['attention.rope_local_base'] or full_parameters['rope_theta']
        window_parameters = {'rope_type': 'default', 'rope_theta': local}
        return {'rope_parameters': {FULL: full_parameters, SLIDING: window_parameters}}


@dataclasses.dataclass(frozen=True)
class NoRopeLayers:
    """no_rope_layers: 0 for layers without RoPE, here every `period`-th (SmolLM3)."""

    period: int = 4

    def read(self, fields: ConfigFields) -> Flat:
        has_rope = read_rope_layers(fields, self.period)
        # Our models only have a period; it is the place of the first layer without RoPE.
        period = has_rope.index(0) + 1 if 0 in has_rope else 0
        if period and has_rope != [int((i + 1) % period != 0) for i in range(len(has_rope))]:
            raise ValueError(
                f'the order of no_rope_layers in {FILE} is not supported: only every n-th layer '
                'may lack RoPE'
            )
        return {'attention.no_rope_every': period}

    def write(self, flat: Flat) -> Flat:
        period, layers = flat['attention.no_rope_every'], flat['model.n_layers']
        has_rope = [int(not period or (i + 1) % period != 0) for i in range(layers)]
        return {'no_rope_layers': has_rope, 'no_rope_layer_interval': period or layers + 1}


def read_rope_layers(fields: ConfigFields, period: int = 4) -> list[int]:
    """Returns 1 for each layer with RoPE, 0 for the others. period: default of their class."""
    layers = fields.raw.get('num_hidden_layers', 0)
    period = fields.take('no_rope_layer_interval', period)
    default_layers = [int(not period or (i + 1) % period != 0) for i in range(layers)]
    return fields.take('no_rope_layers', None) or default_layers


def read_rope(
    parameters: Mapping[str, Any],
    base: float,
    fraction: float,
    fields: ConfigFields,
    original_length: int | None = None,
    is_partial: bool = False,
    kinds: tuple[str, ...] = tuple(SCALING_OPTIONS),
) -> Flat:
    """Returns our fields of a rope_parameters, or of a rope_scaling.

    Args:
      parameters: the object.
      base: default base of the frequencies.
      fraction: default fraction of a head's features.
      fields: the whole config.json.
      original_length: takes precedence over the length in the object.
      is_partial: whether the model's code can rotate a part of the features.
      kinds: the scalings of the class.

    Returns:
      {'attention.rope_base': 10000.0, ...}.

    Raises:
      ValueError: for a scaling that transformers or our models do not have.
    """
    remaining = {name: value for name, value in parameters.items() if value is not None}
    kind = remaining.pop('rope_type', None) or remaining.get('type', 'default')
    remaining.pop('type', None)
    if kind not in kinds:
        # ntk: a name of other programs, whose rules differ.
        absence = '' if kind in SCALING_OPTIONS else ', which transformers does not support either'
        raise ValueError(f'{FILE} has rope_type={kind!r}{absence}; supported: {", ".join(kinds)}')
    fraction = float(remaining.pop('partial_rotary_factor', fraction))
    if fraction != 1 and not is_partial:
        if kind != 'default':
            raise ValueError(
                f'{FILE} has partial_rotary_factor={fraction} and rope_type={kind!r}, which '
                f'transformers cannot combine in a {fields.raw.get("model_type")}: its code '
                'rotates whole heads. Remove one of the two.'
            )
        fields.ignore('partial_rotary_factor', 1.0, {'partial_rotary_factor': fraction})
        fraction = 1.0
    options = {'rope_base': float(remaining.pop('rope_theta', base)), 'rope_fraction': fraction}
    if kind == 'yarn':
        remaining = replace_mscale(remaining, fields)
    name, longest = 'original_max_position_embeddings', fields.raw.get('max_position_embeddings')
    if name in SCALING_OPTIONS[kind]:
        remaining[name] = original_length or remaining.get(name, longest)
        if kind == 'longrope' and remaining[name] and longest:
            # transformers computes a missing factor of longrope from the two lengths.
            remaining.setdefault('factor', max(1.0, longest / remaining[name]))
    if kind != 'default':
        options['rope_scaling'] = kind
    if kind == 'dynamic':  # their code reads the length from the whole file alone
        fields.ignore(name, longest, remaining)
        remaining.pop(name, None)
        options[ORIGINAL] = fields.take('max_position_embeddings')
    for name, ours in SCALING_OPTIONS[kind].items():
        value = remaining.pop(name, None)
        if value is None and name not in OMITTABLE:
            raise ValueError(f'{FILE} with rope_type={kind!r} must have {name}')
        if value is not None:
            options[ours] = _convert_value(name, value)
    if remaining:
        names = ', '.join(map(format_value, remaining))
        raise ValueError(f'{FILE} has unknown rope_parameters: {names}')
    return {f'attention.{name}': value for name, value in options.items()}


def replace_mscale(parameters: Mapping[str, Any], fields: ConfigFields) -> dict[str, Any]:
    """Returns the parameters of YaRN with attention_factor in place of mscale and mscale_all_dim.

    transformers reads the two only together and without an attention_factor (arXiv:2405.04434).
    """
    names = ('mscale', 'mscale_all_dim')
    replaced = {name: value for name, value in parameters.items() if name not in names}
    mscale, mscale_all_dim = (parameters.get(name) for name in names)
    factor = parameters.get('factor')
    if mscale and mscale_all_dim and factor and 'attention_factor' not in parameters:
        log_factor = 0.1 * math.log(max(1.0, factor))
        replaced['attention_factor'] = (mscale * log_factor + 1) / (mscale_all_dim * log_factor + 1)
    else:
        for name in names:
            fields.ignore(name, None, parameters)
    return replaced


def _convert_value(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return ','.join(repr(float(number)) for number in value)
    if name == 'truncate':
        return bool(value)
    return int(value) if name.startswith('original') else float(value)


def write_rope(flat: Flat) -> Flat:
    """Returns the rope_parameters of full layers."""
    kind = flat['attention.rope_scaling']
    kind = 'default' if kind in (None, 'none') else kind
    parameters = {'rope_type': kind, 'rope_theta': flat['attention.rope_base']}
    for name, ours in SCALING_OPTIONS[kind].items():
        value = flat[f'attention.{ours}']
        if value is not None:
            is_list = name in ('short_factor', 'long_factor')
            parameters[name] = [float(n) for n in value.split(',')] if is_list else value
    return parameters


def write_original_length(parameters: Flat) -> Flat:
    """Returns the original length, which Phi-3 also has beside its rope_parameters."""
    name = 'original_max_position_embeddings'
    return {name: parameters[name]} if parameters['rope_type'] == 'longrope' else {}


def list_kinds(layers: int, period: int, place: int) -> list[str]:
    """Returns the kind of each layer.

    Args:
      layers: their number.
      period: of full layers; 0: all have a window.
      place: of the full layer in a period, from 1; 0: the last.
    """
    return [FULL if period and (i + 1) % period == place else SLIDING for i in range(layers)]


@dataclasses.dataclass(frozen=True)
class Window:
    """sliding_window and, in some families, the layers that have it.

    default: of their class. period: of full layers, unless the file lists the layers. has_types:
    whether the family lists layer_types. has_use: whether use_sliding_window enables the window.
    is_needed: whether their code fails without a number even if no layer has a window. is_no_rope:
    whether the windowed layers are by default the layers without RoPE. has_pattern: whether
    sliding_window_pattern gives the period.
    """

    default: int | None = None
    period: int = 0
    has_types: bool = False
    has_use: bool = False
    is_needed: bool = False
    is_no_rope: bool = False
    has_pattern: bool = False

    def read(self, fields: ConfigFields) -> Flat:
        window, layers = self.read_window(fields), fields.raw.get('num_hidden_layers', 0)
        default_kinds = self.default_types(fields, layers, window)
        listed_kinds = fields.take('layer_types', None)
        kinds = listed_kinds or default_kinds
        if unknown := sorted({*kinds} - {SLIDING, FULL}):
            raise ValueError(
                f'{FILE} has layer_types {", ".join(map(format_value, unknown))}; supported: '
                f'{SLIDING}, {FULL}'
            )
        if not self.has_types and kinds != default_kinds:
            raise ValueError(
                f'{FILE} has layer_types={listed_kinds!r}; all layers of a '
                f'{fields.raw.get("model_type")} must be {default_kinds[0]}'
            )
        if window is None or set(kinds) == {FULL}:
            if SLIDING in kinds:
                raise ValueError(
                    f'{FILE} has layer_types with {SLIDING}, so it must have a sliding_window'
                )
            return {}
        if set(kinds) == {SLIDING}:
            return {'attention.window': window}
        first, *later = [i for i, kind in enumerate(kinds) if kind == FULL]
        # A single full layer has any period that leaves no other.
        period = later[0] - first if later else max(first + 1, layers - first)
        place = (first + 1) % period
        if kinds != list_kinds(layers, period, place):
            raise ValueError(
                f'the order of layer_types in {FILE} is not supported: there must be one full '
                'layer, at the same place, in every n layers'
            )
        fields_read = {'attention.window': window, 'attention.full_every': period}
        return fields_read | ({'attention.full_at': place} if place else {})

    def read_window(self, fields: ConfigFields) -> int | None:
        """Returns the tokens of a window; None if the file disables it."""
        window = fields.take('sliding_window', self.default)
        if not fields.take('use_sliding_window', not self.has_use):
            return None  # some files then have a window of 0
        if window == 0:
            raise ValueError(f'{FILE} has sliding_window=0; it must be at least 1, or null')
        return window

    def list_kinds(self, fields: ConfigFields) -> list[str]:
        """Returns the kind of each layer: as the file lists it, or else by default."""
        layers = fields.raw.get('num_hidden_layers', 0)
        listed_kinds = fields.take('layer_types', None)
        return listed_kinds or self.default_types(fields, layers, self.read_window(fields))

    def default_types(self, fields: ConfigFields, layers: int, window: int | None) -> list[str]:
        """Returns the kinds of layers for a file that does not list them.

        Args:
          fields: of config.json.
          layers: their number.
          window: of the file, or None.
        """
        first = fields.take('max_window_layers', MAX_WINDOW_LAYERS) if self.has_use else 0
        pattern, period = 'sliding_window_pattern', self.period
        if self.has_pattern:
            period = fields.take(pattern, None) or period
        else:
            fields.ignore(pattern, period)
        if not self.has_types or (self.has_use and window is None):
            return [FULL if window is None else SLIDING] * layers
        if self.is_no_rope:
            return [FULL if has_rope else SLIDING for has_rope in read_rope_layers(fields)]
        return [
            FULL if i < first or (period and (i + 1) % period == 0) else SLIDING
            for i in range(layers)
        ]

    def write(self, flat: Flat) -> Flat:
        window, period = flat['attention.window'], flat['attention.full_every']
        written = {'sliding_window': window}
        if window is None and self.is_needed:
            # No layer uses it, but their code needs a number.
            written['sliding_window'] = flat['data.seq_len']
        if self.has_types:
            layers, place = flat['model.n_layers'], flat['attention.full_at'] or 0
            kinds = list_kinds(layers, period or 0, place)
            written['layer_types'] = [FULL] * layers if window is None else kinds
        if self.has_use:
            written |= {'use_sliding_window': window is not None, 'max_window_layers': 0}
        return written
