"""RoPE and the windows of attention in a config.json, to fields of ours and back.

Each is an entry of a family, as those of `eval.convert.hf_config`; here, because both depend on the
layer.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eval.convert.hf_config import FILE, ConfigFields, Flat

SLIDING, FULL = 'sliding_attention', 'full_attention'
# The first layers of a Qwen, which have no window if nothing else says so.
MAX_WINDOW_LAYERS = 28
FACTOR, ORIGINAL = 'rope_factor', 'rope_original_length'
LENGTH_OPTIONS = {'factor': FACTOR, 'original_max_position_embeddings': ORIGINAL}
# Their names of the options of a scaling of RoPE, with ours.
SCALING_OPTIONS = {
    'default': {},
    'linear': {'factor': FACTOR},
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
# Those that may be left out: ours then have the same value, or compute it.
OMITTABLE = ('attention_factor', 'beta_fast', 'beta_slow', 'truncate')


@dataclasses.dataclass(frozen=True)
class Rope:
    """rope_parameters (transformers 5), or rope_theta and rope_scaling (4), which go first.

    base, fraction: those of their class; base_name, fraction_name: of fields of version 4.
    is_partial: whether the code of the model turns partial_rotary_factor of a head's features. Most
    turn all of them, whatever that field says, and fail where frequencies are scaled too.
    kinds: scalings that their class takes. usual, original: of their class, the rope_parameters and
    the original_max_position_embeddings beside them, which goes before the one in them.
    """

    base: float = 10_000.0
    fraction: float = 1.0
    fraction_name: str = 'partial_rotary_factor'
    base_name: str = 'rope_theta'
    is_partial: bool = False
    kinds: tuple[str, ...] = tuple(SCALING_OPTIONS)
    default_parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    original_length: int | None = None

    def read(self, fields: ConfigFields) -> Flat:
        base = fields.take(self.base_name, None) or self.base
        fraction = fields.take(self.fraction_name, None)
        fraction = self.fraction if fraction is None else fraction
        four, five = fields.take('rope_scaling', None), fields.take('rope_parameters', None)
        given = four or five or self.default_parameters
        for name, used in (('rope_theta', base), ('partial_rotary_factor', fraction)):
            if name not in (self.base_name, self.fraction_name):
                fields.ignore(name, given.get(name, used))
        original = fields.raw.get('original_max_position_embeddings', self.original_length)
        return read_rope(given, base, fraction, fields, original, self.is_partial, self.kinds)

    def write(self, flat: Flat) -> Flat:
        given = write_rope(flat)
        four = {self.base_name: given['rope_theta']}
        if given['rope_type'] != 'default':
            four['rope_scaling'] = {k: v for k, v in given.items() if k != 'rope_theta'}
        fraction = flat['attention.rope_fraction']
        if self.is_partial and (self.fraction != 1 or fraction != 1):
            given['partial_rotary_factor'] = four[self.fraction_name] = fraction
            if 'rope_scaling' in four:
                four['rope_scaling']['partial_rotary_factor'] = fraction
        return {'rope_parameters': given} | four | write_original_length(given)


@dataclasses.dataclass(frozen=True)
class RopeByKind:
    """RoPE with one base in windows, and another, perhaps scaled, in full layers (Gemma 3)."""

    base: float = 1_000_000.0
    local_base: float = 10_000.0

    def read(self, fields: ConfigFields) -> Flat:
        base = fields.take('rope_theta', None) or self.base
        local = fields.take('rope_local_base_freq', None) or self.local_base
        given = fields.take('rope_parameters', None) or {}
        if not given.keys() <= {FULL, SLIDING}:
            raise ValueError(f'{FILE} has rope_parameters that are not by {FULL} and {SLIDING}')
        full = dict(given.get(FULL) or {}) | (fields.take('rope_scaling', None) or {})
        fields.ignore('truncate', True, full)  # their code looks for it beside FULL and SLIDING
        full.pop('truncate', None)
        fraction = fields.take('partial_rotary_factor', None) or 1.0
        of_window = read_rope(given.get(SLIDING) or {}, local, fraction, fields)
        if 'attention.rope_scaling' in of_window:
            raise ValueError(f'{FILE} scales the RoPE of {SLIDING}, which our models do not')
        found = read_rope(full, base, fraction, fields)
        if 'attention.rope_scaling' in found or found != of_window:
            found['attention.rope_local_base'] = of_window['attention.rope_base']
        return found

    def write(self, flat: Flat) -> Flat:
        given = write_rope(flat)
        given.pop('truncate', None)
        local = flat['attention.rope_local_base'] or given['rope_theta']
        of_window = {'rope_type': 'default', 'rope_theta': local}
        return {'rope_parameters': {FULL: given, SLIDING: of_window}}


@dataclasses.dataclass(frozen=True)
class NoRopeLayers:
    """no_rope_layers: 0 for layers that are not turned, each n-th of them here (SmolLM3)."""

    period: int = 4

    def read(self, fields: ConfigFields) -> Flat:
        turned = read_rope_layers(fields, self.period)
        every = turned.index(0) + 1 if 0 in turned else 0
        if every and turned != [int((i + 1) % every != 0) for i in range(len(turned))]:
            raise ValueError(
                f'{FILE} has no_rope_layers in an order that our models lack: each n-th has none'
            )
        return {'attention.no_rope_every': every}

    def write(self, flat: Flat) -> Flat:
        every, layers = flat['attention.no_rope_every'], flat['model.n_layers']
        turned = [int(not every or (i + 1) % every != 0) for i in range(layers)]
        return {'no_rope_layers': turned, 'no_rope_layer_interval': every or layers + 1}


def read_rope_layers(fields: ConfigFields, period: int = 4) -> list[int]:
    """Returns 1 for each layer that RoPE turns, 0 for the others. every: of their class."""
    layers = fields.raw.get('num_hidden_layers', 0)
    period = fields.take('no_rope_layer_interval', period)
    usual = [int(not period or (i + 1) % period != 0) for i in range(layers)]
    return fields.take('no_rope_layers', None) or usual


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
      given: the object.
      base: of frequencies, where the object has none.
      fraction: of the features of a head, where the object has none.
      fields: the whole config.json.
      original: the original length, if that of the object does not count.
      is_partial: whether the code of the model turns a part of the features.
      kinds: the scalings that the class takes.

    Returns:
      {'attention.rope_base': 10000.0, ...}.

    Raises:
      ValueError: for a scaling that transformers or our models do not have.
    """
    left = {name: value for name, value in parameters.items() if value is not None}
    kind = left.pop('rope_type', None) or left.get('type', 'default')
    left.pop('type', None)
    if kind not in kinds:
        raise ValueError(f'{FILE} has rope_type={kind!r}; known: {", ".join(kinds)}')
    fraction = float(left.pop('partial_rotary_factor', fraction))
    if fraction != 1 and not is_partial:
        if kind != 'default':
            raise ValueError(
                f'{FILE} has partial_rotary_factor={fraction} with rope_type={kind!r}: '
                f'transformers cannot run such a {fields.raw.get("model_type")}, whose code turns '
                'whole heads. Take one of the two out.'
            )
        fields.ignore('partial_rotary_factor', 1.0, {'partial_rotary_factor': fraction})
        fraction = 1.0
    found = {'rope_base': float(left.pop('rope_theta', base)), 'rope_fraction': fraction}
    name, longest = 'original_max_position_embeddings', fields.raw.get('max_position_embeddings')
    if name in SCALING_OPTIONS[kind]:
        left[name] = original_length or left.get(name, longest)
        if kind == 'longrope' and left[name] and longest:
            left.setdefault('factor', max(1.0, longest / left[name]))
    if kind != 'default':
        found['rope_scaling'] = kind
    for name, ours in SCALING_OPTIONS[kind].items():
        value = left.pop(name, None)
        if value is None and name not in OMITTABLE:
            raise ValueError(f'{FILE} has rope_type={kind!r} without {name}')
        if value is not None:
            found[ours] = _convert_value(name, value)
    if left:
        raise ValueError(f'{FILE} has rope_parameters that are not known: {", ".join(left)}')
    return {f'attention.{name}': value for name, value in found.items()}


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
    given = {'rope_type': kind, 'rope_theta': flat['attention.rope_base']}
    for name, ours in SCALING_OPTIONS[kind].items():
        value = flat[f'attention.{ours}']
        if value is not None:
            is_list = name in ('short_factor', 'long_factor')
            given[name] = [float(n) for n in value.split(',')] if is_list else value
    return given


def write_original_length(parameters: Flat) -> Flat:
    """Returns the original length, which Phi-3 has beside its rope_parameters too."""
    name = 'original_max_position_embeddings'
    return {name: parameters[name]} if parameters['rope_type'] == 'longrope' else {}


@dataclasses.dataclass(frozen=True)
class Window:
    """sliding_window and, where families have them, the layers that it is of.

    default: of their class. every: each so-manieth layer has none, where nothing else says so.
    has_types: whether the family lists layer_types. has_use: whether use_sliding_window turns it
    on. is_needed: whether their code fails without a number, though no layer has a window.
    is_unturned: whether windows are those of layers without RoPE, where nothing else says so.
    has_pattern: whether sliding_window_pattern says every.
    """

    default: int | None = None
    period: int = 0
    has_types: bool = False
    has_use: bool = False
    is_needed: bool = False
    is_no_rope: bool = False
    has_pattern: bool = False

    def read(self, fields: ConfigFields) -> Flat:
        layers = fields.raw.get('num_hidden_layers', 0)
        window = fields.take('sliding_window', self.default)
        if not fields.take('use_sliding_window', not self.has_use):
            window = None
        usual = self.default_types(fields, layers, window)
        named = fields.take('layer_types', None)
        kinds = named or usual
        if strange := sorted({*kinds} - {SLIDING, FULL}):
            raise ValueError(f'{FILE} has layer_types {", ".join(strange)}, which our models lack')
        if not self.has_types and kinds != usual:
            raise ValueError(
                f'{FILE} has layer_types={named!r}, and all layers of a '
                f'{fields.raw.get("model_type")} are {usual[0]}'
            )
        if window is None or set(kinds) == {FULL}:
            if SLIDING in (named or ()):
                raise ValueError(f'{FILE} has layer_types with {SLIDING}, and no sliding_window')
            return {}
        if set(kinds) == {SLIDING}:
            return {'attention.window': window}
        every = kinds.index(FULL) + 1
        if kinds != [SLIDING if (i + 1) % every else FULL for i in range(layers)]:
            raise ValueError(
                f'{FILE} has layer_types in an order that our models lack: they have full layers '
                'at each n-th place'
            )
        return {'attention.window': window, 'attention.full_every': every}

    def default_types(self, fields: ConfigFields, layers: int, window: int | None) -> list[str]:
        """Returns the kinds of layers of a file that does not name them."""
        first = fields.take('max_window_layers', MAX_WINDOW_LAYERS) if self.has_use else 0
        pattern, every = 'sliding_window_pattern', self.period
        if self.has_pattern:
            every = fields.take(pattern, None) or every
        else:
            fields.ignore(pattern, every)
        if not self.has_types or (self.has_use and window is None):
            return [FULL if window is None else SLIDING] * layers
        if self.is_no_rope:
            return [FULL if turned else SLIDING for turned in read_rope_layers(fields)]
        return [
            FULL if i < first or (every and (i + 1) % every == 0) else SLIDING
            for i in range(layers)
        ]

    def write(self, flat: Flat) -> Flat:
        window, every = flat['attention.window'], flat['attention.full_every']
        found = {'sliding_window': window}
        if window is None and self.is_needed:
            found['sliding_window'] = flat['data.seq_len']
        if self.has_types:
            found['layer_types'] = [
                FULL if window is None or (every and (i + 1) % every == 0) else SLIDING
                for i in range(flat['model.n_layers'])
            ]
        if self.has_use:
            found |= {'use_sliding_window': window is not None, 'max_window_layers': 0}
        return found
