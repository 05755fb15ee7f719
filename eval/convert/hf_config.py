"""Converts fields of a config.json of transformers (4 or 5) to our fields, and back.

A family (`eval.convert.families`) lists entries. Each entry reads fields of config.json and
writes them again. A field that no entry reads is an error, unless no number depends on it
(`eval.convert.hf_ignored`): an unknown field may change the model.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from eval.convert.hf_files import format_value, is_dropout
from eval.convert.hf_ignored import IGNORED_FIELDS, IGNORED_PREFIXES, find_reason, is_neutral
from lm.config.fields import FIELDS

Flat = dict[str, Any]  # {'model.d_model': 256, ...}
FILE = 'config.json'
QUERY_SCALAR = '@query_scalar'  # the s of q k / sqrt(s), if it is not the width of a head
MAX_POSITIONS = '@max_positions'
ZERO_BIASES = '@zero_biases'  # {part: biases of it that are 0 here, and not in the files}
# Factors between the weights of the files and their logits, which an import writes into weights.
ATTENTION_FACTOR, EMBEDDING_FACTOR = '@attention_factor', '@embedding_factor'
BRANCH_FACTOR, LOGIT_DIVISOR = '@branch_factor', '@logit_divisor'
FACTOR_FIELDS = (
    QUERY_SCALAR,
    ATTENTION_FACTOR,
    EMBEDDING_FACTOR,
    BRANCH_FACTOR,
    LOGIT_DIVISOR,
)
LAYERS = '@layers'  # BlockNames of each block, in what an export writes
NOTES = '@notes'  # fields of the file that transformers does not read

MISSING = object()


class ConfigFields:
    """The fields of a config.json; every field must be taken.

    raw: the parsed file. taken: names of the fields that were taken. notes: sentences about fields
    that transformers does not read either.
    """

    def __init__(self, raw: Mapping[str, Any]):
        self.raw, self.taken, self.notes = raw, set(IGNORED_FIELDS), []

    def take(self, name: str, default: Any = MISSING) -> Any:
        """Returns a field, or `default` if it is missing. Raises ValueError without a default."""
        self.taken.add(name)
        if name not in self.raw and default is MISSING:
            raise ValueError(f'{FILE} must have the field {name}')
        return self.raw.get(name, default)

    def ignore(self, name: str, used: Any, section: Mapping[str, Any] | None = None) -> None:
        """Ignores a field that the code of transformers does not read in this family.

        Args:
          name: the field.
          used: the value that the code uses; a different value in the file makes a note.
          section: the object of config.json that holds the field; None: the whole file.
        """
        if section is None:
            self.taken.add(name)
        value = (self.raw if section is None else section).get(name)
        if value not in (None, used):
            self.notes.append(
                f'{FILE} has {name}={value!r}, which transformers ignores in a '
                f'{self.raw.get("model_type")}: the import uses {used!r}, like transformers'
            )

    def list_unread(self) -> list[str]:
        """Returns 'name=value' for the fields that were not taken and may change the model."""
        return [
            f'{name}={format_value(value)}'
            for name, value in self._iterate_left()
            if find_reason(name) is None
        ]

    def list_notes(self) -> list[str]:
        """Returns the notes, with a single note on all fields on which no number depends."""
        reasons: dict[str, list[str]] = {}
        for name, _ in self._iterate_left():
            if reason := find_reason(name):
                reasons.setdefault(reason, []).append(name)
        parts = [f'{", ".join(names)} ({reason})' for reason, names in reasons.items()]
        if not parts:
            return self.notes
        return [
            *self.notes,
            f'{FILE} has fields without effect on the model, which were skipped: '
            + '; '.join(parts),
        ]

    def _iterate_left(self) -> Iterator[tuple[str, Any]]:
        for name, value in self.raw.items():
            is_read = name in self.taken or name.startswith(IGNORED_PREFIXES) or is_dropout(name)
            if not is_read and value is not None and not is_neutral(name, value):
                yield name, value


def list_dropouts(raw: Mapping[str, Any]) -> list[str]:
    """Returns 'name=value' for the dropouts that a model was trained with."""
    dropouts = {name: value for name, value in raw.items() if is_dropout(name) and value}
    return [
        f'{name}={value}'
        for name, value in dropouts.items()
        if not name.startswith(IGNORED_PREFIXES)
    ]


class ConfigEntry:
    """Converts fields of a config.json to our fields, and back. The default is no fields."""

    def read(self, fields: ConfigFields) -> Flat:
        return {}

    def write(self, flat: Flat) -> Flat:
        return {}


@dataclasses.dataclass(frozen=True)
class SharedField(ConfigEntry):
    """A number or a flag of both.

    name: in config.json. path: our field. default: of their class. null_value: the meaning of null.
    alias: another name in config.json, read by other versions.
    """

    name: str
    path: str
    default: Any = MISSING
    null_value: Any = None
    alias: str = ''

    def read(self, fields: ConfigFields) -> Flat:
        default = fields.take(self.alias, self.default) if self.alias else self.default
        value = fields.take(self.name, default)
        value = self.null_value if value is None else value
        # A file may have 10000 for 10000.0.
        if float in FIELDS[self.path].types and type(value) is int:
            value = float(value)
        return {self.path: value}

    def write(self, flat: Flat) -> Flat:
        value = flat[self.path]
        value = None if self.null_value is not None and value == self.null_value else value
        # Both names, as each version of transformers reads only its own.
        return {self.name: value} | ({self.alias: value} if self.alias else {})


@dataclasses.dataclass(frozen=True)
class FixedField(ConfigEntry):
    """A field that must have this value, or an equivalent value, since our models have no other."""

    name: str
    value: Any
    equivalents: tuple[Any, ...] = ()

    def read(self, fields: ConfigFields) -> Flat:
        value = fields.take(self.name, self.value)
        if value not in (self.value, *self.equivalents):
            raise ValueError(f'{FILE} has {self.name}={value!r}; only {self.value!r} is supported')
        return {}

    def write(self, flat: Flat) -> Flat:
        return {self.name: self.value}


@dataclasses.dataclass(frozen=True)
class IgnoredField(FixedField):
    """A field of their class that the code of its model does not read."""

    def read(self, fields: ConfigFields) -> Flat:
        fields.ignore(self.name, self.value)
        return {}


@dataclasses.dataclass(frozen=True)
class ForeignField(ConfigEntry):
    """A field of other programs, with the value that all models of the family have.

    No class of transformers has it: it is read with this value alone, and never written.
    """

    name: str
    value: Any

    def read(self, fields: ConfigFields) -> Flat:
        if fields.raw.get(self.name) == self.value:
            fields.taken.add(self.name)
        return {}


@dataclasses.dataclass(frozen=True)
class AliasField(ConfigEntry):
    """Another name of a field. transformers reads only `read_name`."""

    name: str
    read_name: str

    def read(self, fields: ConfigFields) -> Flat:
        fields.ignore(self.name, fields.raw.get(self.read_name))
        return {}


@dataclasses.dataclass(frozen=True)
class ChoiceField(ConfigEntry):
    """A choice with other names here. Of several equal names the first is written."""

    name: str
    path: str
    names: dict[Any, str]
    default: Any

    def read(self, fields: ConfigFields) -> Flat:
        theirs = fields.take(self.name, self.default)
        if theirs not in self.names:
            raise ValueError(
                f'{FILE} has {self.name}={theirs!r}; supported: {", ".join(map(str, self.names))}'
            )
        return {self.path: self.names[theirs]}

    def write(self, flat: Flat) -> Flat:
        # Reversed, so that the first of several equal names is the last to be set.
        to_theirs = {ours: name for name, ours in reversed(self.names.items())}
        return {self.name: to_theirs.get(flat[self.path], self.default)}


@dataclasses.dataclass(frozen=True)
class HiddenWidth(ConfigEntry):
    """The hidden width of the MLP; four times the model's width if it is missing (GPT-2)."""

    name: str
    width: str

    def read(self, fields: ConfigFields) -> Flat:
        width = fields.take(self.width)
        return {'model.d_ff': fields.take(self.name, None) or 4 * width}

    def write(self, flat: Flat) -> Flat:
        return {self.name: flat['model.d_ff']}


@dataclasses.dataclass(frozen=True)
class MaxPositions(ConfigEntry):
    """The maximum length of a row.

    default: of their class. is_table: whether positions are a table of exactly this length.
    """

    name: str = 'max_position_embeddings'
    default: int = 2048
    is_table: bool = False

    def read(self, fields: ConfigFields) -> Flat:
        longest = fields.take(self.name, self.default)
        return {'data.seq_len' if self.is_table else MAX_POSITIONS: longest}

    def write(self, flat: Flat) -> Flat:
        longest = flat['data.seq_len']
        if flat['attention.rope_scaling'] == 'dynamic':
            # Beyond this length the base grows.
            return {self.name: flat['attention.rope_original_length']}
        if flat['attention.rope_scaling'] in ('llama3', 'longrope', 'yarn'):
            # data.seq_len may be cut to the rows of training; the model reads up to this length.
            longer = flat['attention.rope_factor'] * flat['attention.rope_original_length']
            longest = max(longest, round(longer))
        return {self.name: longest}


@dataclasses.dataclass(frozen=True)
class NoDropout(ConfigEntry):
    """A dropout of training: not read, and written as 0."""

    name: str

    def write(self, flat: Flat) -> Flat:
        return {self.name: 0.0}


@dataclasses.dataclass(frozen=True)
class HeadDim(ConfigEntry):
    """The width of a head. default: of their class; None: d_model / n_heads."""

    default: int | None = None

    def read(self, fields: ConfigFields) -> Flat:
        even = fields.take('hidden_size') // fields.take('num_attention_heads')
        return {'model.head_dim': fields.take('head_dim', self.default) or even}

    def write(self, flat: Flat) -> Flat:
        return {'head_dim': flat['model.head_dim']}


@dataclasses.dataclass(frozen=True)
class EvenHeadDim(ConfigEntry):
    """A head_dim that must be d_model / n_heads.

    default: of their class; None: the class does not read the field.
    """

    default: int | None = None

    def read(self, fields: ConfigFields) -> Flat:
        width, heads = fields.take('hidden_size'), fields.take('num_attention_heads')
        head_dim = fields.take('head_dim', self.default)
        if head_dim not in (None, width // heads):
            raise ValueError(
                f'{FILE} has head_dim={head_dim}; a {fields.raw.get("model_type")} with {width} '
                f'features and {heads} heads must have head_dim={width // heads}'
            )
        return {}

    def write(self, flat: Flat) -> Flat:
        return {} if self.default is None else {'head_dim': flat['model.head_dim']}


@dataclasses.dataclass(frozen=True)
class QueryScalar(ConfigEntry):
    """The s of logits q k / sqrt(s).

    Our models have s = head_dim; on import the queries absorb the ratio. An export writes the s of
    the import, if there was one.
    """

    default: int

    def read(self, fields: ConfigFields) -> Flat:
        return {QUERY_SCALAR: fields.take('query_pre_attn_scalar', self.default)}

    def write(self, flat: Flat) -> Flat:
        return {'query_pre_attn_scalar': flat.get(QUERY_SCALAR, flat['model.head_dim'])}


@dataclasses.dataclass(frozen=True)
class AttentionFactor(ConfigEntry):
    """The factor of q k, instead of 1 / sqrt(head_dim).

    An export writes the factor of the import, if there was one.
    """

    name: str
    default: float = 1.0

    has_out: bool = True

    def read(self, fields: ConfigFields) -> Flat:
        return {ATTENTION_FACTOR: fields.take(self.name, self.default)}

    def write(self, flat: Flat) -> Flat:
        return {self.name: flat.get(ATTENTION_FACTOR, flat['model.head_dim'] ** -0.5)}


@dataclasses.dataclass(frozen=True)
class WeightFactor(ConfigEntry):
    """A factor, or a divisor, that an import writes into weights.

    An export writes the import's, or 1. name: in config.json. factor: an element of FACTOR_FIELDS.
    default: of their class.
    """

    name: str
    factor: str
    default: float = 1.0

    def read(self, fields: ConfigFields) -> Flat:
        return {self.factor: fields.take(self.name, self.default)}

    def write(self, flat: Flat) -> Flat:
        return {self.name: flat.get(self.factor, 1.0)}


INPUT_BIASES = ('attention/query_bias', 'attention/key_bias', 'attention/value_bias')
OUTPUT_BIASES = ('attention/out_bias',)
MLP_BIASES = ('mlp/gate_bias', 'mlp/up_bias', 'mlp/down_bias')
# The biases of a part of the block alone: our fields.
PART_FIELDS = {INPUT_BIASES: 'model.qkv_bias', MLP_BIASES: 'model.mlp_bias'}


@dataclasses.dataclass(frozen=True)
class BiasFlag:
    """A flag of config.json for some biases of a block.

    name: in config.json. part: of the block, in a note. paths: of the biases in a block.
    default: of their class.
    """

    name: str
    part: str
    paths: tuple[str, ...]
    default: bool = False


@dataclasses.dataclass(frozen=True)
class Biases(ConfigEntry):
    """The flags of biases, such as attention_bias and mlp_bias.

    Our models have all biases, or those of queries, keys and values, those of the MLP, both, or
    none: if config.json has others, the rest are 0.
    """

    flags: tuple[BiasFlag, ...] = (
        BiasFlag('attention_bias', 'attention', INPUT_BIASES + OUTPUT_BIASES),
        BiasFlag('mlp_bias', 'mlp', MLP_BIASES),
    )

    def read(self, fields: ConfigFields) -> Flat:
        present = {flag for flag in self.flags if fields.take(flag.name, flag.default)}
        parts = {flag.paths for flag in present}
        if parts <= PART_FIELDS.keys():
            part_fields = {path: biases in parts for biases, path in PART_FIELDS.items()}
            return {'model.bias': False} | part_fields
        lacking = {flag.part: flag.paths for flag in self.flags if flag not in present}
        zero_biases = {ZERO_BIASES: lacking} if lacking else {}
        return {'model.bias': True} | dict.fromkeys(PART_FIELDS.values(), False) | zero_biases

    def write(self, flat: Flat) -> Flat:
        parts = [biases for biases, path in PART_FIELDS.items() if flat[path]]
        return {flag.name: flat['model.bias'] or flag.paths in parts for flag in self.flags}


@dataclasses.dataclass(frozen=True)
class Mxfp4(ConfigEntry):
    """quantization_config of 4-bit weights, which are read and never written (gpt-oss)."""

    def read(self, fields: ConfigFields) -> Flat:
        quantization = fields.take('quantization_config', None) or {}
        if (method := quantization.get('quant_method', 'mxfp4')) != 'mxfp4':
            raise ValueError(f"{FILE} has quant_method={method!r}; only 'mxfp4' is supported")
        return {}
