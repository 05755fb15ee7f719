"""A family of models in transformers: its config.json, and the places of its tensors in our tree.

A row describes a tensor of their files: its name, our path, and its layout
(`eval.convert.layouts`). {L} is the number of a layer and {E} the number of an expert; our arrays
are stacked along both. The letters are D model, N heads, K heads of keys, H features of a head, of
which R are rotated, F hidden features of the MLP, V vocabulary, T positions, E experts, X hidden
features of an expert and S of the shared ones. A recurrence has P heads of keys with Q features, W
heads of values with U features, and C taps. G is 1.
"""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

from eval.convert.hf_config import NOTES, ConfigFields, Flat
from eval.convert.layouts import Layout
from lm.config.recipe import Recipe
from lm.model.pattern import Stack, block_stacks
from modules.positions import rotated_features

LAYERS = 'layers/'  # before the paths of a block in rows; a stack of blocks has another


class TensorRow(NamedTuple):
    """A tensor of a file.

    name: with {L} and {E}. paths: of the arrays that it holds. layout: of the arrays in the tensor.
    offset: our values minus the file's. kind: the attention or the MLP of the blocks that have the
    tensor; '': any.
    """

    name: str
    paths: tuple[str, ...]
    layout: Layout
    offset: float = 0.0
    kind: str = ''


class BlockNames(NamedTuple):
    """The rows of tables that a block has: an element of the entry LAYERS of our fields."""

    attention: str
    mlp: str
    position: str
    placement: str


def make_row(name: str, paths: str, axes: str, offset: float = 0.0) -> TensorRow:
    """Returns a row. The paths 'a/{b,c}' mean a/b and a/c.

    Args:
      name: of the tensor in the files.
      paths: of our arrays.
      axes: of the layout.
      offset: our values minus the file's.
    """
    stem, _, suffixes = paths.partition('{')
    names = suffixes.rstrip('}').split(',') if suffixes else ['']
    return TensorRow(name, tuple(stem + suffix for suffix in names), Layout(axes), offset)


def kind_rows(kind: str, *rows: TensorRow) -> tuple[TensorRow, ...]:
    """Returns the rows for blocks with an attention or MLP of this name alone."""
    return tuple(row._replace(kind=kind) for row in rows)


def rows_with_bias(name: str, paths: str, axes: str, bias_axes: str) -> tuple[TensorRow, TensorRow]:
    """Returns the rows of a matrix, NAME.weight, and of its bias, NAME.bias.

    Args:
      name: of the module in their files.
      paths: of our matrices.
      axes: of the matrix.
      bias_axes: of the bias.
    """
    weight = make_row(f'{name}.weight', paths, axes)
    bias_paths = tuple(f'{path}_bias' for path in weight.paths)
    return weight, TensorRow(f'{name}.bias', bias_paths, Layout(bias_axes))


@dataclasses.dataclass(frozen=True)
class Family:
    """A model_type of transformers.

    architecture: the class. entries: of its config.json. constants: our fields that are the same in
    all models of the family. rows: its tensors. prefix: of tensor names; files of the model without
    its head lack it. unused_suffixes: of the names of tensors that hold no weights. aliases: other
    names of fields (attribute_map of its class) -> the names here. extra_prefix: of tensors that
    predict further tokens, which transformers does not load. extra_layers: whether the layers
    behind the last are such tensors. tensor_aliases: parts of names of tensors -> the parts here.
    """

    architecture: str
    entries: tuple[Any, ...]
    constants: Mapping[str, Any]
    rows: tuple[TensorRow, ...]
    prefix: str = 'model.'
    unused_suffixes: tuple[str, ...] = ('.rotary_emb.inv_freq',)
    aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)
    extra_prefix: str = ''
    extra_layers: bool = False
    tensor_aliases: Mapping[str, str] = dataclasses.field(default_factory=dict)

    def rename_fields(self, raw: Mapping[str, Any]) -> Mapping[str, Any]:
        """Returns a config.json without aliases. Raises ValueError for two values of a field."""
        renamed = {name: value for name, value in raw.items() if name not in self.aliases}
        for alias, name in self.aliases.items():
            value = raw.get(alias)
            if value is None:
                continue
            if renamed.get(name) is None:
                renamed[name] = value
            elif renamed[name] != value:
                raise ValueError(
                    f'config.json has {alias}={value!r} and {name}={renamed[name]!r}, which are '
                    f'the same field of a {raw.get("model_type")}. Remove the wrong one.'
                )
        return renamed

    def read(self, raw: Mapping[str, Any]) -> Flat:
        """Returns our fields of a config.json. Raises ValueError that names unknown fields."""
        fields, flat = ConfigFields(self.rename_fields(raw)), dict(self.constants)
        for entry in self.entries:
            flat |= entry.read(fields)
        if unread := fields.list_unread():
            raise ValueError(
                f'config.json has {", ".join(unread)}, which the importer does not support'
            )
        notes = tuple(dict.fromkeys(fields.list_notes()))
        return flat | ({NOTES: notes} if notes else {})

    def write(self, flat: Flat) -> dict[str, Any]:
        """Returns the fields of config.json. The inverse of `read` for a model of this family."""
        written: dict[str, Any] = {}
        for entry in self.entries:
            written |= entry.write(flat)
        return written

    def list_tensors(self, paths: Mapping[str, Any], recipe: Recipe) -> Iterator['TensorPlace']:
        """Yields the tensors of a model.

        Args:
          paths: of its parameters, {path: shape}.
          recipe: of the model.
        """
        places = {}  # of a block: its stack, and its place in the stack
        for stack in block_stacks(recipe):
            places |= {number: (stack, place) for place, number in enumerate(stack.numbers)}
        for row in self.rows:
            if '{L}' not in row.name:
                if all(path in paths for path in row.paths):
                    yield TensorPlace(row.name, row, ())
                continue
            for number in sorted(places):
                stack, place = places[number]
                if (placed := _place_row(row, stack, paths)) is None:
                    continue
                experts = paths[placed.paths[0]][1] if '{E}' in row.name else 1
                for expert in range(experts):
                    index = (place,) + (expert,) * ('{E}' in row.name)
                    yield TensorPlace(row.name.format(L=number - 1, E=expert), placed, index)


def _place_row(row: TensorRow, stack: Stack, paths: Mapping[str, Any]) -> TensorRow | None:
    """Returns a row with the paths of a stack of blocks; None if these do not have the tensor.

    Args:
      row: of the family.
      stack: equal blocks.
      paths: of the parameters of the model.
    """
    kind = stack.recipe
    if row.kind and row.kind not in (kind.attention.name, kind.mlp.name):
        return None
    stacked = tuple(f'{stack.path}/{path.removeprefix(LAYERS)}' for path in row.paths)
    if not all(path in paths for path in stacked):
        return None
    row = row._replace(paths=stacked)
    if row.layout.needed_lengths:
        n_groups = kind.attention.options.get('key_heads') or kind.model.n_kv_heads
        lengths = {'P': cast(int, n_groups)}  # resolved
        if (fraction := kind.position.options.get('rope_fraction')) is not None:
            lengths['R'] = rotated_features(kind.head_dim, fraction)
        row = row._replace(layout=row.layout.with_lengths(lengths))
    return row


class TensorPlace(NamedTuple):
    """A tensor of a layer and expert, at `index` in our stacked arrays."""

    name: str
    row: TensorRow
    index: tuple[int, ...]

    def shapes(self, paths: Mapping[str, tuple[int, ...]]) -> list[tuple[int, ...]]:
        """Returns the shapes of its arrays, given the shapes of all parameters."""
        return [paths[path][len(self.index) :] for path in self.row.paths]
