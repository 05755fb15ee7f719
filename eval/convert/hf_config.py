"""config.json of transformers (4 or 5) to fields of ours, and back.

A family (`eval.convert.hf_families`) lists entries, each of which reads fields of theirs and writes
them again. A field of theirs that no entry reads is an error that names it, unless nothing of what
a model computes depends on it (`NOT_READ`).
"""

import dataclasses
from collections.abc import Mapping
from typing import Any

from eval.convert.hf_files import is_dropout, shown
from lm.config.fields import FIELDS

Flat = dict[str, Any]  # {'model.d_model': 256, ...}
FILE = 'config.json'
QUERY_SCALAR = '@query_scalar'  # the q of q k / sqrt(q), where that is not the width of a head
MAX_POSITIONS = '@max_positions'
ZERO_BIASES = '@zero_biases'  # the part of a block whose biases are not in the files, and 0 here
NOTES = '@notes'  # fields of the file that transformers does not read
SLIDING, FULL = 'sliding_attention', 'full_attention'
# The first layers of a Qwen, which have no window if nothing else says so.
MAX_WINDOW_LAYERS = 28

# Nothing of what a model computes in evaluation depends on these.
_NOT_READ = (
    'architectures auto_map bos_token_id chunk_size_feed_forward dtype eos_token_id '
    'gradient_checkpointing id2label initializer_range is_decoder is_encoder_decoder '
    'is_llama_config label2id model_type n_ctx output_router_logits pad_token_id pretraining_tp '
    'problem_type reorder_and_upcast_attn return_dict router_aux_loss_coef router_jitter_noise '
    'tokenizer_class torch_dtype transformers.js_config transformers_version unk_token_id '
    'unsloth_version use_cache cache_implementation task_specific_params vocab_size '
    'initial_context_length original_max_position_embeddings output_attentions '
    'output_hidden_states sliding_window_size'
)
NOT_READ = frozenset(_NOT_READ.split())
BEGINNINGS = ('_', 'summary_')
MISSING = object()


class Fields:
    """The fields of a config.json, each of which must be taken.

    notes: sentences on those that transformers does not read either.
    """

    def __init__(self, raw: Mapping[str, Any]):
        self.raw, self.taken, self.notes = raw, set(NOT_READ), []

    def take(self, name: str, default: Any = MISSING) -> Any:
        """Returns a field, or `default` where it is left out. ValueError where there is neither."""
        self.taken.add(name)
        if name not in self.raw and default is MISSING:
            raise ValueError(f'{FILE} lacks {name}')
        return self.raw.get(name, default)

    def ignore(self, name: str, used: Any, section: Mapping[str, Any] | None = None) -> None:
        """Leaves out a field that the code of transformers does not read in this family.

        Args:
          name: the field.
          used: its value in what that code computes; another one in the file makes a note.
          section: the object of config.json that holds it; default all of it.
        """
        if section is None:
            self.taken.add(name)
        value = (self.raw if section is None else section).get(name)
        if value not in (None, used):
            self.notes.append(
                f'{FILE} has {name}={value!r}, which transformers does not read in a '
                f'{self.raw.get("model_type")}: the model is imported as it computes it, with '
                f'{used!r}'
            )

    def left(self) -> list[str]:
        """Returns 'name=value' of the fields that nothing took."""
        return [
            f'{name}={shown(value)}'
            for name, value in self.raw.items()
            if name not in self.taken and value is not None
            if not name.startswith(BEGINNINGS) and not is_dropout(name)
        ]


def dropouts(raw: Mapping[str, Any]) -> list[str]:
    """Returns 'name=value' of the dropouts that a model was trained with."""
    of = {name: value for name, value in raw.items() if is_dropout(name) and value}
    return [f'{name}={value}' for name, value in of.items() if not name.startswith(BEGINNINGS)]


@dataclasses.dataclass(frozen=True)
class Same:
    """A number or a flag that both have.

    default: that of their class. none: what their null is. also: another name of it, which other
    versions read.
    """

    name: str
    path: str
    default: Any = MISSING
    none: Any = None
    also: str = ''

    def read(self, fields: Fields) -> Flat:
        default = fields.take(self.also, self.default) if self.also else self.default
        value = fields.take(self.name, default)
        value = self.none if value is None else value
        if float in FIELDS[self.path].types and type(value) is int:
            value = float(value)
        return {self.path: value}

    def write(self, flat: Flat) -> Flat:
        value = flat[self.path]
        value = None if self.none is not None and value == self.none else value
        return {self.name: value} | ({self.also: value} if self.also else {})


@dataclasses.dataclass(frozen=True)
class Fixed:
    """A field that must have this value, since our models have no other; others mean the same."""

    name: str
    value: Any
    others: tuple[Any, ...] = ()

    def read(self, fields: Fields) -> Flat:
        found = fields.take(self.name, self.value)
        if found not in (self.value, *self.others):
            raise ValueError(
                f'{FILE} has {self.name}={found!r}, and our models know {self.value!r} alone'
            )
        return {}

    def write(self, flat: Flat) -> Flat:
        return {self.name: self.value}


@dataclasses.dataclass(frozen=True)
class Ignored:
    """A field that their class has and the code of its model does not read."""

    name: str
    value: Any

    def read(self, fields: Fields) -> Flat:
        fields.ignore(self.name, self.value)
        return {}

    def write(self, flat: Flat) -> Flat:
        return {self.name: self.value}


@dataclasses.dataclass(frozen=True)
class SameTwice:
    """Another name of a field that transformers does not read, beside the one that it does."""

    name: str
    read_name: str

    def read(self, fields: Fields) -> Flat:
        fields.ignore(self.name, fields.raw.get(self.read_name))
        return {}

    def write(self, flat: Flat) -> Flat:
        return {}


@dataclasses.dataclass(frozen=True)
class Named:
    """A choice that has other names here. The first of equal ones is written."""

    name: str
    path: str
    names: Mapping[Any, str]
    default: Any

    def read(self, fields: Fields) -> Flat:
        found = fields.take(self.name, self.default)
        if found not in self.names:
            raise ValueError(
                f'{FILE} has {self.name}={found!r}; known: {", ".join(map(str, self.names))}'
            )
        return {self.path: self.names[found]}

    def write(self, flat: Flat) -> Flat:
        there = {ours: name for name, ours in reversed(self.names.items())}
        return {self.name: there.get(flat[self.path], self.default)}


@dataclasses.dataclass(frozen=True)
class Inner:
    """The hidden width of the MLP, four times the model's where it is left out (GPT-2)."""

    name: str
    width: str

    def read(self, fields: Fields) -> Flat:
        width = fields.take(self.width)
        return {'model.d_ff': fields.take(self.name, None) or 4 * width}

    def write(self, flat: Flat) -> Flat:
        return {self.name: flat['model.d_ff']}


@dataclasses.dataclass(frozen=True)
class Positions:
    """The longest row. default: of their class. is_table: of a table of positions, which has just
    so many.
    """

    name: str = 'max_position_embeddings'
    default: int = 2048
    is_table: bool = False

    def read(self, fields: Fields) -> Flat:
        longest = fields.take(self.name, self.default)
        return {'data.seq_len' if self.is_table else MAX_POSITIONS: longest}

    def write(self, flat: Flat) -> Flat:
        longest = flat['data.seq_len']
        if flat['attention.rope_scaling'] in ('llama3', 'longrope', 'yarn'):
            longer = flat['attention.rope_factor'] * flat['attention.rope_original_length']
            longest = max(longest, round(longer))
        return {self.name: longest}


@dataclasses.dataclass(frozen=True)
class NoDropout:
    """A dropout of training: not read, and 0 where it is written."""

    name: str

    def read(self, fields: Fields) -> Flat:
        return {}

    def write(self, flat: Flat) -> Flat:
        return {self.name: 0.0}


@dataclasses.dataclass(frozen=True)
class HeadDim:
    """The width of a head. default: that of their class; None: d_model / n_heads."""

    default: int | None = None

    def read(self, fields: Fields) -> Flat:
        even = fields.take('hidden_size') // fields.take('num_attention_heads')
        return {'model.head_dim': fields.take('head_dim', self.default) or even}

    def write(self, flat: Flat) -> Flat:
        return {'head_dim': flat['model.head_dim']}


@dataclasses.dataclass(frozen=True)
class QueryScalar:
    """q of logits q k / sqrt(q). Ours are by the width of a head: weights take up the rest."""

    default: int

    def read(self, fields: Fields) -> Flat:
        return {QUERY_SCALAR: fields.take('query_pre_attn_scalar', self.default)}

    def write(self, flat: Flat) -> Flat:
        return {'query_pre_attn_scalar': flat['model.head_dim']}


@dataclasses.dataclass(frozen=True)
class Biases:
    """attention_bias and mlp_bias. Ours are of both or of none: where theirs are of one, those of
    the other are 0.
    """

    def read(self, fields: Fields) -> Flat:
        there = {
            'attention': fields.take('attention_bias', False),
            'mlp': fields.take('mlp_bias', False),
        }
        lacking = [part for part, has in there.items() if not has]
        found = {'model.bias': len(lacking) < len(there)}
        return found | ({ZERO_BIASES: lacking[0]} if len(lacking) == 1 else {})

    def write(self, flat: Flat) -> Flat:
        return {'attention_bias': flat['model.bias'], 'mlp_bias': flat['model.bias']}


@dataclasses.dataclass(frozen=True)
class Mxfp4:
    """quantization_config of weights in four bits, which are read and never written (gpt-oss)."""

    def read(self, fields: Fields) -> Flat:
        given = fields.take('quantization_config', None) or {}
        if (method := given.get('quant_method', 'mxfp4')) != 'mxfp4':
            raise ValueError(f'{FILE} has quant_method={method!r}, and mxfp4 alone is read')
        return {}

    def write(self, flat: Flat) -> Flat:
        return {}


FACTOR, ORIGINAL = 'rope_factor', 'rope_original_length'
OF_TURNS = {'factor': FACTOR, 'original_max_position_embeddings': ORIGINAL}
# Their names of the options of a scaling of RoPE, with ours.
OF_SCALING = {
    'default': {},
    'linear': {'factor': FACTOR},
    'llama3': OF_TURNS
    | {
        'low_freq_factor': 'rope_low_frequency_factor',
        'high_freq_factor': 'rope_high_frequency_factor',
    },
    'longrope': OF_TURNS
    | {
        'short_factor': 'rope_short_factor',
        'long_factor': 'rope_long_factor',
        'attention_factor': 'rope_attention_factor',
    },
    'yarn': OF_TURNS
    | {
        'beta_fast': 'rope_beta_fast',
        'beta_slow': 'rope_beta_slow',
        'truncate': 'rope_truncate',
        'attention_factor': 'rope_attention_factor',
    },
}
# Those that may be left out: ours then have the same value, or compute it.
MAY_LACK = ('attention_factor', 'beta_fast', 'beta_slow', 'truncate')


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
    kinds: tuple[str, ...] = tuple(OF_SCALING)
    usual: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    original: int | None = None

    def read(self, fields: Fields) -> Flat:
        base = fields.take(self.base_name, None) or self.base
        fraction = fields.take(self.fraction_name, None)
        fraction = self.fraction if fraction is None else fraction
        four, five = fields.take('rope_scaling', None), fields.take('rope_parameters', None)
        given = four or five or self.usual
        for name, used in (('rope_theta', base), ('partial_rotary_factor', fraction)):
            if name not in (self.base_name, self.fraction_name):
                fields.ignore(name, given.get(name, used))
        original = fields.raw.get('original_max_position_embeddings', self.original)
        return read_rope(given, base, fraction, fields, original, self.is_partial, self.kinds)

    def write(self, flat: Flat) -> Flat:
        given = written_rope(flat)
        four = {self.base_name: given['rope_theta']}
        if given['rope_type'] != 'default':
            four['rope_scaling'] = {k: v for k, v in given.items() if k != 'rope_theta'}
        fraction = flat['attention.rope_fraction']
        if self.is_partial and (self.fraction != 1 or fraction != 1):
            given['partial_rotary_factor'] = four[self.fraction_name] = fraction
            if 'rope_scaling' in four:
                four['rope_scaling']['partial_rotary_factor'] = fraction
        return {'rope_parameters': given} | four | of_long(given)


@dataclasses.dataclass(frozen=True)
class RopeByKind:
    """RoPE with one base in windows, and another, perhaps scaled, in full layers (Gemma 3)."""

    base: float = 1_000_000.0
    local_base: float = 10_000.0

    def read(self, fields: Fields) -> Flat:
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
        given = written_rope(flat)
        given.pop('truncate', None)
        local = flat['attention.rope_local_base'] or given['rope_theta']
        of_window = {'rope_type': 'default', 'rope_theta': local}
        return {'rope_parameters': {FULL: given, SLIDING: of_window}}


@dataclasses.dataclass(frozen=True)
class Unturned:
    """no_rope_layers: 0 for layers that are not turned, each n-th of them here (SmolLM3)."""

    every: int = 4

    def read(self, fields: Fields) -> Flat:
        turned = turned_layers(fields, self.every)
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


def turned_layers(fields: Fields, every: int = 4) -> list[int]:
    """Returns 1 for each layer that RoPE turns, 0 for the others. every: of their class."""
    layers = fields.raw.get('num_hidden_layers', 0)
    every = fields.take('no_rope_layer_interval', every)
    usual = [int(not every or (i + 1) % every != 0) for i in range(layers)]
    return fields.take('no_rope_layers', None) or usual


def read_rope(
    given: Mapping[str, Any],
    base: float,
    fraction: float,
    fields: Fields,
    original: int | None = None,
    is_partial: bool = False,
    kinds: tuple[str, ...] = tuple(OF_SCALING),
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
    left = {name: value for name, value in given.items() if value is not None}
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
    if name in OF_SCALING[kind]:
        left[name] = original or left.get(name, longest)
        if kind == 'longrope' and left[name] and longest:
            left.setdefault('factor', max(1.0, longest / left[name]))
    if kind != 'default':
        found['rope_scaling'] = kind
    for name, ours in OF_SCALING[kind].items():
        value = left.pop(name, None)
        if value is None and name not in MAY_LACK:
            raise ValueError(f'{FILE} has rope_type={kind!r} without {name}')
        if value is not None:
            found[ours] = _ours(name, value)
    if left:
        raise ValueError(f'{FILE} has rope_parameters that are not known: {", ".join(left)}')
    return {f'attention.{name}': value for name, value in found.items()}


def _ours(name: str, value: Any) -> Any:
    if isinstance(value, list):
        return ','.join(repr(float(number)) for number in value)
    if name == 'truncate':
        return bool(value)
    return int(value) if name.startswith('original') else float(value)


def written_rope(flat: Flat) -> Flat:
    """Returns the rope_parameters of full layers."""
    kind = flat['attention.rope_scaling']
    kind = 'default' if kind in (None, 'none') else kind
    given = {'rope_type': kind, 'rope_theta': flat['attention.rope_base']}
    for name, ours in OF_SCALING[kind].items():
        value = flat[f'attention.{ours}']
        if value is not None:
            is_list = name in ('short_factor', 'long_factor')
            given[name] = [float(n) for n in value.split(',')] if is_list else value
    return given


def of_long(given: Flat) -> Flat:
    """Returns the original length, which Phi-3 has beside its rope_parameters too."""
    name = 'original_max_position_embeddings'
    return {name: given[name]} if given['rope_type'] == 'longrope' else {}


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
    every: int = 0
    has_types: bool = False
    has_use: bool = False
    is_needed: bool = False
    is_unturned: bool = False
    has_pattern: bool = False

    def read(self, fields: Fields) -> Flat:
        layers = fields.raw.get('num_hidden_layers', 0)
        window = fields.take('sliding_window', self.default)
        if not fields.take('use_sliding_window', not self.has_use):
            window = None
        usual = self.usual_types(fields, layers, window)
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

    def usual_types(self, fields: Fields, layers: int, window: int | None) -> list[str]:
        """Returns the kinds of layers of a file that does not name them."""
        first = fields.take('max_window_layers', MAX_WINDOW_LAYERS) if self.has_use else 0
        pattern, every = 'sliding_window_pattern', self.every
        if self.has_pattern:
            every = fields.take(pattern, None) or every
        else:
            fields.ignore(pattern, every)
        if not self.has_types or (self.has_use and window is None):
            return [FULL if window is None else SLIDING] * layers
        if self.is_unturned:
            return [FULL if turned else SLIDING for turned in turned_layers(fields)]
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
