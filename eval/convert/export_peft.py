"""Exports the factors of a model with model.reparam=lora as an adapter that PEFT loads.

The adapter goes on the model that `export_hf` makes of the weights which the factors left alone:
those of `train.init_from`, if the factors alone were trained.
"""

import dataclasses
from collections.abc import Container, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import jax
import numpy as np

from eval.convert import safetensors
from eval.convert.export_hf import export_checkpoint
from eval.convert.hf_families import FAMILIES, TensorPlace
from eval.convert.layouts import Layout
from eval.load import Checkpoint
from lm.storage.files import write_json
from lm.storage.filling import fill_folder
from modules.params import LORA, ParamSpec, matrix_axes, named_leaves, path_name

CONFIG, WEIGHTS = 'adapter_config.json', 'adapter_model.safetensors'
PREFIX = 'base_model.model.'  # what PEFT writes before the name of each module
TOLERANCE = 1e-5  # of a matrix and its factors' product, relative to its largest element


class Adapter(NamedTuple):
    """Files of an adapter: adapter_config.json, and the tensors by name."""

    config: dict[str, Any]
    tensors: dict[str, np.ndarray]


def export_adapter(checkpoint: Checkpoint, base: str) -> Adapter:
    """Returns the factors of a checkpoint by PEFT's names; nothing is written.

    base: a name or folder of the model without them, which PEFT reads from the adapter. Raises
    ValueError for a model without factors or with others than those of matrices in blocks, for one
    that no family has, and where a matrix is not the base's plus its factors' product.
    """
    recipe = checkpoint.recipe
    if recipe.model.reparam != 'lora':
        raise ValueError(
            f'an adapter has the factors of model.reparam=lora, and this is model.reparam='
            f'{recipe.model.reparam}. eval.convert export-hf writes the whole model, merged.'
        )
    (part,) = recipe.reparam
    options = part.options
    scale = options['alpha'] / options['rank'] ** (0.5 if options['rslora'] else 1)
    merged, without = export_checkpoint(checkpoint), export_checkpoint(_zero_factors(checkpoint))
    stored = {p: np.asarray(x) for p, x in named_leaves(checkpoint.weights.params).items()}
    used = named_leaves(checkpoint.learner.description.used_specs)
    family, layers = FAMILIES[merged.model_type], merged.recipe.model.n_layers
    shapes = {path: x.shape for path, x in merged.params.items()}
    tensors, modules, ranks, turned = {}, set(), {}, False
    for place in family.list_tensors(shapes, layers):
        paths = place.row.paths
        if not any(f'{path}/a' in stored for path in paths):
            continue
        _check_factors(place, [used[path] for path in paths], stored)
        pairs = [tuple(stored[f'{path}/{name}'][place.index] for name in 'ab') for path in paths]
        in_a, in_b, turned = join_factors(place.row.layout, used[paths[0]], pairs)
        new, old = (
            place.row.layout.join([np.float64(of.params[path][place.index]) for path in paths])
            for of in (merged, without)
        )
        product = scale * np.float64(in_b) @ np.float64(in_a)
        off = np.max(np.abs(new - old - (product.T if turned else product)))
        if not off <= TOLERANCE * np.max(np.abs(new)):
            raise ValueError(
                f'{place.name} is not the base plus the product of its factors: what '
                f'{merged.model_type} multiplies it by comes between. Merge them: eval.convert '
                'export-hf.'
            )
        module = place.name.removesuffix('.weight')
        short = '.'.join(module.split('.')[-2:])
        modules.add(short)
        if len(paths) > 1:
            ranks[short] = options['rank'] * len(paths)
        tensors[f'{PREFIX}{module}.lora_A.weight'] = in_a
        tensors[f'{PREFIX}{module}.lora_B.weight'] = in_b
    config = {
        'peft_type': 'LORA',
        'task_type': 'CAUSAL_LM',
        'base_model_name_or_path': base,
        'r': options['rank'],
        'lora_alpha': options['alpha'],
        'rank_pattern': ranks,
        # So that what the product is multiplied by stays the same.
        'alpha_pattern': {
            name: scale * rank ** (0.5 if options['rslora'] else 1) for name, rank in ranks.items()
        },
        'use_rslora': options['rslora'],
        'use_dora': False,
        'lora_dropout': 0.0,
        'target_modules': sorted(modules),
        'fan_in_fan_out': turned,
        'bias': 'none',
        'inference_mode': True,
    }
    return Adapter(config, tensors)


def join_factors(
    layout: Layout, spec: ParamSpec, pairs: Sequence[tuple[np.ndarray, np.ndarray]]
) -> tuple[np.ndarray, np.ndarray, bool]:
    """Returns (A [R, I], B [O, R], whether the file's tensor is [I, O]) of one tensor of a file.

    pairs: (a, b) of each matrix that the tensor holds, which read the same inputs; spec: of one of
    them. a has its rows and r, b has r and its columns. R is r for each matrix: a column of B has
    the outputs of one matrix, and 0 for the others. B A is the product, laid out as [O, I].
    """
    n_rows, rank = len(matrix_axes(spec)[1]), pairs[0][1].shape[0]
    n_columns = pairs[0][1].ndim - 1
    total = rank * len(pairs)

    def as_rows(a):
        """Puts the factors' number in the place of outputs, in the order of the file."""
        return a.reshape(*a.shape[:n_rows], rank, *(1,) * (n_columns - 1))

    def as_columns(part, b):
        """Puts the factors' number in the place of inputs."""
        columns = np.zeros((total, *b.shape[1:]), b.dtype)
        columns[of_part == part] = b
        return columns.reshape(total, *(1,) * (n_rows - 1), *b.shape[1:])

    numbers = [np.full((*(1,) * n_rows, rank), part) for part in range(len(pairs))]
    of_part = layout.join([as_rows(one) for one in numbers]).reshape(total)
    in_a = layout.join([as_rows(a) for a, _ in pairs])
    in_b = layout.join([as_columns(part, b) for part, (_, b) in enumerate(pairs)])
    turned = layout.groups[0] == layout.ours[:n_rows]
    return (in_a.T, in_b.T, True) if turned else (in_a, in_b, False)


def write_folder(folder: Path, adapter: Adapter) -> None:
    """Writes the two files of an adapter. ValueError where `out` holds something."""
    tensors = {name: x.astype(np.float32) for name, x in adapter.tensors.items()}
    with fill_folder(folder):
        safetensors.write_file(folder / WEIGHTS, safetensors.make_tensors(tensors))
        write_json(folder / CONFIG, adapter.config)


def _zero_factors(checkpoint: Checkpoint) -> Checkpoint:
    specs, weights = checkpoint.learner.description.specs, checkpoint.weights

    def zeroed(path, spec, weight):
        is_b = spec.part == LORA and path_name(path).endswith('/b')
        return np.zeros_like(weight) if is_b else weight

    params = jax.tree_util.tree_map_with_path(zeroed, specs, weights.params)
    return dataclasses.replace(checkpoint, weights=weights.replace(params=params))


def _check_factors(place: TensorPlace, specs: Sequence[ParamSpec], stored: Container[str]) -> None:
    """Raises ValueError for a tensor whose factors PEFT has no place for, or in another form."""
    why = ''
    if '.experts.' in place.row.name:
        why = 'is an expert, which transformers keeps in one module with the others'
    elif other := [spec.role for spec in specs if spec.role != 'hidden']:
        why = f'has the role {other[0]}: leave it out of reparam.roles'
    elif lacking := [path for path in place.row.paths if f'{path}/a' not in stored]:
        why = f'also holds {", ".join(lacking)}, without factors'
    if why:
        raise ValueError(
            f'the factors of {place.name} are none of PEFT: it {why}. eval.convert export-hf '
            'writes the whole model, merged.'
        )
