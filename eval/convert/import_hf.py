"""Imports a folder saved by transformers (save_pretrained, or a snapshot of the Hub) as a run.

Headers are checked before any weight is read. Weights become float32. A process holds only the
weights of its own devices (`eval.convert.hf_weights`), plus a single tensor of the files.
"""

import dataclasses
import hashlib
import json
import math
from collections.abc import Container, Mapping
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict
from jax.sharding import Mesh

from eval.convert import hf_config, hf_files, hf_multimodal, hf_sizes, mxfp4, safetensors
from eval.convert.families import find_family
from eval.convert.families.family import Family, TensorPlace
from eval.convert.fold import build_cpu_learner, write_workdir
from eval.convert.hf_factors import list_factors
from eval.convert.hf_weights import Shapes, WeightReader, read_params
from eval.convert.safetensors import StoredTensor
from lm.config.fields import FIELDS, MeshConfig
from lm.config.recipe import Recipe
from lm.config.resolve import (
    NO_SOURCE,
    build_config,
    flatten,
    resolve_auto,
    resolve_config,
    single_run_config,
    unresolve_fields,
    update_config,
)
from lm.data import tokenizers
from lm.data.tokenizer_files import LIBRARY_FILE, read_files_beside
from lm.data.tokenizers import Tokenizer
from lm.data.vocabularies import find_vocabulary, read_vocabulary
from lm.devices.mesh import make_mesh
from lm.launch.distributed import broadcast_from_first, is_first
from lm.model.base_size import unused_fields
from lm.model.check import check
from lm.training.state import Learner, Weights
from modules.experts import BIAS, COUNTS
from modules.params import ParamSpec, named_leaves
from modules.statistics import STATS

SCALE = 'embedding_scale'
# In the record of a checkpoint: the family it came from, and the factors in its weights.
MODEL_TYPE, FACTORS = 'model_type', 'factors'
MAX_SEQ_LEN = 2048  # tokens of a row of data, even if the model can read longer rows
MAX_LISTED = 12  # names in an error
CHUNK_ROWS = 1024  # rows of two tables that are compared at once
# Fields that every import sets. Its optimizer state is not written, and training starts afresh.
IMPORT_FIELDS = {
    'model.pattern': None,
    'model.embedding_norm': 'none',
    'model.final_norm': 'auto',
    'model.reparam': 'none',
    'model.readout': 'learned',
    'model.readout_bias': False,
    'model.stream': 'plain',
    'model.n_kv_heads': None,
    'model.head_dim': None,
    'scaling.name': 'standard',
    'optim.name': 'normalized_gd',
    'optim.others': 'normalized_gd',
    'optim.average': 'none',
    'data.objective': 'causal',
    'train.eval_objectives': 'causal',
    'train.trainable': 'all',
    **NO_SOURCE,
}
MODEL_PREFIXES = ('model.', 'norm.', 'attention.', 'mlp.', 'reparam.')


@dataclasses.dataclass(frozen=True)
class ImportedModel:
    """A model of transformers as ours.

    params: {path: float32 array on a mesh}. notes: on differences. n_bytes_read: bytes that this
    process has read of the file_bytes of weights. factors: that are part of the weights here, by
    FACTOR_FIELDS; an export takes them out again.
    """

    model_type: str
    recipe: Recipe
    params: dict[str, Any]
    vocab_size: int
    tokenizer: Tokenizer
    notes: list[str]
    n_bytes_read: int
    file_bytes: int
    factors: Mapping[str, float]


def import_folder(
    folder: Path, base: Mapping[str, Any], workdir: Path, mesh: Mesh | None = None
) -> ImportedModel:
    """Reads a folder of transformers.

    Args:
      folder: has config.json, and safetensors files.
      base: a config, as nested dicts, for everything but the model; its data and steps are kept.
      workdir: will be written later; data.tokenizer names it.
      mesh: the devices of all processes that hold the weights; default: the first device of this
        process.

    Returns:
      The `ImportedModel`.

    Raises:
      ValueError: for files that cannot be read, for a field that our models lack, and for tensors
        that are left over, missing or of another shape, with a list of all.
    """
    full_config = hf_files.read_config(folder, check_type)
    raw = hf_multimodal.find_text_config(full_config)
    family = find_family(raw)
    raw = family.rename_fields(raw)
    hf_files.check_settings(folder)
    tensors, notes = hf_multimodal.select_text_tensors(full_config, safetensors.read_folder(folder))
    notes += safetensors.list_unread_files(folder)
    weights, extra_notes = drop_extra_layers(family, raw, select_weights(family, tensors))
    notes += extra_notes
    stored, packed = mxfp4.unpack_tensors(weights)
    # Sizes are checked first: a wrong size would build a huge or a useless model.
    hf_sizes.check_counts(family, raw, stored)
    fields = family.read(raw)
    vocab_size, dtype = read_embedding_size(family, stored)
    hf_sizes.check_shapes(family, fields, raw, stored)
    tokenizer, spec = load_tokenizer(folder, raw, vocab_size, workdir)
    notes += hf_files.list_settings_notes(folder, tokenizer.eos_id)
    try:
        recipe = recipe_for(fields, base, spec)
        check(recipe)
    except ValueError as error:
        theirs = hf_sizes.size_names(family, raw)
        fields_there = [name for path, name in theirs.items() if path in str(error)]
        raise ValueError(
            f'{hf_config.FILE} describes a model that is not supported: {error}'
            + (f' (in {hf_config.FILE}: {", ".join(fields_there)})' if fields_there else '')
        ) from error
    learner = build_cpu_learner(recipe, vocab_size)
    shapes = param_shapes(learner)
    constants = constant_params(recipe, dtype)
    for part, biases in fields.get(hf_config.ZERO_BIASES, {}).items():
        zero_biases = shapes.keys() & {f'layers/{path}' for path in biases}
        constants |= dict.fromkeys(zero_biases, 0.0)
        notes.append(f'the files have no biases of {part}: they start at 0 and are trained')
    constants |= {path: 0.0 for path in shapes if path.endswith(f'/{COUNTS}')}
    # Constants have no tensor in the files.
    stored_shapes = {path: shape for path, shape in shapes.items() if path not in constants}
    places = match_tensors(family, recipe, stored_shapes, stored)
    factors = list_factors(fields, recipe, shapes)
    reader = WeightReader(shapes, places, stored, packed, factors, constants)
    specs = dict(named_leaves(learner.description.specs))
    # Statistics of routers are whole on every device.
    specs |= {path: ParamSpec('vector', ('layer', 'router')) for path in shapes.keys() - specs}
    params = read_params(reader, specs, mesh or one_device_mesh())
    if raw.get('vocab_size') not in (None, vocab_size):
        notes.append(
            f'vocab_size={raw["vocab_size"]}, but the embedding has {vocab_size} rows: using '
            f'{vocab_size}'
        )
    notes += fields.get(hf_config.NOTES, ())
    notes += factor_notes(recipe, dtype, constants)
    if dropouts := hf_config.list_dropouts(raw):
        notes.append(f'the model was trained with {", ".join(dropouts)}; here dropout is off')
    notes += list_tokenizer_notes(folder, tokenizer, spec)
    return ImportedModel(
        model_type=raw['model_type'],
        recipe=recipe,
        params=params,
        vocab_size=vocab_size,
        tokenizer=tokenizer,
        notes=notes,
        n_bytes_read=reader.n_bytes_read,
        file_bytes=reader.file_bytes,
        factors={name: fields[name] for name in hf_config.FACTOR_FIELDS if name in fields},
    )


def check_type(raw: Mapping[str, Any]) -> None:
    """Raises ValueError for a model_type that is not read, before its fields are checked."""
    name = raw.get('model_type')
    if isinstance(name, str) and name not in hf_multimodal.TEXT_MODELS:
        find_family(raw)


def digest_folder(folder: Path) -> str:
    """Returns a digest of config.json and of the headers, which must be equal on all hosts."""
    stored = safetensors.read_folder(folder)
    headers = {n: (x.file.name, str(x.dtype), x.shape, x.begin) for n, x in stored.items()}
    text = json.dumps([hf_files.read_config(folder), headers], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


def one_device_mesh() -> Mesh:
    return make_mesh(MeshConfig(data=1), jax.local_devices()[:1])


def all_devices_mesh() -> Mesh:
    """Returns a mesh that shards parameters over the devices of all processes, by `fsdp` alone."""
    return make_mesh(MeshConfig(data=1, fsdp=-1))


def recipe_for(fields: Mapping[str, Any], base: Mapping[str, Any], tokenizer: str) -> Recipe:
    """Returns the recipe of a model with these fields, whatever model `base` describes.

    Args:
      fields: of the model, by path; names that begin with '@' are skipped.
      base: a config, as nested dicts. Unread options and base sizes are dropped.
      tokenizer: data.tokenizer.

    Raises:
      ValueError: for a field that our models do not have.
    """
    config = build_config(single_run_config(base))
    options = [
        p for p, field in FIELDS.items() if field.is_part_option and p.startswith(MODEL_PREFIXES)
    ]
    data_fields = {}
    if (longest := fields.get(hf_config.MAX_POSITIONS)) is not None:
        data_fields['data.seq_len'] = min(longest, MAX_SEQ_LEN)
    model_fields = {path: value for path, value in fields.items() if not path.startswith('@')}
    if unknown := model_fields.keys() - FIELDS.keys():
        raise ValueError(f'not supported: {", ".join(sorted(unknown))}')
    # Options are reset to None, so that those of `base` do not leak into the model.
    values = (
        dict.fromkeys(options)
        | IMPORT_FIELDS
        | data_fields
        | model_fields
        | {'data.tokenizer': tokenizer}
    )
    config = resolve_auto(update_config(config, values))
    return resolve_config(update_config(config, dict.fromkeys(unused_fields(config))))


def select_weights(family: Family, stored: Mapping[str, StoredTensor]) -> dict[str, StoredTensor]:
    """Returns the tensors that are weights, by the names of the whole model."""
    prefix, selected = family.prefix, {}
    heads = {row.name for row in family.rows if not row.name.startswith(prefix)}
    # Files of a model without its head lack the prefix in all names.
    lacks_prefix = not any(name.startswith(prefix) for name in stored)
    for name, tensor in stored.items():
        for alias, part in family.tensor_aliases.items():
            name = name.replace(alias, part)
        if not name.endswith(family.unused_suffixes):
            selected[prefix + name if lacks_prefix and name not in heads else name] = tensor
    return selected


def read_embedding_size(family: Family, stored: Mapping[str, StoredTensor]) -> tuple[int, np.dtype]:
    """Returns (rows of the embedding, its dtype). There may be more rows than tokens."""
    # From the tensor, not from config.json: some models pad the table.
    name = next(row.name for row in family.rows if row.paths == ('embedding',))
    if name not in stored:
        raise ValueError(f'the files must contain {name}; they have {format_list(stored)}')
    if len(stored[name].shape) != 2:
        raise ValueError(f'{name} must be a matrix; its shape is {list(stored[name].shape)}')
    return stored[name].shape[0], stored[name].dtype


def drop_extra_layers(
    family: Family, raw: Mapping[str, Any], stored: Mapping[str, StoredTensor]
) -> tuple[dict[str, StoredTensor], list[str]]:
    """Returns (the tensors that transformers loads, notes on those that predict further tokens).

    Args:
      family: of the model.
      raw: the config.json.
      stored: the tensors by name.
    """
    layers, left_out = raw.get('num_hidden_layers'), []
    for name in stored:
        number = name.removeprefix('model.layers.').partition('.')[0]
        is_layer = name.startswith('model.layers.') and number.isascii() and number.isdigit()
        is_extra = is_layer and type(layers) is int and int(number) >= layers
        if (family.extra_layers and is_extra) or (
            family.extra_prefix and name.startswith(family.extra_prefix)
        ):
            left_out.append(name)
    loaded = {name: tensor for name, tensor in stored.items() if name not in {*left_out}}
    note = f'skipped {len(left_out)} tensors that predict further tokens: {format_list(left_out)}'
    return loaded, [note] if left_out else []


def param_shapes(learner: Learner) -> Shapes:
    """Returns the shapes of the effective weights of a model, by path.

    Files hold the biases of routers (mlp.balance=bias) too, which are statistics here: they and
    their counts are among the parameters, by the path of their layer.
    """
    described = learner.description
    leaves = dict(named_leaves(described.used_shapes))
    leaves |= find_router_stats(described.stats)
    return {path: tuple(leaf.shape) for path, leaf in leaves.items()}


def find_router_stats(stats: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the biases and counts of routers by path, of statistics by collection."""
    leaves = named_leaves(stats.get(STATS, {})).items()
    return {path: leaf for path, leaf in leaves if path.endswith((f'/{BIAS}', f'/{COUNTS}'))}


def build_weights(params: Mapping[str, Any]) -> Weights:
    """Returns the weights of parameters by path, with the statistics of routers among them."""
    stats = find_router_stats({STATS: unflatten_dict(dict(params), sep='/')})
    trained = {path: array for path, array in params.items() if path not in stats}
    nested = unflatten_dict(stats, sep='/')
    return Weights(unflatten_dict(trained, sep='/'), (), {STATS: nested} if nested else {})


def build_variables(params: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the variables of a model, for `compute_logits`; counts of routers are optional."""
    counts = {
        f'{path.removesuffix(BIAS)}{COUNTS}': np.zeros_like(array)
        for path, array in params.items()
        if path.endswith(f'/{BIAS}')
    }
    weights = build_weights({**counts, **params})
    return {'params': weights.params, **weights.stats}


def match_tensors(
    family: Family, recipe: Recipe, shapes: Shapes, stored: Mapping[str, StoredTensor]
) -> list[TensorPlace]:
    """Returns the places of the tensors that fill arrays of these shapes, in file order.

    Args:
      family: of the model.
      recipe: of the model.
      shapes: of the arrays, by path.
      stored: the tensors by name.

    Raises:
      ValueError: for tensors that are left over, missing, or of another shape, with lists.
    """
    expected = {place.name: place for place in family.list_tensors(shapes, recipe)}
    missing = [name for name in expected if name not in stored]
    left_over = [name for name in stored if name not in expected]
    if recipe.model.tie_embeddings:  # some files hold the table twice
        left_over = [n for n in left_over if not _is_second_table(family, n, stored)]
    wrong = [
        f'{name} is {list(stored[name].shape)}, not {list(expected_shape)}'
        for name, place in expected.items()
        if name in stored
        if stored[name].shape
        != (expected_shape := place.row.layout.file_shape(place.shapes(shapes)))
    ]
    covered = {path for place in expected.values() for path in place.row.paths}
    without_tensor = sorted(shapes.keys() - covered)
    problems = {
        'missing tensors': missing,
        'unknown tensors': left_over,
        'wrong shapes': wrong,
        'parameters without a tensor': without_tensor,
    }
    reports = [f'{problem}: {format_list(names)}' for problem, names in problems.items() if names]
    if reports:
        raise ValueError(f'the tensors do not match config.json: {"; ".join(reports)}')
    return [expected[name] for name in stored if name in expected]


def _is_second_table(family: Family, name: str, stored: Mapping[str, StoredTensor]) -> bool:
    """Whether a tensor is the readout of a model with tied embeddings: the same bytes again."""
    rows = {row.paths: row.name for row in family.rows}
    if name != rows.get(('readout',)):
        return False
    readout, embedding = (safetensors.map_tensor(stored[n]) for n in (name, rows['embedding',]))
    starts = range(0, len(readout), CHUNK_ROWS) if readout.shape == embedding.shape else ()
    parts = (slice(start, start + CHUNK_ROWS) for start in starts)
    # The first host compares, and all follow: the others would read the whole table again.
    if starts and broadcast_from_first(
        is_first() and all(np.array_equal(readout[p], embedding[p]) for p in parts)
    ):
        return True
    raise ValueError(
        f'config.json ties {name} to the embedding (tie_word_embeddings), but the files contain a '
        'different tensor. If the files are right, set tie_word_embeddings to false.'
    )


def format_list(names: Any) -> str:
    """Returns names as a list for an error, at most MAX_LISTED of them."""
    names = list(names)
    suffix = f' and {len(names) - MAX_LISTED} more' if len(names) > MAX_LISTED else ''
    return ', '.join(names[:MAX_LISTED]) + suffix


def embedding_factor(recipe: Recipe, dtype: np.dtype) -> np.float32:
    """Returns sqrt(D), rounded to the dtype of the weights as in transformers."""
    return np.float32(np.float64(math.sqrt(recipe.model.d_model)).astype(dtype))


def constant_params(recipe: Recipe, dtype: np.dtype) -> dict[str, float | np.floating]:
    """Returns {path: value} for the factor of embeddings, if the model has it."""
    if not recipe.model.embedding_scale:
        return {}
    return {SCALE: embedding_factor(recipe, dtype)}


def factor_notes(recipe: Recipe, dtype: np.dtype, constants: Container[str]) -> list[str]:
    """Returns a note if the factor of embeddings in transformers depends on the dtype of loading.

    Args:
      recipe: of the model.
      dtype: of the weights in the files.
      constants: parameters that are not in the files; without SCALE there is no factor.
    """
    factor, float32_factor = (embedding_factor(recipe, d) for d in (dtype, np.dtype(np.float32)))
    if SCALE not in constants or factor == float32_factor:
        return []
    return [
        f'embeddings are multiplied by sqrt({recipe.model.d_model}) = {factor:.8g}, rounded to the '
        f'dtype of the files, {dtype}. If transformers loads them in float32, it uses '
        f'{float32_factor:.8g} and its logits differ.'
    ]


def load_tokenizer(
    folder: Path, raw: Mapping[str, Any], vocab_size: int, workdir: Path
) -> tuple[Tokenizer, str]:
    """Returns the tokenizer and its spelling in data.tokenizer.

    BOS and EOS are the tokens named by tokenizer_config.json, or else the ids in config.json.
    Without a vocabulary that can be read, texts are token ids.

    Args:
      folder: of transformers.
      raw: the config.json.
      vocab_size: rows of the embedding.
      workdir: will hold the tokenizer's files.
    """

    def find_id(name: str) -> int | None:
        token_id = raw.get(name)
        token_id = token_id[0] if isinstance(token_id, list) and token_id else token_id
        return token_id if type(token_id) is int and 0 <= token_id < vocab_size else None

    bos, eos = find_id('bos_token_id'), find_id('eos_token_id')
    if (path := find_vocabulary(folder)) is not None and is_readable(path):
        tokenizer = tokenizers.load_for_model(folder, vocab_size, bos, eos)
        return tokenizer, f'hf:{workdir / "tokenizer"}'
    # Without ids in config.json, the last token ends and begins documents.
    eos = vocab_size - 1 if eos is None else eos
    bos = eos if bos is None else bos
    tokenizer = tokenizers.TokenIds(vocab_size, bos, eos, read_files_beside(folder))
    return tokenizer, tokenizer.spec


def is_readable(path: Path) -> bool:
    """Whether a vocabulary can be read. A tokenizer.json has to be."""
    try:
        read_vocabulary(path)
    except ValueError:
        if path.name == LIBRARY_FILE:
            raise
        return False
    return True


def list_tokenizer_notes(folder: Path, tokenizer: Tokenizer, spec: str) -> list[str]:
    """Returns notes on tokens that the model has no row for, and on a tokenizer that is not read.

    Args:
      folder: of transformers.
      tokenizer: that was loaded.
      spec: data.tokenizer.
    """
    path = find_vocabulary(folder)
    if isinstance(tokenizer, tokenizers.TokenIds):
        ids = f'texts must be token ids (data.tokenizer={spec})'
        if path is None:
            return [f'{ids}: the folder has no {LIBRARY_FILE} and no other vocabulary']
        try:
            read_vocabulary(path)
        except ValueError as error:
            is_made = LIBRARY_FILE in str(error)
            return [f'{ids}: {error}{" Then import the folder again." * is_made}']
    if not isinstance(tokenizer, tokenizers.SubwordTokenizer):
        return []
    notes = []
    if path is not None and path.name != LIBRARY_FILE:
        notes.append(f'{LIBRARY_FILE} was made from {path.name}, with the same ids')
    without_row = [f'{token!r} ({i})' for i, token in tokenizer.list_tokens_without_row().items()]
    if without_row:
        notes.append(
            f'{LIBRARY_FILE} has tokens beyond the {tokenizer.vocab_size} rows of the embedding: '
            f'{format_list(without_row)}. A text that contains one is refused.'
        )
    return notes


def write_run(folder: Path, workdir: Path, imported: ImportedModel) -> None:
    """Writes the workdir, with the files of the tokenizer.

    All processes that hold its arrays must call it. Raises ValueError if `workdir` is not empty.

    Args:
      folder: of transformers.
      workdir: an empty or new folder.
      imported: the model.
    """
    meta = {
        'counters': {},
        'data': None,  # unknown
        'vocab_size': imported.vocab_size,
        'imported_from': str(folder),
        MODEL_TYPE: imported.model_type,
        FACTORS: dict(imported.factors),
    }
    weights = build_weights(imported.params)
    write_workdir(workdir, imported.recipe, weights, imported.tokenizer, 0, meta)


def format_flags(recipe: Recipe, base: Mapping[str, Any]) -> list[str]:
    """Returns the flags that turn the config `base` into a config with the model of `recipe`."""
    before = flatten(build_config(single_run_config(base)))
    return [
        f'--config.{path}={value!r}'.replace("'", '')
        for path, value in unresolve_fields(recipe).items()
        if value != before[path] and (path.startswith(MODEL_PREFIXES) or path == 'data.seq_len')
    ]


def largest_difference(actual: np.ndarray, expected: np.ndarray) -> float:
    """Returns max |actual - expected| / max |expected|."""
    return float(np.max(np.abs(actual - expected)) / np.max(np.abs(expected)))
