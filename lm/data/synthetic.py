"""Text made from nothing, with a loss that is known in advance: what a model should reach, in bits.

Every document is a function of its name and number alone, so two machines make the same corpus.
"""

import bisect
import functools
import string
from collections.abc import Callable, Iterator
from typing import NamedTuple

import numpy as np

DOCUMENTS = 400
LENGTH = 2048  # characters of a document, and bytes, for all are ASCII
ALPHABET = np.frombuffer(string.ascii_lowercase[:16].encode(), np.uint8)
COPY_BLOCK = 64
RECIPE = 1  # raise it when any document changes: prepared data is kept under it
MARKOV_SEED = 1906  # the year of Markov's paper; any other number makes another language


class Synthetic(NamedTuple):
    draw: Callable[[np.random.Generator], np.ndarray]  # letters [LENGTH] as indices into ALPHABET
    bits_per_byte: Callable[[], float]  # entropy rate: no model does better on long documents


def _uniform(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(len(ALPHABET), size=LENGTH)


def _uniform_bits() -> float:
    return float(np.log2(len(ALPHABET)))


@functools.cache
def _transitions() -> np.ndarray:
    """P[i, j] = p(next = j | current = i), rows drawn once from a peaked Dirichlet."""
    rng = np.random.default_rng(MARKOV_SEED)
    return rng.dirichlet(np.full(len(ALPHABET), 0.3), size=len(ALPHABET))


def _markov(rng: np.random.Generator) -> np.ndarray:
    # The last bound is left out, for a cumulative sum may round to just under 1.
    bounds = _transitions().cumsum(1)[:, :-1].tolist()
    letters = [int(rng.integers(len(ALPHABET)))]
    for u in rng.random(LENGTH - 1).tolist():
        letters.append(bisect.bisect(bounds[letters[-1]], u))
    return np.array(letters)


def _markov_bits() -> float:
    """-sum_i pi_i sum_j P_ij log2 P_ij, where pi P = pi."""
    P = _transitions()
    pi = np.linalg.matrix_power(P, 1 << 12)[0]
    return float(-(pi[:, None] * P * np.log2(np.maximum(P, 1e-300))).sum())


def _copy(rng: np.random.Generator) -> np.ndarray:
    blocks = rng.integers(len(ALPHABET), size=(LENGTH // (2 * COPY_BLOCK), COPY_BLOCK))
    return np.concatenate([blocks, blocks], 1).reshape(-1)


def _copy_bits() -> float:
    """The first half of a block pair is uniform, the second is its copy and costs nothing."""
    return _uniform_bits() / 2


SYNTHETIC = {
    'uniform': Synthetic(_uniform, _uniform_bits),
    'markov': Synthetic(_markov, _markov_bits),
    'copy': Synthetic(_copy, _copy_bits),
}


def documents(name: str) -> Iterator[tuple[str, tuple[bytes]]]:
    for i in range(DOCUMENTS):
        letters = SYNTHETIC[name].draw(np.random.default_rng(i))
        yield f'synthetic:{name}[{i}]', (ALPHABET[letters].tobytes(),)
