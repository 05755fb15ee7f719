"""Means of the weights of several models, and low-rank bases of their differences from a base.

All is computed in float64 and rounded once to the type of the weights. Each index of the batch axes
of a parameter (layer, expert) is a separate matrix.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from modules.params import ParamSpec, batch_axes

EPS = 1e-4  # times the target variance, so that no factor is above 100
Flat = Mapping[str, np.ndarray]  # {'layers/mlp/up': ..., ...}


class Basis(NamedTuple):
    """Differences [..., n, S] as coefficients [..., n, p] times directions [..., p, S].

    The directions are orthonormal, flattened matrices.
    """

    directions: np.ndarray
    coefficients: np.ndarray


def compute_mean(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the mean in float64. The mean of equal float32 arrays is equal to them, bitwise."""
    total = to_float64(parts[0])
    for part in parts[1:]:
        total += part
    return total / len(parts)


def to_float64(array: np.ndarray) -> np.ndarray:
    """Returns the array in float64 and C order, so that equal arrays have equal sums."""
    return np.array(array, np.float64, order='C')


def rescale_variance(merged: np.ndarray, parts: Sequence[np.ndarray], n_batch: int) -> np.ndarray:
    """Scales `merged` about its mean m to the mean variance v* of its parts:

        m + (x - m) sqrt((v* + eps v*) / (v + eps v*))

    The mean of K independent parts of variance v* has variance v* / K, so that the factor is
    sqrt(K). Equal parts do not change, bitwise.

    Source: arXiv:2404.04616. Its code adds eps = 1e-4 itself in place of eps v*. A wide matrix has
    a variance of that size, 1 / fan_in, and would regain only a part of its variance.

    Args:
      merged: the mean of the parts.
      parts: the arrays.
      n_batch: leading axes of separate matrices; means and variances v are over all other axes.
    """
    merged, axes = to_float64(merged), tuple(range(n_batch, merged.ndim))
    variance = np.var(merged, axes, keepdims=True)
    first, *other_variances = [np.var(to_float64(part), axes, keepdims=True) for part in parts]
    target = first + sum(v - first for v in other_variances) / len(parts)  # exact for equal parts
    eps = EPS * target
    is_positive = variance + eps > 0
    ratio = np.where(is_positive, target + eps, 1.0) / np.where(is_positive, variance + eps, 1.0)
    return merged + (np.sqrt(ratio) - 1) * (merged - np.mean(merged, axes, keepdims=True))


def merge_params(
    specs: Mapping[str, ParamSpec], models: Sequence[Flat], keep: str | None
) -> dict[str, np.ndarray]:
    """Returns the mean of the parameters of models, by path.

    Args:
      specs: of the parameters, by path.
      models: parameters of each model, by path.
      keep: 'variance' rescales each matrix by `rescale_variance`. Gains, biases and other vectors
        are plain means: they start at a constant, with variance 0, which no scale can restore.
    """
    mean_by_path = {}
    for path, spec in specs.items():
        parts = [np.asarray(model[path]) for model in models]
        merged = compute_mean(parts)
        if keep == 'variance' and spec.role != 'vector':
            merged = rescale_variance(merged, parts, len(batch_axes(spec)))
        mean_by_path[path] = merged.astype(parts[0].dtype)
    return mean_by_path


def compute_basis(differences: np.ndarray, p: int) -> Basis:
    """Returns the p principal directions of n differences [..., n, S].

    These are the right singular vectors of the largest singular values s. No other p directions
    have a smaller squared error than theirs, sum_{i > p} s_i^2.
    """
    left_vectors, singular_values, right_vectors = np.linalg.svd(differences, full_matrices=False)
    return Basis(right_vectors[..., :p, :], left_vectors[..., :p] * singular_values[..., None, :p])


def compute_bases(
    specs: Mapping[str, ParamSpec], base: Flat, models: Sequence[Flat], p: int
) -> dict[str, Basis]:
    """Returns bases of the differences of models from a base, by path, in the base's dtype.

    A matrix of fewer than p elements has one direction per element.

    Args:
      specs: of the parameters, by path.
      base: parameters of the base model, by path.
      models: parameters of each model, by path.
      p: directions per matrix.
    """
    bases = {}
    for path, spec in specs.items():
        start = np.asarray(base[path])
        n_batch = len(batch_axes(spec))
        changed = np.stack([to_float64(model[path]) for model in models], n_batch) - np.expand_dims(
            to_float64(start), n_batch
        )
        flat = changed.reshape(*changed.shape[: n_batch + 1], -1)
        bases[path] = Basis(*(x.astype(start.dtype) for x in compute_basis(flat, p)))
    return bases


def rebuild_params(base: Flat, bases: Mapping[str, Basis], model: int) -> dict[str, np.ndarray]:
    """Returns the parameters of a model, rebuilt from the base and the bases.

    Args:
      base: parameters of the base model, by path.
      bases: by path.
      model: the number of the model in the bases.
    """
    rebuilt = {}
    for path, basis in bases.items():
        coefficients = basis.coefficients[..., model, None, :].astype(np.float64)
        change = (coefficients @ basis.directions.astype(np.float64)).reshape(base[path].shape)
        rebuilt[path] = (to_float64(base[path]) + change).astype(np.asarray(base[path]).dtype)
    return rebuilt


def relative_error(base: Flat, model: Flat, rebuilt: Flat) -> float:
    """Returns |rebuilt - model| / |model - base| over all parameters; 0 if nothing is lost.

    Args:
      base: parameters of the base model, by path.
      model: the original parameters, by path.
      rebuilt: the rebuilt parameters, by path.
    """
    lost = sum(np.sum((to_float64(rebuilt[p]) - to_float64(model[p])) ** 2) for p in base)
    whole = sum(np.sum((to_float64(model[p]) - to_float64(base[p])) ** 2) for p in base)
    return float(np.sqrt(lost / whole)) if lost > 0 else 0.0
