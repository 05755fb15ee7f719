"""Checks the sizes in config.json against the headers of the tensors, before anything is built.

A model of 10**9 layers or experts would need a list of 10**9 names, and a model of a wrong width
would be traced in vain. The numbers alone show both errors.
"""

from collections.abc import Mapping
from typing import Any

from eval.convert.families.family import Family
from eval.convert.hf_config import Flat, HiddenWidth, MaxPositions, SharedField
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
    'X': 'mlp.expert_width',
    'P': 'attention.key_heads',
    'Q': 'attention.key_width',
    'W': 'attention.value_heads',
    'C': 'attention.conv_width',
}
LAYER_LISTS = ('layer_types', 'no_rope_layers')  # with an entry for each layer


def check_counts(
    family: Family, raw: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> None:
    """Raises ValueError if config.json and the tensors disagree on the number of layers or experts.

    There may not be more layers, or more experts with numbered tensors, than tensors. A list with
    an entry for each layer must have the right length.

    Args:
      family: of the model.
      raw: the config.json.
      stored: the tensors by name.
    """
    names = size_names(family, raw)
    layers, experts = names['model.n_layers'], names.get('mlp.n_experts')
    for name, unit, letter in ((layers, 'layers', '{L}'), (experts, 'experts', '{E}')):
        n_stored = count_numbers(family, letter, stored)
        if name is not None and name in raw and n_stored is not None and raw[name] > n_stored:
            raise ValueError(
                f'{CONFIG} has {name}={raw[name]}, but the files contain tensors of {n_stored} '
                f'{unit}'
            )
    for name in LAYER_LISTS:
        if raw.get(name) and layers in raw and len(raw[name]) != raw[layers]:
            raise ValueError(
                f'{CONFIG} has {name} with {len(raw[name])} entries, but {layers}={raw[layers]}'
            )


def count_numbers(family: Family, letter: str, stored: Mapping[str, StoredTensor]) -> int | None:
    """Returns the number of values that a letter takes in the names of tensors.

    The values may be any: a name with the number 10**9 is a single layer.

    Args:
      family: of the model.
      letter: '{L}' or '{E}'.
      stored: the tensors by name.

    Returns:
      The number; None if the names of the family do not have the letter.
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
    """Raises ValueError if a matrix of the first layer with it does not have the config's shape.

    Args:
      family: of the model.
      fields: our fields, as the family has read them.
      raw: the config.json; its names appear in the error.
      stored: the tensors by the names of the whole model.
    """
    sizes: dict[str, Any] = {letter: fields.get(path) for letter, path in LETTERS.items()}
    sizes['K'] = sizes['K'] or sizes['N']
    sizes['H'] = sizes['H'] or sizes['D'] // sizes['N']
    sizes['X'] = sizes['X'] or sizes['F']
    # Products of two of our fields.
    if sizes['Q'] and fields.get('attention.expand_value'):
        sizes['U'] = sizes['Q'] * fields['attention.expand_value']
    if fields.get('mlp.shared_experts'):
        sizes['S'] = sizes['X'] * fields['mlp.shared_experts']
    names = size_names(family, raw)
    for row in family.rows:
        layers = range(raw.get(names['model.n_layers'], 1) if '{L}' in row.name else 1)
        candidates = (row.name.format(L=layer, E=0) for layer in layers)
        name = next((candidate for candidate in candidates if candidate in stored), '')
        parts = [row.layout.axes(part) for part in range(len(row.paths))]
        letters = {letter for axes in parts for letter in axes}
        if name not in stored or len(letters) < 2:
            continue  # a norm of queries may be over a head or over all
        if any(sizes.get(letter) is None for letter in letters - {'V'}):
            continue  # of blocks that are not all alike: `match_tensors` compares each
        shape = stored[name].shape
        letter_sizes = sizes | {'V': max((1, *shape[:1]))}
        expected = row.layout.file_shape(
            [[letter_sizes[letter] for letter in axes] for axes in parts]
        )
        if expected != shape:
            size_fields = [
                (names.get(LETTERS.get(letter, '')), sizes.get(letter)) for letter in letters
            ]
            sizes_text = ', '.join(
                sorted(f'{field}={size}' for field, size in size_fields if field)
            )
            raise ValueError(
                f'the tensors do not match {CONFIG}: {name} must be {list(expected)} by '
                f'{sizes_text}; got {list(shape)}'
            )
