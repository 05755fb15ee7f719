"""Holds the sizes in config.json against the headers of the tensors, before anything is built.

A model of 10**9 layers, or experts, is a list of so many names, and one of a wrong width is a trace
of a model that no file has. Both are refused by the numbers alone.
"""

from collections.abc import Mapping
from typing import Any

from eval.convert.hf_config import Flat, HiddenWidth, MaxPositions, SharedField
from eval.convert.hf_families import Family
from eval.convert.hf_files import CONFIG
from eval.convert.safetensors import StoredTensor

# Our fields of the letters in layouts.
LETTERS = {
    'D': 'model.d_model',
    'N': 'model.n_heads',
    'K': 'model.n_kv_heads',
    'H': 'model.head_dim',
    'F': 'model.d_ff',
    'E': 'mlp.n_experts',
    'T': 'data.seq_len',
}
LAYER_LISTS = ('layer_types', 'no_rope_layers')  # an entry a layer


def check_counts(
    family: Family, raw: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> None:
    """Raises ValueError where config.json has more layers, or more experts whose tensors have
    numbers, than there are tensors, and for a list with an entry a layer that has others.
    """
    names = size_names(family, raw)
    layers, experts = names['model.n_layers'], names.get('mlp.n_experts')
    for name, what, letter in ((layers, 'layers', '{L}'), (experts, 'experts', '{E}')):
        there = count_numbers(family, letter, stored)
        if name in raw and there is not None and raw[name] > there:
            raise ValueError(
                f'{CONFIG} has {name}={raw[name]}, and the files hold tensors of {there} {what}'
            )
    for name in LAYER_LISTS:
        if raw.get(name) and layers in raw and len(raw[name]) != raw[layers]:
            raise ValueError(
                f'{CONFIG} has {name} with {len(raw[name])} entries, and {layers}={raw[layers]}'
            )


def count_numbers(family: Family, letter: str, stored: Mapping[str, StoredTensor]) -> int | None:
    """Returns how many numbers stand for a letter in the names of tensors; None for a family whose
    names do not have it. The numbers may be any: a name with 10**9 is one layer.
    """
    places = {}
    for row in family.rows:
        if letter in row.name:
            parts = row.name.split('.')
            key = tuple('#' if part in ('{L}', '{E}') else part for part in parts)
            places[key] = parts.index(letter)
    numbers = set()
    for name in stored:
        parts = name.split('.')
        key = tuple('#' if part.isascii() and part.isdigit() else part for part in parts)
        if key in places:
            numbers.add(parts[places[key]])
    return len(numbers) if places else None


def size_names(family: Family, raw: Mapping[str, Any]) -> dict[str, str]:
    """Returns {our field: its name in config.json} of the fields that are sizes of tensors."""
    names = {'model.head_dim': 'head_dim'}
    for entry in family.entries:
        if isinstance(entry, SharedField):
            names[entry.path] = entry.name if entry.name in raw or not entry.alias else entry.alias
        elif isinstance(entry, HiddenWidth):
            names['model.d_ff'] = entry.name
        elif isinstance(entry, MaxPositions) and entry.is_table:
            names['data.seq_len'] = entry.name
    return names


def check_shapes(
    family: Family, fields: Flat, raw: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> None:
    """Raises ValueError for a matrix of the first layer that is of another shape than the config
    says.

    Args:
      family: of the model.
      fields: what it has read, by our names.
      raw: the config.json, whose names the error has.
      stored: the tensors by the names of the whole model.
    """
    sizes = {letter: fields.get(path) for letter, path in LETTERS.items()}
    sizes['K'] = sizes['K'] or sizes['N']
    sizes['H'] = sizes['H'] or sizes['D'] // sizes['N']
    names = size_names(family, raw)
    for row in family.rows:
        name = row.name.format(L=0, E=0)
        parts = [row.layout.axes(part) for part in range(len(row.paths))]
        letters = {letter for axes in parts for letter in axes}
        if name not in stored or len(letters) < 2:
            continue  # a norm of queries may be over a head or over all
        shape = stored[name].shape
        known = sizes | {'V': max((1, *shape[:1]))}
        wanted = row.layout.file_shape([[known[letter] for letter in axes] for axes in parts])
        if wanted != shape:
            of = [(names.get(LETTERS.get(letter, '')), sizes.get(letter)) for letter in letters]
            said = ', '.join(sorted(f'{field}={size}' for field, size in of if field))
            raise ValueError(
                f'the tensors do not fit {CONFIG}: {name} is {list(shape)}, and {list(wanted)} is '
                f'wanted by {said}'
            )
