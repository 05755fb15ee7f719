"""Means of the weights of several models, and bases of what they differ by from a base.

Computed in float64 and rounded once to the type of the weights. Each index of the batch axes of a
parameter (layer, expert) is a matrix of its own.
"""

from collections.abc import Mapping, Sequence
from typing import NamedTuple

import numpy as np

from modules.params import ParamSpec, batch_axes

EPS = 1e-4  # of the wanted variance: no factor is above 100
Flat = Mapping[str, np.ndarray]  # {'layers/mlp/up': ..., ...}


class Basis(NamedTuple):
    """Differences [..., n, S] as coefficients [..., n, p] times directions [..., p, S], flattened
    matrices, orthonormal.
    """

    directions: np.ndarray
    coefficients: np.ndarray


def compute_mean(parts: Sequence[np.ndarray]) -> np.ndarray:
    """Returns the mean in float64. The mean of equal float32 arrays is theirs, bitwise."""
    total = to_float64(parts[0])
    for part in parts[1:]:
        total += part
    return total / len(parts)


def to_float64(array: np.ndarray) -> np.ndarray:
    """Returns the array in float64, laid out as all others, so that equal ones sum alike."""
    return np.array(array, np.float64, order='C')


def rescale_variance(merged: np.ndarray, parts: Sequence[np.ndarray], n_batch: int) -> np.ndarray:
    """Returns `merged` scaled about its mean m to the mean v* of the variances of its parts:

        m + (x - m) sqrt((v* + eps v*) / (v + eps v*))

    Means and variances v are over all axes behind the first `n_batch`. Independent parts of equal
    variance v*, K of them, have a mean of variance v* / K, and a factor of sqrt(K). Equal parts are
    left as they are, bitwise.

    Source: arXiv:2404.04616, whose code adds eps = 1e-4 itself in place of eps v*. The variance of
    a wide matrix, 1 / fan_in, is of that size, so that little of it came back.
    """
    merged, axes = to_float64(merged), tuple(range(n_batch, merged.ndim))
    now = np.var(merged, axes, keepdims=True)
    first, *others = [np.var(to_float64(part), axes, keepdims=True) for part in parts]
    wanted = first + sum(other - first for other in others) / len(parts)  # exact for equal parts
    eps = EPS * wanted
    is_there = now + eps > 0
    ratio = np.where(is_there, wanted + eps, 1.0) / np.where(is_there, now + eps, 1.0)
    return merged + (np.sqrt(ratio) - 1) * (merged - np.mean(merged, axes, keepdims=True))


def merge_params(
    specs: Mapping[str, ParamSpec], models: Sequence[Flat], keep: str | None
) -> dict[str, np.ndarray]:
    """Returns the mean of the parameters of models, by path.

    keep: 'variance' rescales each matrix `rescale_variance`. Gains, biases and other vectors start at
    a constant, of variance 0, which no scale brings back: they are means.
    """
    found = {}
    for path, spec in specs.items():
        parts = [np.asarray(model[path]) for model in models]
        merged = compute_mean(parts)
        if keep == 'variance' and spec.role != 'vector':
            merged = rescale_variance(merged, parts, len(batch_axes(spec)))
        found[path] = merged.astype(parts[0].dtype)
    return found


def compute_basis(differences: np.ndarray, p: int) -> Basis:
    """Returns the p principal directions of n differences [..., n, S]: the right singular vectors
    of the largest singular values s. No other p lose less: sum_{i > p} s_i^2.
    """
    left, sizes, right = np.linalg.svd(differences, full_matrices=False)
    return Basis(right[..., :p, :], left[..., :p] * sizes[..., None, :p])


def compute_bases(
    specs: Mapping[str, ParamSpec], base: Flat, models: Sequence[Flat], p: int
) -> dict[str, Basis]:
    """Returns by path the basis of the differences of models from a base, in the type of the base.

    A matrix of fewer than p numbers has a basis of as many as it has.
    """
    found = {}
    for path, spec in specs.items():
        start = np.asarray(base[path])
        n_batch = len(batch_axes(spec))
        changed = np.stack([to_float64(model[path]) for model in models], n_batch) - np.expand_dims(
            to_float64(start), n_batch
        )
        flat = changed.reshape(*changed.shape[: n_batch + 1], -1)
        found[path] = Basis(*(x.astype(start.dtype) for x in compute_basis(flat, p)))
    return found


def rebuild_params(base: Flat, bases: Mapping[str, Basis], model: int) -> dict[str, np.ndarray]:
    """Returns the parameters of a model, by its place, from the base and the bases."""
    found = {}
    for path, basis in bases.items():
        own = basis.coefficients[..., model, None, :].astype(np.float64)
        change = (own @ basis.directions.astype(np.float64)).reshape(base[path].shape)
        found[path] = (to_float64(base[path]) + change).astype(np.asarray(base[path]).dtype)
    return found


def relative_error(base: Flat, model: Flat, rebuilt: Flat) -> float:
    """Returns |rebuilt - model| / |model - base| over all parameters; 0 for a model that is the
    base, and comes out so.
    """
    lost = sum(np.sum((to_float64(rebuilt[p]) - to_float64(model[p])) ** 2) for p in base)
    whole = sum(np.sum((to_float64(model[p]) - to_float64(base[p])) ** 2) for p in base)
    return float(np.sqrt(lost / whole)) if lost > 0 else 0.0
