"""Converts the kinds of layers in a config.json to model.pattern, and back.

These are entries of families with recurrences between layers of attention, with dense MLPs between
experts, or both.
"""

import dataclasses
import itertools
from collections.abc import Mapping, Sequence
from typing import ClassVar

from eval.convert.hf_config import FILE, LAYERS, ConfigEntry, ConfigFields, Flat
from eval.convert.hf_files import format_value
from eval.convert.hf_positions import FULL
from lm.config.pattern import format_pattern

LINEAR = 'linear_attention'
DENSE, EXPERTS = 'dense', 'moe'
SOFTMAX, RECURRENCE = 'softmax', 'gated_delta'


class MlpKinds:
    """Decides which layers have experts: here all do. Subclasses read and write fields of it."""

    def read(self, fields: ConfigFields, n_layers: int) -> list[bool]:
        """Returns whether each layer has experts."""
        return [True] * n_layers

    def write(self, has_experts: Sequence[bool]) -> Flat:
        """Returns fields of config.json. The export reads them back, and refuses other layers."""
        return {}


@dataclasses.dataclass(frozen=True)
class DenseFirst(MlpKinds):
    """The first layers are dense (first_k_dense_replace). default: of their class."""

    default: int
    name: ClassVar[str] = 'first_k_dense_replace'

    def read(self, fields: ConfigFields, n_layers: int) -> list[bool]:
        n_dense = fields.take(self.name, self.default)
        return [layer >= n_dense for layer in range(n_layers)]

    def write(self, has_experts: Sequence[bool]) -> Flat:
        return {self.name: [*has_experts, True].index(True)}


class DenseListed(MlpKinds):
    """mlp_only_layers are dense, and all but every n-th layer (decoder_sparse_step)."""

    def read(self, fields: ConfigFields, n_layers: int) -> list[bool]:
        step = fields.take('decoder_sparse_step', 1)
        listed = fields.take('mlp_only_layers', None) or []
        if step < 1:
            raise ValueError(f'{FILE} has decoder_sparse_step={step}; it must be at least 1')
        return [layer not in listed and (layer + 1) % step == 0 for layer in range(n_layers)]

    def write(self, has_experts: Sequence[bool]) -> Flat:
        listed = [layer for layer, has in enumerate(has_experts) if not has]
        return {'decoder_sparse_step': 1, 'mlp_only_layers': listed}


class DenseOutside(MlpKinds):
    """Every n-th layer of a range has experts (ERNIE 4.5)."""

    names: ClassVar[Mapping[str, int]] = {
        'moe_layer_start_index': 1,
        'moe_layer_end_index': -1,
        'moe_layer_interval': 1,
    }

    def read(self, fields: ConfigFields, n_layers: int) -> list[bool]:
        start, end, step = (fields.take(name, value) for name, value in self.names.items())
        if step < 1:
            raise ValueError(f'{FILE} has moe_layer_interval={step}; it must be at least 1')
        end = n_layers - 1 if end == -1 else end
        return [start <= layer <= end and (layer + 1) % step == 0 for layer in range(n_layers)]

    def write(self, has_experts: Sequence[bool]) -> Flat:
        layers = [layer for layer, has in enumerate(has_experts) if has] or [len(has_experts)]
        gaps = {after - before for before, after in itertools.pairwise(layers)}
        step = min(gaps, default=1)
        return dict(zip(self.names, (layers[0], layers[-1], step), strict=True))


@dataclasses.dataclass(frozen=True)
class LayerKinds(ConfigEntry):
    """The attention and the MLP of each layer: model.pattern, if the layers differ.

    recurrence: the options of a layer of `gated_delta` behind its name; None: the family has none.
    full_every: every n-th layer has softmax attention, if the file does not list the layers.
    mlps: says which layers have experts; None: all MLPs are dense.
    interval_name: of a field with another `full_every`, which their class replaces by a list.
    is_last_full: whether a model always has both kinds of attention, if need be in its last layer.
    """

    recurrence: str | None = None
    mlps: MlpKinds | None = None
    full_every: int = 4
    interval_name: str = ''
    is_last_full: bool = False

    def read(self, fields: ConfigFields) -> Flat:
        n_layers = fields.take('num_hidden_layers')
        attentions = [SOFTMAX] * n_layers
        if self.recurrence is not None:
            attentions = self._read_attentions(fields, n_layers)
        has_experts = [None] * n_layers
        if self.mlps is not None:
            has_experts = self.mlps.read(fields, n_layers)
        is_alike = len({*has_experts}) == 1
        texts = []
        for attention, has in zip(attentions, has_experts, strict=True):
            text = attention
            if attention == RECURRENCE:
                text = f'{RECURRENCE}:{self.recurrence}'
            if not is_alike:
                text += f'/{EXPERTS if has else DENSE}'
            texts.append(text)
        flat = {'model.attention': SOFTMAX}
        if is_alike and self.mlps is not None:
            flat['model.mlp'] = EXPERTS if has_experts[0] else DENSE
        if {*texts} != {SOFTMAX}:
            flat['model.pattern'] = format_pattern(texts)
        return flat

    def _read_attentions(self, fields: ConfigFields, n_layers: int) -> list[str]:
        """Returns the attention of each layer."""
        period = self.full_every
        if self.interval_name:
            period = fields.take(self.interval_name, period)
        default_types = [FULL if (layer + 1) % period == 0 else LINEAR for layer in range(n_layers)]
        if self.is_last_full and FULL not in default_types:
            default_types[-1] = FULL
        types = fields.take('layer_types', None) or default_types
        if unknown := sorted({*types} - {FULL, LINEAR}):
            raise ValueError(
                f'{FILE} has layer_types {", ".join(map(format_value, unknown))}; a '
                f'{fields.raw.get("model_type")} has {LINEAR} and {FULL}'
            )
        return [SOFTMAX if kind == FULL else RECURRENCE for kind in types]

    def write(self, flat: Flat) -> Flat:
        layers, written = flat[LAYERS], {}
        if self.mlps is not None and not any(layer.mlp == EXPERTS for layer in layers):
            raise ValueError('no block has experts')
        if self.is_last_full and len({layer.attention for layer in layers}) == 1:
            raise ValueError('there must be layers of a recurrence and layers of attention')
        if self.recurrence is not None:
            written['layer_types'] = [
                LINEAR if layer.attention == RECURRENCE else FULL for layer in layers
            ]
        if self.mlps is not None:
            written |= self.mlps.write([layer.mlp == EXPERTS for layer in layers])
        return written


@dataclasses.dataclass(frozen=True)
class RecurrentSizes(ConfigEntry):
    """Heads and widths of gated_delta (linear_num_key_heads and others).

    key_heads, value_heads: defaults of their class; None: num_attention_heads. key_width: its
    default; None: 3/4 of the width of the model over all heads. value_width: its default; None:
    twice that of keys.
    """

    key_heads: int | None = 16
    value_heads: int | None = 32
    key_width: int | None = 128
    value_width: int | None = 128

    def read(self, fields: ConfigFields) -> Flat:
        n_heads, d_model = fields.take('num_attention_heads'), fields.take('hidden_size')
        key_heads = fields.take('linear_num_key_heads', self.key_heads) or n_heads
        value_heads = fields.take('linear_num_value_heads', self.value_heads) or n_heads
        key_width = fields.take('linear_key_head_dim', self.key_width)
        key_width = key_width or int(0.75 * d_model / key_heads)
        value_width = fields.take('linear_value_head_dim', self.value_width) or 2 * key_width
        taps = fields.take('linear_conv_kernel_dim', 4)
        if key_width < 1 or value_width % key_width:
            raise ValueError(
                f'{FILE} has linear_value_head_dim={value_width} and linear_key_head_dim='
                f'{key_width}; our values are a whole number of times as wide as keys'
            )
        if taps < 2:
            raise ValueError(
                f'{FILE} has linear_conv_kernel_dim={taps}; our convolutions have at least 2 taps'
            )
        return {
            'attention.key_heads': key_heads,
            'attention.value_heads': value_heads,
            'attention.key_width': key_width,
            'attention.expand_value': value_width // key_width,
            'attention.conv_width': taps,
            'attention.output_gate': 'silu',
        }

    def write(self, flat: Flat) -> Flat:
        width = flat['attention.key_width']
        if width is None:  # no recurrence: the class has defaults
            return {}
        values = flat['attention.expand_value']
        return {
            'linear_num_key_heads': flat['attention.key_heads'],
            'linear_num_value_heads': flat['attention.value_heads'],
            'linear_key_head_dim': width,
            'linear_value_head_dim': width * values,
            'linear_conv_kernel_dim': flat['attention.conv_width'],
        }


@dataclasses.dataclass(frozen=True)
class SameEps(ConfigEntry):
    """The norm of the output of a recurrence has the eps of all norms (rms_norm_eps)."""

    default: float = 1e-6

    def read(self, fields: ConfigFields) -> Flat:
        return {'attention.output_norm_eps': fields.take('rms_norm_eps', self.default)}


@dataclasses.dataclass(frozen=True)
class SharedWidth(ConfigEntry):
    """shared_expert_intermediate_size, in widths of an expert: mlp.shared_experts.

    default, expert_default: of their class.
    """

    default: int
    expert_default: int

    def read(self, fields: ConfigFields) -> Flat:
        width = fields.take('shared_expert_intermediate_size', self.default)
        expert_width = fields.take('moe_intermediate_size', self.expert_default)
        if not expert_width or width < 1 or width % expert_width:
            raise ValueError(
                f'{FILE} has shared_expert_intermediate_size={width} and moe_intermediate_size='
                f'{expert_width}; our shared experts are a whole number of times as wide'
            )
        return {'mlp.shared_experts': width // expert_width}

    def write(self, flat: Flat) -> Flat:
        width, count = flat['mlp.expert_width'], flat['mlp.shared_experts']
        return {'shared_expert_intermediate_size': width and (count or 0) * width}


@dataclasses.dataclass(frozen=True)
class ExtraLayers(ConfigEntry):
    """The number of layers that predict further tokens, which are not read: 0 is written.

    name, alias: in config.json.
    """

    name: str
    alias: str

    def read(self, fields: ConfigFields) -> Flat:
        for name in (self.name, self.alias):
            fields.take(name, None)
        return {}

    def write(self, flat: Flat) -> Flat:
        return {self.name: 0}


@dataclasses.dataclass(frozen=True)
class StartField(ConfigEntry):
    """A number by which their class draws initial weights: not read, and not written."""

    name: str

    def read(self, fields: ConfigFields) -> Flat:
        fields.take(self.name, None)
        return {}
