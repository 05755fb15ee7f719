"""Paired comparison of two models by the items that both were asked: difference, interval, p-value.

A model's number is sum_i s_i / sum_i w_i over items i: nats over bytes of documents, or hits over
questions. Items are drawn, and pairs stay pairs: what makes an item hard is in both.
"""

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from eval.suites.base import Suite, SuiteResult

CONFIDENCE = 0.95
RESAMPLES = 10_000
MIN_RESAMPLES = 2_000  # of very many items
MAX_DRAWS = 200_000_000  # resamples times items, before there are fewer resamples
CHUNK_DRAWS = 1 << 22  # draws that are in memory
SEED = 0
MIN_ITEMS = 2  # fewer have no spread


@dataclasses.dataclass(frozen=True)
class Pairs:
    """Scores and weights of the items that two models share, [n] each; others are counted.

    only_first, only_second: how many items the other model lacks.
    """

    scores: tuple[np.ndarray, np.ndarray]
    weights: tuple[np.ndarray, np.ndarray]
    only_first: int
    only_second: int

    def __len__(self) -> int:
        return len(self.scores[0])


@dataclasses.dataclass(frozen=True)
class Difference:
    """second - first, with its interval and the p-value that there is none."""

    value: float
    low: float
    high: float
    p: float


def pair_items(first: SuiteResult, second: SuiteResult, suite: Suite) -> Pairs:
    """Returns the items of both by their names.

    Raises ValueError where they have none in common, or one has an item twice.
    """
    tables = [_scores_by_item(result.items, suite) for result in (first, second)]
    shared = [item for item in tables[0] if item in tables[1]]
    if not shared:
        raise ValueError(
            f'they have no {suite.item_noun} in common, of {len(tables[0])} and {len(tables[1])}: '
            'other text, or another split of it, does not compare'
        )
    values = [np.array([own[item] for item in shared], float) for own in tables]
    return Pairs(
        scores=(values[0][:, 0], values[1][:, 0]),
        weights=(values[0][:, 1], values[1][:, 1]),
        only_first=len(tables[0]) - len(shared),
        only_second=len(tables[1]) - len(shared),
    )


def _scores_by_item(
    columns: Mapping[str, Sequence[Any]], suite: Suite
) -> dict[Any, tuple[float, float]]:
    names = columns['item']
    weights = columns[suite.weight] if suite.weight else [1.0] * len(names)
    found = dict(zip(names, zip(columns[suite.score], weights, strict=True), strict=True))
    if len(found) < len(names):
        raise ValueError(
            f'of {len(names)} {suite.item_noun} only {len(found)} have a name of their own'
        )
    return found


def compute_difference(
    pairs: Pairs, scale: float = 1.0, seed: int = SEED, resamples: int = RESAMPLES
) -> Difference:
    """Compares the ratios of sums: sum s / sum w of the second, less that of the first, by `scale`.

    The interval is between percentiles of a bootstrap over items. p is two-sided, of random swaps
    of the two models within items, and counts the observed one: at least 1 / (resamples + 1). Of
    very many items there are fewer resamples (MOST_DRAWS). nan with fewer than FEW_ITEMS items, or
    where a score is not finite.
    """
    table = np.stack([*(scale * own for own in pairs.scores), *pairs.weights], 1)  # [n, 4]
    n, value = len(table), float(_ratio_difference(table.sum(0)))
    if n < MIN_ITEMS or not np.isfinite(table).all():
        return Difference(value, math.nan, math.nan, math.nan)
    rng = np.random.default_rng((seed, n))
    resamples = min(resamples, max(MAX_DRAWS // n, MIN_RESAMPLES))
    drawn = np.concatenate([_bootstrap(table, size, rng) for size in _chunk_sizes(resamples, n)])
    low, high = np.quantile(drawn, [(1 - CONFIDENCE) / 2, (1 + CONFIDENCE) / 2])
    swapped = np.concatenate(
        [_swap_randomly(table, size, rng) for size in _chunk_sizes(resamples, n)]
    )
    # The last digits differ between equal sums in another order.
    as_far = np.abs(swapped) >= abs(value) * (1 - 1e-12)
    p = (1 + np.count_nonzero(as_far)) / (1 + resamples)
    return Difference(value, float(low), float(high), float(p))


def _ratio_difference(sums: np.ndarray) -> np.ndarray:
    """Returns second ratio - first ratio of sums [..., 4]: two scores, then two weights."""
    return sums[..., 1] / sums[..., 3] - sums[..., 0] / sums[..., 2]


def _chunk_sizes(resamples: int, n: int) -> Iterator[int]:
    """Yields how many resamples are drawn at once."""
    most = max(1, CHUNK_DRAWS // n)
    for start in range(0, resamples, most):
        yield min(most, resamples - start)


def _bootstrap(table: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the difference of each of `size` resamples of as many items."""
    n = len(table)
    drawn = rng.integers(n, size=(size, n), dtype=np.int32)
    counts = np.bincount((drawn + n * np.arange(size)[:, None]).ravel(), minlength=n * size)
    return _ratio_difference(counts.reshape(size, n) @ table)


def _swap_randomly(table: np.ndarray, size: int, rng: np.random.Generator) -> np.ndarray:
    """Returns the difference after each of `size` random choices of items that are swapped."""
    swaps = rng.integers(2, size=(size, len(table)), dtype=np.int8)
    return _ratio_difference(table.sum(0) + swaps @ (table[:, [1, 0, 3, 2]] - table))
