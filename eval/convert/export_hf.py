"""Exports a checkpoint as a folder that transformers loads. The inverse of `import_hf`.

Some parts of our models have no counterpart in transformers: reparametrisations, factors of a
parametrisation, the factor of embeddings, and norms without gains or biases. Export first writes
these into the weights.
"""

import dataclasses
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np

from eval.convert import hf_config, safetensors
from eval.convert.families import FAMILIES
from eval.convert.families.family import LAYERS, BlockNames, Family, TensorRow
from eval.convert.fold import (
    build_cpu_learner,
    cast,
    compute_logits,
    float64_variables,
    reparam_removal,
)
from eval.convert.hf_factors import GAIN, list_factors, scale_queries
from eval.convert.import_hf import (
    FACTORS,
    MODEL_PREFIXES,
    MODEL_TYPE,
    SCALE,
    build_variables,
    embedding_factor,
    factor_notes,
    find_router_stats,
    format_list,
    largest_difference,
    param_shapes,
    recipe_for,
)
from eval.convert.patterns import merge_if_alike, merge_kinds, stack_layers
from eval.load import Checkpoint, find_checkpoint
from lm.config.recipe import Recipe
from lm.config.resolve import (
    NO_SOURCE,
    drop_unread_options,
    flatten,
    resolve_config,
    to_dict,
    update_config,
)
from lm.data.tokenizer_files import (
    CONFIG_FILE,
    GENERATION_FILE,
    LIBRARY_FILE,
    write_files_beside,
)
from lm.data.tokenizers import SubwordTokenizer, Tokenizer
from lm.model.transformer import tied_factor
from lm.record.checkpoint import read_meta
from lm.record.upgrade import resolve_stored
from lm.storage.files import write_json
from lm.storage.filling import fill_folder
from modules import experts
from modules.experts import COUNTS, expert_width
from modules.params import named_leaves
from modules.positions import parse_numbers
from modules.statistics import STATS

Params = dict[str, Any]  # {'layers/mlp/up': array, ...}; embedding_scale is a float32 scalar
TOLERANCE = 1e-5  # of float32 logits, relative to the largest
# Moving each weight by one unit of the last place changes the logits, too. An export may differ by
# this many times as much: a merged LoRA of SmolLM2 135M differs by 1.1e-5, 2.2 times as much.
ROUNDINGS = 5
MAX_FILE_BYTES = 5 << 30  # of a file, as in transformers
MAX_LOGIT_TOKENS = 64  # tokens of the rows that logits are compared on
DTYPES = {'float32': np.dtype(np.float32), 'bfloat16': np.dtype(ml_dtypes.bfloat16)}
# Fields that may differ: parameters that our model lacks are filled with neutral values.
BIAS_FIELDS = ('model.bias', *hf_config.PART_FIELDS.values())
OPTIONAL_FIELDS = (*BIAS_FIELDS, 'model.readout_bias', 'model.embedding_scale')
OPTIONAL_FIELDS += ('norm.scale', 'norm.bias')
# Fields that change nothing in evaluation, except for rounding.
TRAINING_FIELDS = (
    'model.dropout',
    'model.attention_dropout',
    'model.embedding_dropout',
    'model.dtype',
    'model.remat',
    'model.scan_layers',
    'mlp.router_noise',
    'mlp.expert_capacity',
    'mlp.capacity_over',
    'mlp.dispatch',
    'mlp.bias_rate',
    'mlp.router_z_loss',
    'mlp.alpha_dropout',
)
BIAS = 'final_norm/bias'
# By a part of a statistic's path, the field that it comes from; others are from model.norm.
STATISTICS_FIELDS = {
    'final_norm': 'model.final_norm',
    'embedding_norm': 'model.embedding_norm',
    'query_norm': 'model.qk_norm',
    'key_norm': 'model.qk_norm',
    'affine': 'attention.affine_scaled',
}
ROUTER_BIAS = f'/{experts.BIAS}'  # of the choice of experts, a statistic here
# Without a flag of their own in a config.json.
NO_MATRIX_BIASES = (ROUTER_BIAS, '/decay_step_bias')


@dataclasses.dataclass(frozen=True)
class ExportedModel:
    """Our model in a family of transformers.

    model_type, config: as in their config.json. recipe, params: an import of the export.
    factors: {path: parameter divided by the file's}. difference: the largest difference of float32
    logits, relative to the largest logit. stored_difference: the same with weights rounded to the
    dtype of the files.
    """

    model_type: str
    config: dict[str, Any]
    recipe: Recipe
    params: Params
    factors: Mapping[str, float]
    difference: float
    stored_difference: float


def export_checkpoint(checkpoint: Checkpoint, dtype: str = 'float32') -> ExportedModel:
    """Returns the model of a checkpoint in a family, without writing files.

    Raises ValueError if no family has the model (the error lists the fields that the nearest
    family lacks), and if the logits would change.
    """
    exported, vocab_size = convert_checkpoint(checkpoint, dtype), checkpoint.meta['vocab_size']
    name, variables = exported.model_type, build_variables(exported.params)
    length = min(MAX_LOGIT_TOKENS, checkpoint.recipe.data.seq_len)
    before = jax.device_get(checkpoint.variables)
    expected = compute_logits(checkpoint.recipe, vocab_size, before, 'float32', length)
    logits = compute_logits(exported.recipe, vocab_size, variables, 'float32', length)
    difference = largest_difference(logits, expected)
    allowed = TOLERANCE
    if not difference <= allowed:
        # Merging and folding round anew, and deep models add these differences up.
        rounded = jax.tree.map(move_by_ulp, before)
        logits = compute_logits(checkpoint.recipe, vocab_size, rounded, 'float32', length)
        allowed = max(TOLERANCE, ROUNDINGS * largest_difference(logits, expected))
    if not difference <= allowed:
        raise ValueError(
            f'exporting as {name} would change the model: its logits differ by {difference:.1e} '
            f'of the largest; rounding explains at most {allowed:.1e}. Nothing was written.'
        )
    stored = difference
    if dtype != 'float32':
        rounded = build_variables(round_params(exported, dtype))
        logits = compute_logits(exported.recipe, vocab_size, rounded, 'float32', length)
        stored = largest_difference(logits, expected)
    return dataclasses.replace(exported, difference=difference, stored_difference=stored)


def move_by_ulp(values: jax.Array) -> jax.Array:
    """Returns float32 values, each moved up or down by one unit of its last place."""
    if values.dtype != np.float32:
        return values
    signs = np.random.default_rng(values.size).choice(np.array([-1, 1], np.float32), values.shape)
    return values * (1 + np.finfo(np.float32).eps * signs)


def round_params(exported: ExportedModel, dtype: str) -> Params:
    """Returns the parameters after rounding to `dtype`, as an import of the files reads them."""
    rounded, family = dict(exported.params), FAMILIES[exported.model_type]
    shapes = {path: array.shape for path, array in rounded.items()}
    places = {place.row.paths: place.row for place in family.list_tensors(shapes, exported.recipe)}
    for row in places.values():
        for path in row.paths:
            stored = _file_values(rounded[path], row, exported.factors.get(path, 1.0))
            values = stored.astype(DTYPES[dtype]).astype(np.float32) + np.float32(row.offset)
            rounded[path] = values * np.float32(exported.factors.get(path, 1.0))
    return rounded


def _file_values(values: np.ndarray, row: TensorRow, factor: float) -> np.ndarray:
    """Returns the values of a file, which are rounded: gain - 1 in some families, not the gain."""
    values = values / np.float32(factor) if factor != 1 else values
    return values - np.float32(row.offset) if row.offset else values


def convert_checkpoint(checkpoint: Checkpoint, dtype: str) -> ExportedModel:
    """Returns the model of a checkpoint in a family. Its logits are not compared yet."""
    source, params = build_plain_model(checkpoint)
    record = find_source_record(checkpoint)
    name, config, recipe = select_family(
        source, params, record.get(MODEL_TYPE), record.get(FACTORS, {})
    )
    all_shapes = param_shapes(build_cpu_learner(recipe, checkpoint.meta['vocab_size']))
    shapes = {path: shape for path, shape in all_shapes.items() if not path.endswith(COUNTS)}
    convert_params(params, shapes, recipe, DTYPES[dtype])
    factors = list_factors(FAMILIES[name].read(config), recipe, shapes)
    return ExportedModel(name, config, recipe, params, factors, math.inf, math.inf)


def find_source_family(checkpoint: Checkpoint) -> str | None:
    """Returns the family that a model was imported from, or None if no record names it."""
    return find_source_record(checkpoint).get(MODEL_TYPE)


def find_source_record(checkpoint: Checkpoint) -> Mapping[str, Any]:
    """Returns the record of the import that a model comes from; empty if there is none.

    Looks into the checkpoint's own record, then follows train.init_from and train.branch_from from
    run to run.
    """
    train = checkpoint.recipe.train
    meta, source, visited = checkpoint.meta, train.init_from or train.branch_from, set()
    while MODEL_TYPE not in meta and source and source not in visited:
        visited.add(source)
        try:
            meta = read_meta(*find_checkpoint(source))
        except (ValueError, OSError):  # the source has been deleted
            return {}
        train = resolve_stored(meta['config']).train
        source = train.init_from or train.branch_from
    return meta if MODEL_TYPE in meta else {}


def find_field(path: str) -> str:
    """Returns the field that gives a model the statistics at a path."""
    return next((field for part, field in STATISTICS_FIELDS.items() if part in path), 'model.norm')


def build_plain_model(checkpoint: Checkpoint) -> tuple[Recipe, Params]:
    """Returns the model with its effective weights, without reparametrisation or factors."""
    recipe = checkpoint.recipe
    stats, router_stats = checkpoint.weights.stats, find_router_stats(checkpoint.weights.stats)
    carried = [
        path
        for path, x in named_leaves(stats).items()
        if np.issubdtype(x.dtype, np.floating)
        and path.removeprefix(f'{STATS}/') not in router_stats
    ]
    if carried:  # PRNG keys are integers and matter only in training
        fields = sorted({find_field(path) for path in carried})
        raise ValueError(
            'layers in transformers cannot store the statistics of '
            f'{" and ".join(fields)}: {format_list(carried)}. Train with a norm that keeps none'
        )
    # Without a map, the stored weights are exact, and a copy in float64 would double the memory.
    mapped = recipe.model.reparam != 'none' or recipe.scaling.name != 'standard'
    used = float64_variables(checkpoint) if mapped else jax.device_get(checkpoint.variables)
    params = {path: np.asarray(x) for path, x in named_leaves(used['params']).items()}
    params |= {
        path: np.asarray(x) for path, x in router_stats.items() if path.endswith(ROUTER_BIAS)
    }
    merged = merge_if_alike(recipe)
    if merged is not recipe:
        params, recipe = stack_layers(params, recipe), merged
    scale_queries(params, recipe)
    if recipe.model.tie_embeddings and (factor := tied_factor(recipe)) != 1:
        multiply_readout(params, recipe, factor)
    return build_plain_recipe(recipe), cast(params, np.float32)


def build_plain_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe of a model with reparametrisation and factors merged into its weights."""
    recipe = merge_if_alike(recipe)
    scaling_fields = [path for path in flatten(recipe) if path.startswith('scaling.')]
    standard_fields = ('scaling.name', 'scaling.init_scale', 'scaling.init', 'scaling.zero_init')
    changes = reparam_removal() | dict.fromkeys({*scaling_fields} - {*standard_fields})
    changes |= NO_SOURCE | {'scaling.name': 'standard'}
    scales = {kind.attention.options.get('logit_scale') for kind in recipe.kinds.values()}
    if 'mup' in scales:
        changes['attention.logit_scale'] = None
    return resolve_config(update_config(recipe.config, changes))


def multiply_readout(params: Params, recipe: Recipe, factor: float | np.floating) -> None:
    """Multiplies the logits of a model with tied embeddings by a factor, through its last norm.

    The readout itself cannot take the factor, because it is also the embedding.

    Args:
      params: changed in place.
      recipe: of the model.
      factor: of the logits.
    """
    width = recipe.stream_width
    params[GAIN] = params.get(GAIN, np.ones(width)) * factor
    if BIAS in params:
        params[BIAS] = params[BIAS] * factor


def describe_model(recipe: Recipe) -> dict[str, Any]:
    """Returns the fields that determine the computation, options included, to compare models.

    If the blocks of several kinds differ in a field, the field has an entry for each block.
    """
    described = {kind: _describe_kind(kind) for kind in {*recipe.layers}}
    layers, fields = [described[kind] for kind in recipe.layers], {}
    for path in dict.fromkeys(path for layer in layers for path in layer):
        values = [layer.get(path) for layer in layers]
        if all(value == values[0] for value in values):
            fields[path] = values[0]
        else:
            numbered = enumerate(values, 1)
            fields |= {f'{path} of block {number}': value for number, value in numbered}
    return fields


def gather_fields(recipe: Recipe) -> dict[str, Any]:
    """Returns the fields of all kinds of blocks, for the entries of a family to write.

    A field that kinds set to several values has that of blocks with softmax attention, whose fields
    are named like those of a model with one kind of block. LAYERS has the names of each block.
    """
    fields, kinds = flatten(recipe), [*dict.fromkeys(recipe.layers)]
    for kind in sorted(kinds, key=lambda kind: kind.attention.name == 'softmax'):
        described = _describe_kind(kind)
        fields |= {path: value for path, value in described.items() if value is not None}
    widths = [_describe_kind(kind)['model.d_ff'] for kind in kinds]
    fields['model.d_ff'] = next(filter(None, widths), fields['mlp.expert_width'])
    return fields | {
        hf_config.LAYERS: tuple(
            BlockNames(kind.attention.name, kind.mlp.name, kind.position.name, kind.placement.name)
            for kind in recipe.layers
        )
    }


def _describe_kind(recipe: Recipe) -> dict[str, Any]:
    """Returns the fields that determine the computation of a kind of block, and of the model."""
    recipe = drop_unread_options(recipe)
    fields = {
        path: value for path, value in flatten(recipe).items() if path.startswith(MODEL_PREFIXES)
    }
    for part in recipe.parts:
        options = {f'{part.section}.{name}': value for name, value in part.options.items()}
        fields |= {path: value for path, value in options.items() if path in fields}
    for path, part in recipe.norms.items():
        fields[path] = part.name
    for path in ('attention.rope_short_factor', 'attention.rope_long_factor'):
        if fields.get(path):  # '1,2' is '1.0,2.0'
            fields[path] = ','.join(map(repr, parse_numbers(fields[path])))
    if fields.get('mlp.balance') == 'none':  # as `loss`, it changes nothing but training
        fields['mlp.balance'] = 'loss'
    eps = {part.options['eps'] for part in recipe.norms.values() if 'eps' in part.options}
    if len(eps) == 1:
        fields['norm.eps'] = next(iter(eps))
    if 'granularity' in recipe.mlp.options:  # the width of the experts is all that it sets
        width, part = recipe.model.d_ff, recipe.mlp
        names = ('granularity', 'expert_width')
        width = expert_width(width, *(part.options[name] for name in names))
        fields |= {'model.d_ff': None, 'mlp.granularity': 1, 'mlp.expert_width': width}
    layer, model = recipe.attention, recipe.model
    has_own_heads = layer.options.get('value_heads') is not None
    if 'value_heads' in layer.options and not has_own_heads and model.n_heads == model.n_kv_heads:
        fields |= dict.fromkeys(('attention.key_heads', 'attention.value_heads'), model.n_heads)
    if 'key_width' in layer.options and layer.options['key_width'] is None:
        fields['attention.key_width'] = recipe.head_dim
    return {
        path: v for path, v in fields.items() if path not in (*OPTIONAL_FIELDS, *TRAINING_FIELDS)
    }


def select_family(
    recipe: Recipe,
    params: Params,
    preferred: str | None = None,
    factors: Mapping[str, float] | None = None,
) -> tuple[str, dict[str, Any], Recipe]:
    """Returns the first family that has this model.

    Args:
      recipe: of the model.
      params: its parameters. Biases that are all 0 need no place in the family.
      preferred: the family that is tried first.
      factors: that an import from `preferred` has written into the weights, by FACTOR_FIELDS.

    Returns:
      (model_type, config.json, the recipe of the same model after an import).

    Raises:
      ValueError: if no family has the model. The error names the fields of the nearest family.
    """
    own_fields, biased, best = describe_model(recipe), list_nonzero_biases(params), None
    unbiased = {} if biased else dict.fromkeys(BIAS_FIELDS, False)
    variants, refusals = [own_fields], []
    if recipe.norm.name == 'rmsnorm' and is_centred(params):
        # RMSNorm and LayerNorm are equal on a stream with zero mean.
        as_norm = {path: 'layernorm' for path in ('model.norm', 'model.final_norm')}
        variants.append(own_fields | as_norm)
    gathered = gather_fields(recipe)
    for wanted_fields in variants:
        wanted_norms = {path: wanted_fields[path] for path in ('model.norm', 'model.final_norm')}
        for name, family in sorted(FAMILIES.items(), key=lambda entry: entry[0] != preferred):
            try:
                # A family has the model if its config.json, read again, gives the same fields.
                source_factors = dict(factors or {}) if name == preferred else {}
                written_fields = gathered | wanted_norms | unbiased | source_factors
                config = family.write(written_fields)
                fields = family.read(config)
                converted = recipe_for(fields, to_dict(recipe), recipe.data.tokenizer)
            except ValueError as error:  # their class, or its code, does not allow a value
                refusals.append(f'{name}: {error}')
                continue
            family_fields = describe_model(converted)
            lacks = [
                path
                for path in wanted_fields
                if path not in family_fields or wanted_fields[path] != family_fields[path]
            ]
            lacks += [path for path in biased if not has_bias(family, converted, path)]
            if not lacks:
                check_eps(recipe)
                return name, {'model_type': name} | config, converted
            if best is None or len(lacks) < len(best[1]):
                best = name, lacks, family_fields
    if best is None:
        raise ValueError(
            f'no family of transformers can represent this model: {"; ".join(refusals)}'
        )
    name, lacks, family_fields = best
    missing = [
        f'{p}={own_fields[p]!r} (it has {family_fields.get(p)!r})' if p in own_fields else p
        for p in lacks
    ]
    lack = f'the nearest, {name}, lacks {format_list(missing)}. Families: {", ".join(FAMILIES)}.'
    if recipe.is_mixed:
        try:
            merge_kinds(recipe)
        except ValueError as error:
            raise ValueError(f'{error} Of the families with several kinds, {lack}') from None
    raise ValueError(f'no family of transformers can represent this model; {lack}')


def check_eps(recipe: Recipe) -> None:
    """Raises ValueError if the norms have different eps, since a config.json has a single eps."""
    eps = {
        path: part.options['eps'] for path, part in recipe.norms.items() if 'eps' in part.options
    }
    if len({*eps.values()}) > 1:
        values = ', '.join(f'{value:g} in {path}' for path, value in eps.items())
        raise ValueError(
            'no family of transformers can represent this model: its norms must have the same '
            f'eps; got {values}. Train it with one norm.eps for all norms.'
        )


def list_nonzero_biases(params: Params) -> list[str]:
    """Returns the paths of the matrix biases in the blocks that are not 0."""
    biases = (p for p in params if p.endswith('_bias') and not p.endswith(NO_MATRIX_BIASES))
    return [p for p in biases if '/' in p and np.any(params[p])]


def has_bias(family: Family, recipe: Recipe, path: str) -> bool:
    """Whether a model of the family with this recipe has a bias.

    Args:
      family: of transformers.
      recipe: of the imported model.
      path: of the bias in our tree.
    """
    fields = flatten(recipe)
    has_part_bias = any(
        fields[field] and path.endswith(biases) for biases, field in hf_config.PART_FIELDS.items()
    )
    has_model_bias = recipe.model.bias or has_part_bias
    ends = {name.removeprefix(LAYERS) for row in family.rows for name in row.paths}
    return has_model_bias and path.endswith(tuple(f'/{end}' for end in ends))


def is_centred(params: Params) -> bool:
    """Whether all that is written to the stream has a mean of 0, up to rounding."""
    writers = [
        path
        for path in params
        if path in ('embedding', 'positions/table')
        or path.endswith(('/out', '/out_bias', '/down', '/down_bias'))
    ]
    return all(
        np.max(np.abs(np.mean(params[path], -1, dtype=np.float64))) <= 1e-6 * _rms(params[path])
        for path in writers
        if np.any(params[path])
    )


def _rms(x: np.ndarray) -> float:
    return float(np.sqrt(np.mean(np.square(x, dtype=np.float64))))


def convert_params(
    params: Params, shapes: Mapping[str, Any], recipe: Recipe, dtype: np.dtype
) -> None:
    """Converts parameters in place to the parameters of `recipe`, with the same logits.

    Args:
      params: by path; changed in place.
      shapes: of the parameters of `recipe`, by path.
      recipe: the model in the family.
      dtype: of the files; transformers rounds the factor of embeddings to it.

    Raises:
      ValueError: for parameters that have no place in the family.
    """
    # Gains of 1 and biases of 0 compute the same as a norm or matrix without them.
    for path, shape in shapes.items():
        if path.endswith('/scale') and path not in params:
            params[path] = np.ones(shape, np.float32)
        elif path.endswith('bias') and path not in params:
            params[path] = np.zeros(shape, np.float32)
    stored_factor = embedding_factor(recipe, dtype) if SCALE in shapes else np.float32(1)
    # The embedding absorbs the difference; a tied readout would multiply logits by it too.
    factor = params.pop(SCALE, np.float32(1)) / stored_factor
    if factor != 1:
        params['embedding'] = params['embedding'] * factor
        if recipe.model.tie_embeddings:
            multiply_readout(params, recipe, 1 / factor)
    if SCALE in shapes:
        params[SCALE] = stored_factor
    bias = np.zeros(1) if 'readout_bias' in shapes else params.pop('readout_bias', np.zeros(1))
    if np.any(bias):
        add_readout_bias(params, bias)
    for path in [p for p in params.keys() - shapes.keys() if p.endswith('bias')]:
        if not np.any(params[path]):
            del params[path]
    wrong = params.keys() ^ shapes.keys()
    wrong |= {path for path in params.keys() & shapes.keys() if params[path].shape != shapes[path]}
    if wrong:
        raise ValueError(
            f'this family of transformers has no parameter for {format_list(sorted(wrong))}'
        )
    for path in params:
        params[path] = np.asarray(params[path], np.float32)


def add_readout_bias(params: Params, bias_V: np.ndarray) -> None:
    """Moves a bias of the logits into the last norm: finds b with b W = bias_V.

    Such a b exists if the bias came from the norm, as in a folded LayerNorm. Raises ValueError if
    there is none.
    """
    weight_DV = params.get('readout', params['embedding'].T).astype(np.float64)
    bias_V = bias_V.astype(np.float64)
    # Normal equations [D, D] are smaller than least squares over V rows.
    moved_D = np.linalg.lstsq(weight_DV @ weight_DV.T, weight_DV @ bias_V, rcond=None)[0]
    missed = np.max(np.abs(moved_D @ weight_DV - bias_V)) / np.max(np.abs(bias_V))
    if BIAS not in params or missed > 1e-6:
        raise ValueError(
            'models of transformers have no bias of logits (model.readout_bias), and the last norm '
            'cannot absorb it'
        )
    params[BIAS] = params[BIAS] + moved_D


def export_tensors(exported: ExportedModel, dtype: str) -> dict[str, safetensors.Tensor]:
    """Returns the tensors of the files by name. Each is computed when it is written."""
    params, family = exported.params, FAMILIES[exported.model_type]
    shapes, kind, tensors = {p: x.shape for p, x in params.items()}, DTYPES[dtype], {}
    for place in family.list_tensors(shapes, exported.recipe):

        def make(place=place):
            row = place.row
            arrays = [
                _file_values(params[path][place.index], row, exported.factors.get(path, 1.0))
                for path in row.paths
            ]
            return row.layout.join(arrays)

        shape = place.row.layout.file_shape(place.shapes(shapes))
        tensors[place.name] = safetensors.Tensor(kind, shape, make)
    return tensors


def tokenizer_config(tokenizer: SubwordTokenizer) -> dict[str, Any]:
    """Returns the tokenizer_config.json of a tokenizer. BOS and EOS need a spelling."""
    ids = {'bos_token': tokenizer.bos_id, 'eos_token': tokenizer.eos_id}
    spelt = {name: tokenizer.library.id_to_token(i) for name, i in ids.items()}
    return {'tokenizer_class': 'PreTrainedTokenizerFast'} | {n: t for n, t in spelt.items() if t}


def write_folder(
    folder: Path,
    checkpoint: Checkpoint,
    exported: ExportedModel,
    dtype: str,
    max_bytes: int = MAX_FILE_BYTES,
) -> list[str]:
    """Writes the weights, the tokenizer, and config.json.

    config.json comes last: transformers does not take a folder without it for a model.

    Args:
      folder: an empty or new folder.
      checkpoint: gives the tokenizer and its files.
      exported: the model.
      dtype: of the weights in the files.
      max_bytes: of a file of weights.

    Returns:
      Notes on what is not exported, or differs.

    Raises:
      ValueError: if `folder` is not empty.
    """
    tokenizer = checkpoint.tokenizer
    ids = {'bos_token_id': tokenizer.bos_id, 'eos_token_id': tokenizer.eos_id}
    config = {
        'architectures': [FAMILIES[exported.model_type].architecture],
        **exported.config,
        'vocab_size': checkpoint.meta['vocab_size'],
        **ids,
        'pad_token_id': None,  # the default of the class may be outside this vocabulary
        'dtype': dtype,  # the name in transformers 5
        'torch_dtype': dtype,  # the name in transformers 4
    }
    notes = factor_notes(exported.recipe, DTYPES[dtype], exported.params)
    with fill_folder(folder):
        safetensors.write_folder(folder, export_tensors(exported, dtype), max_bytes)
        notes += write_tokenizer(folder, tokenizer)
        if not (folder / GENERATION_FILE).is_file():
            write_json(folder / GENERATION_FILE, ids)
        write_json(folder / hf_config.FILE, config)
    return notes


def write_tokenizer(folder: Path, tokenizer: Tokenizer) -> list[str]:
    """Writes a tokenizer as transformers reads it, with the files that belong to it.

    Args:
      folder: that exists.
      tokenizer: of a run.

    Returns:
      A note if transformers has no such tokenizer.
    """
    if not isinstance(tokenizer, SubwordTokenizer):
        return [f'no {LIBRARY_FILE} was written: pass token ids to this model in transformers']
    tokenizer.library.save(str(folder / LIBRARY_FILE))
    write_files_beside(folder, tokenizer.beside)
    # A tokenizer trained by a run has only tokenizer.json.
    if CONFIG_FILE not in tokenizer.beside:
        write_json(folder / CONFIG_FILE, tokenizer_config(tokenizer))
    return []
