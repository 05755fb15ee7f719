"""Text of linear regressions, from which a model may learn in-context regression.

A document is a task y = w x + noise with its own w, written as pairs x1 y1 x2 y2 ..., where each
number is one printable byte. After Garg et al. 2022 (arXiv:2208.01066); x is uniform as in von
Oswald et al. 2023 (arXiv:2212.07677).
"""

import dataclasses
from typing import NamedTuple

import numpy as np

LENGTH = 126  # bytes of a document: with BOS and EOS it has 128 tokens
NOISE = 0.1  # standard deviation
LARGEST = 2.0  # magnitude that a byte can represent; few |y| are larger
LEVELS = 95  # the printable characters of ASCII
FIRST = 32  # the byte of -LARGEST
SPACING = 2 * LARGEST / (LEVELS - 1)
# Variance of the written y, given w and x: noise, and a rounding error uniform over SPACING.
NOISE_VARIANCE = NOISE**2 + SPACING**2 / 12

VALUES = (np.arange(LEVELS) - (LEVELS - 1) / 2) * SPACING  # of each level


class Tasks(NamedTuple):
    """N tasks of P pairs, in numbers of VALUES. clean_NP: w x."""

    x_NPD: np.ndarray
    y_NP: np.ndarray
    clean_NP: np.ndarray


@dataclasses.dataclass(frozen=True)
class Regression:
    """Tasks of one dimension. dim: features of x."""

    dim: int

    @property
    def pair_bytes(self) -> int:
        """Bytes of a pair."""
        return self.dim + 1

    @property
    def n_pairs(self) -> int:
        """Pairs in a document."""
        return LENGTH // self.pair_bytes

    @property
    def w_variance(self) -> float:
        return 1 / self.dim

    def sample(self, rng: np.random.Generator) -> np.ndarray:
        """Returns the bytes [LENGTH] of a random task.

        w ~ N(0, I / dim), x is uniform in [-1, 1] and rounded to a level, y = w x + N(0, NOISE^2),
        rounded too.
        """
        return encode_tasks(self.sample_tasks(rng, 1))[0]

    def sample_tasks(self, rng: np.random.Generator, count: int) -> Tasks:
        """Samples `count` tasks from the distribution of `sample`."""
        w_ND = rng.normal(0, self.w_variance**0.5, (count, self.dim))
        x_NPD = round_to_levels(rng.uniform(-1, 1, (count, self.n_pairs, self.dim)))
        clean_NP = np.einsum('npd,nd->np', x_NPD, w_ND)
        y_NP = round_to_levels(clean_NP + rng.normal(0, NOISE, clean_NP.shape))
        return Tasks(x_NPD, y_NP, clean_NP)


# By the name in data.source=synthetic:NAME. Their documents are of one length.
REGRESSIONS = {
    'linear_regression': Regression(2),
    'linear_regression_1d': Regression(1),
    'linear_regression_5d': Regression(5),
}


def round_to_levels(values: np.ndarray) -> np.ndarray:
    """Returns the nearest numbers that a byte can represent."""
    return VALUES[_nearest_levels(values)]


def encode_tasks(tasks: Tasks) -> np.ndarray:
    """Returns the bytes [N, LENGTH] of tasks."""
    pairs = np.concatenate([tasks.x_NPD, tasks.y_NP[..., None]], -1)
    return (FIRST + _nearest_levels(pairs.reshape(len(pairs), -1))).astype(np.uint8)


def _nearest_levels(values: np.ndarray) -> np.ndarray:
    """Returns the index of the nearest level for each number."""
    nearest = np.rint(values / SPACING + (LEVELS - 1) / 2).astype(np.int64)
    return np.clip(nearest, 0, LEVELS - 1)
