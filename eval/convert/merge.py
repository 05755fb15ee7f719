"""Merges checkpoints into their mean, or into a basis that rebuilds each of them."""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np
from flax.traverse_util import unflatten_dict

from eval.convert import safetensors
from eval.convert.means import (
    Basis,
    compute_bases,
    compute_mean,
    merge_params,
    rebuild_params,
    relative_error,
)
from eval.load import Checkpoint
from lm.config.recipe import Recipe
from lm.config.resolve import NO_SOURCE, differences, resolve_config, update_config
from lm.record.checkpoint import WEIGHT_SECTIONS, check_tree, state_record
from lm.run.start import read_tokenizer_files
from lm.training.state import Weights
from modules.params import named_leaves

BASIS = 'basis.safetensors'
# Fields that do not change the function of a model in evaluation.
TRAINING_FIELDS = (
    *('model.dtype', 'model.remat', 'model.scan_layers'),
    *('model.dropout', 'model.attention_dropout', 'model.embedding_dropout'),
    *('scaling.init', 'scaling.init_scale', 'scaling.embedding_std', 'scaling.zero_init'),
)


def check_arguments(runs: Sequence[str], keep: str | None, basis: int | None, base: str) -> None:
    """Raises ValueError, before anything is loaded, for arguments that cannot be merged.

    Args:
      runs: the checkpoints.
      keep: the flag --keep.
      basis: the flag --basis.
      base: the flag --base.
    """
    if len(runs) < 2:
        raise ValueError(f'merge needs at least two checkpoints; got only {", ".join(runs)}')
    if basis is None:
        if base:
            raise ValueError(f'--base={base} is used only with --basis; add --basis=P')
        return
    if not base:
        raise ValueError('--basis needs --base=RUN, the run from which all runs started')
    if keep:
        raise ValueError(
            f'--keep={keep} and --basis exclude each other: --keep is for means. Leave one out.'
        )
    if not 1 <= basis <= len(runs):
        raise ValueError(f'--basis must be from 1 to {len(runs)}, the number of runs; got {basis}')


def check_alike(checkpoints: Sequence[Checkpoint]) -> None:
    """Raises ValueError if the checkpoints differ in architecture or tokenizer.

    Also raises ValueError for a reparametrisation: the mean of stored weights is not the mean of
    the effective weights.
    """
    first, *later_checkpoints = checkpoints
    for checkpoint in checkpoints:
        check_stored_as_used(checkpoint, 'merged')
    for checkpoint in later_checkpoints:
        field_pairs = differences(first.recipe, checkpoint.recipe).items()
        different = [
            f'{path}={first_value!r} and {value!r}'
            for path, (first_value, value) in field_pairs
            if path.split('.')[0] in (*WEIGHT_SECTIONS, 'scaling') and path not in TRAINING_FIELDS
        ]
        if different:
            raise ValueError(
                f'merged models must have the same architecture; {first.path} and '
                f'{checkpoint.path} have {", ".join(different)}'
            )
        if read_tokenizer_files(first.tokenizer) != read_tokenizer_files(checkpoint.tokenizer):
            raise ValueError(
                f'merged models must have the same tokenizer, so that rows of their embeddings '
                f'match; those of {first.path} and {checkpoint.path} differ. Train both with one '
                'data.tokenizer.'
            )
        check_tree(state_record(checkpoint.weights), state_record(first.weights), checkpoint.path)


def check_stored_as_used(checkpoint: Checkpoint, action: str) -> None:
    """Raises ValueError for a model with a reparametrisation. action: the verb in the error."""
    if (name := checkpoint.recipe.model.reparam) != 'none':
        raise ValueError(
            f'a model must have model.reparam=none to be {action}; {checkpoint.path} has {name}. '
            'First run "python -m eval.convert fold --to=none", which stores the weights in use.'
        )


def merge_checkpoints(checkpoints: Sequence[Checkpoint], keep: str | None) -> Weights:
    """Returns the mean of the weights of models (`eval.convert.means`).

    Statistics of layers are averaged too. Counters and keys come from the first model.
    """
    check_alike(checkpoints)
    models = [flat_params(checkpoint) for checkpoint in checkpoints]
    params = merge_params(flat_specs(checkpoints[0]), models, keep)
    stats = jax.tree.map(average_stats, *(jax.device_get(c.weights.stats) for c in checkpoints))
    return Weights(unflatten_dict(params, sep='/'), (), stats)


def average_stats(*leaves: Any) -> np.ndarray:
    first = np.asarray(leaves[0])
    # A mean of counters or keys has no meaning.
    if not np.issubdtype(first.dtype, np.floating):
        return first
    return compute_mean(leaves).astype(first.dtype)


@dataclasses.dataclass(frozen=True)
class BasisModels:
    """Models in bases, and rebuilt from them.

    bases: by path. weights: rebuilt, of each model. errors: of each model, relative to its
    difference from the base.
    """

    bases: Mapping[str, Basis]
    weights: Sequence[Weights]
    errors: Sequence[float]

    @property
    def n_bytes(self) -> int:
        """The bytes of the bases, without the base model."""
        return sum(x.nbytes for basis in self.bases.values() for x in basis)


def compress_to_basis(base: Checkpoint, checkpoints: Sequence[Checkpoint], p: int) -> BasisModels:
    """Returns models in p principal directions of their differences from a base, for each matrix.

    Statistics of layers are not compressed.

    Args:
      base: the checkpoint that all models started from.
      checkpoints: the models.
      p: directions per matrix.
    """
    check_alike([base, *checkpoints])
    start, models = flat_params(base), [flat_params(checkpoint) for checkpoint in checkpoints]
    bases = compute_bases(flat_specs(base), start, models, p)
    rebuilt = [rebuild_params(start, bases, i) for i in range(len(models))]
    errors = [relative_error(start, *pair) for pair in zip(models, rebuilt, strict=True)]
    weights = [
        Weights(unflatten_dict(params, sep='/'), (), jax.device_get(checkpoint.weights.stats))
        for params, checkpoint in zip(rebuilt, checkpoints, strict=True)
    ]
    return BasisModels(bases, weights, errors)


def write_bases(path: Path, bases: Mapping[str, Basis]) -> None:
    """Writes PARAMETER/directions [..., p, S] and PARAMETER/coefficients [..., n, p] to a file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    arrays = {
        f'{parameter}/{name}': array
        for parameter, basis in bases.items()
        for name, array in basis._asdict().items()
    }
    safetensors.write_file(path, safetensors.make_tensors(arrays))


def standalone_recipe(recipe: Recipe) -> Recipe:
    """Returns the recipe without the run that the model was initialised from."""
    return resolve_config(update_config(recipe.config, NO_SOURCE | {'train.trainable': 'all'}))


def flat_params(checkpoint: Checkpoint) -> dict[str, np.ndarray]:
    return named_leaves(jax.device_get(checkpoint.weights.params))


def flat_specs(checkpoint: Checkpoint) -> dict[str, Any]:
    return named_leaves(checkpoint.learner.description.specs)
