"""Exports the factors of a model with model.reparam=lora as an adapter that PEFT loads.

Its base is the model that `export_hf` writes from the weights without the factors. If only the
factors were trained, these are the weights of `train.init_from`.
"""

import dataclasses
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from eval.convert import safetensors
from eval.convert.export_hf import export_checkpoint, write_tokenizer
from eval.convert.families import FAMILIES
from eval.convert.families.family import TensorPlace
from eval.convert.layouts import Layout
from eval.load import Checkpoint
from lm.data.tokenizers import Tokenizer
from lm.storage.files import write_json
from lm.storage.filling import fill_folder
from modules.params import LORA, ParamSpec, matrix_axes, named_leaves, path_name

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'  # of module names in PEFT
TOLERANCE = 1e-5  # of a matrix against base plus product, relative to its largest element


class Adapter(NamedTuple):
    """Files of an adapter: adapter_config.json, and the tensors by name."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


def export_adapter(checkpoint: Checkpoint, base: str) -> Adapter:
    """Returns the factors of a checkpoint under PEFT's names, without writing files.

    Args:
      checkpoint: of a model with model.reparam=lora.
      base: name or folder of the model without the factors; PEFT reads it from the adapter.

    Returns:
      The adapter.

    Raises:
      ValueError: for a model without factors, for factors of other parameters than matrices in
        blocks, for a model that no family has, and if a matrix is not the base's plus the product
        of its factors.
    """
    recipe = checkpoint.recipe
    if recipe.model.reparam != 'lora':
        raise ValueError(
            f'an adapter needs model.reparam=lora; got model.reparam={recipe.model.reparam}. Use '
            'eval.convert export-hf to write the whole model.'
        )
    if recipe.is_mixed:
        raise ValueError(
            f'the factors of model.pattern={recipe.model.pattern} are stored by kind of block, and '
            'an adapter has them by layer. Use eval.convert export-hf to write the whole model.'
        )
    (part,) = recipe.reparam
    options = part.options
    # rsLoRA divides alpha by sqrt(r), LoRA by r.
    scale = options['alpha'] / options['rank'] ** (0.5 if options['rslora'] else 1)
    merged, without = export_checkpoint(checkpoint), export_checkpoint(_zero_factors(checkpoint))
    stored = {p: np.asarray(x) for p, x in named_leaves(checkpoint.weights.params).items()}
    used = named_leaves(checkpoint.learner.description.used_specs)
    family = FAMILIES[merged.model_type]
    shapes = {path: x.shape for path, x in merged.params.items()}
    tensors, modules, ranks, is_transposed = {}, set(), {}, False
    for place in family.list_tensors(shapes, merged.recipe):
        paths = place.row.paths
        if not any(f'{path}/a' in stored for path in paths):
            continue
        _check_factors(place, [used[path] for path in paths], stored)
        factors = [merged.factors.get(path, 1.0) for path in paths]
        pairs = [
            (stored[f'{path}/a'][place.index], stored[f'{path}/b'][place.index] / factor)
            for path, factor in zip(paths, factors, strict=True)
        ]
        in_a, in_b, is_transposed = join_factors(place.row.layout, used[paths[0]], pairs)
        merged_weight, base_weight = (
            place.row.layout.join(
                [
                    np.asarray(model.params[path][place.index], np.float64) / factor
                    for path, factor in zip(paths, factors, strict=True)
                ]
            )
            for model in (merged, without)
        )
        product = scale * np.float64(in_b) @ np.float64(in_a)
        # A factor that the family folds into the matrix would break W = base + scale B A.
        error = np.max(
            np.abs(merged_weight - base_weight - (product.T if is_transposed else product))
        )
        if not error <= TOLERANCE * np.max(np.abs(merged_weight)):
            raise ValueError(
                f'{place.name} does not equal the base plus the product of its factors, because '
                f'{merged.model_type} scales it. Use eval.convert export-hf to write the merged '
                'model.'
            )
        module = place.name.removesuffix('.weight')
        # PEFT matches target_modules by suffix; two parts tell mlp.c_proj from attn.c_proj.
        module_name = '.'.join(module.split('.')[-2:])
        modules.add(module_name)
        if len(paths) > 1:
            ranks[module_name] = options['rank'] * len(paths)
        tensors[f'{PREFIX}{module}.lora_A.weight'] = in_a
        tensors[f'{PREFIX}{module}.lora_B.weight'] = in_b
    config = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base,
        'r': options['rank'],
        'lora_alpha': options['alpha'],
        'rank_pattern': ranks,
        # PEFT divides alpha by the rank of the module, so that the scale stays the same.
        'alpha_pattern': {
            name: scale * rank ** (0.5 if options['rslora'] else 1) for name, rank in ranks.items()
        },
        'use_rslora': options['rslora'],
        'use_dora': False,
        'lora_dropout': 0.0,
        'target_modules': sorted(modules),
        'fan_in_fan_out': is_transposed,
        'bias': 'none',
        'inference_mode': True,
    }
    return Adapter(config, tensors)


def join_factors(
    layout: Layout, spec: ParamSpec, pairs: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Returns the factors of a file's tensor, which may hold several matrices.

    The product B A is laid out as [O, I]. R is r times the number of matrices: each column of B
    belongs to a single matrix, and is 0 at the outputs of the others.

    Args:
      layout: of the tensor.
      spec: of any of the matrices, which all read the same inputs.
      pairs: (a, b) of each matrix, of shapes [rows of the matrix, r] and [r, its columns].

    Returns:
      (A [R, I], B [O, R], whether the file's tensor is [I, O]).
    """
    n_rows, rank = len(matrix_axes(spec)[1]), pairs[0][1].shape[0]
    n_columns = pairs[0][1].ndim - 1
    total_rank = rank * len(pairs)

    def as_rows(a):
        """Replaces the axes of the outputs by the rank, for the layout of the file."""
        return a.reshape(*a.shape[:n_rows], rank, *(1,) * (n_columns - 1))

    def as_columns(part, b):
        """Replaces the axes of the inputs by the rank, with 0 in the columns of other matrices."""
        columns = np.zeros((total_rank, *b.shape[1:]), b.dtype)
        columns[part_of_column == part] = b
        return columns.reshape(total_rank, *(1,) * (n_rows - 1), *b.shape[1:])

    # The layout may interleave the matrices; joining their numbers shows the order of the columns.
    part_numbers = [np.full((*(1,) * n_rows, rank), part) for part in range(len(pairs))]
    part_of_column = layout.join([as_rows(part_number) for part_number in part_numbers]).reshape(
        total_rank
    )
    in_a = layout.join([as_rows(a) for a, _ in pairs])
    in_b = layout.join([as_columns(part, b) for part, (_, b) in enumerate(pairs)])
    is_transposed = layout.groups[0] == layout.ours[:n_rows]
    return (in_a.T, in_b.T, True) if is_transposed else (in_a, in_b, False)


def write_folder(folder: Path, adapter: Adapter, tokenizer: Tokenizer) -> None:
    """Writes the two files of an adapter, and the tokenizer that it was trained with.

    Args:
      folder: an empty or new folder.
      adapter: the factors.
      tokenizer: of the run.

    Raises:
      ValueError: if `folder` is not empty.
    """
    tensors = {name: x.astype(np.float32) for name, x in adapter.tensors.items()}
    with fill_folder(folder):
        safetensors.write_file(folder / WEIGHTS, safetensors.make_tensors(tensors))
        write_tokenizer(folder, tokenizer)
        write_json(folder / CONFIG, adapter.config)


def _zero_factors(checkpoint: Checkpoint) -> Checkpoint:
    specs, weights = checkpoint.learner.description.specs, checkpoint.weights

    def zero_b(path, spec, weight):
        # With b = 0 the product of the factors is 0, and the base model remains.
        is_b = spec.part == LORA and path_name(path).endswith('/b')
        return np.zeros_like(weight) if is_b else weight

    params = jax.tree_util.tree_map_with_path(zero_b, specs, weights.params)
    return dataclasses.replace(checkpoint, weights=weights.replace(params=params))


def _check_factors(place: TensorPlace, specs: Sequence[ParamSpec], stored: Container[str]) -> None:
    """Raises ValueError if PEFT does not support factors of a tensor."""
    reason = ''
    if '.experts.' in place.row.name:
        reason = 'is an expert, and transformers stores all experts in one module'
    elif other_roles := [spec.role for spec in specs if spec.role != 'hidden']:
        reason = f'has the role {other_roles[0]} (leave that role out of reparam.roles)'
    elif without_factors := [path for path in place.row.paths if f'{path}/a' not in stored]:
        reason = f'also contains {", ".join(without_factors)}, without factors'
    if reason:
        raise ValueError(
            f'PEFT cannot represent the factors of {place.name}: it {reason}. Use eval.convert '
            'export-hf to write the merged model.'
        )
