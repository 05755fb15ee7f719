"""An n-gram model of bytes on the same split, as a baseline for transformers."""

from collections.abc import Iterable

import numpy as np

from eval.load import Checkpoint, open_data
from eval.suites.base import SuiteResult
from lm.config.mixture import MixedRows, mean_by_share, split_by_source
from lm.data import Rows

ORDER = 5
START = 256  # the symbol before the first byte of a document
BASE = 257  # 256 bytes and START


def ngram(checkpoint: Checkpoint) -> SuiteResult:
    """Measures bits per byte of an n-gram model, as a baseline.

    It is an interpolated Kneser-Ney model of the bytes of the run's training split. For a mixture,
    a single model is fitted to all text of all sources, whatever their shares. The bits on each
    source's validation split are weighted by data.mixture, like those of the transformer.
    """
    dataset, tokenizer = open_data(checkpoint), checkpoint.tokenizer
    bits_by_source = {
        name: kneser_ney_bits(
            document_bytes(dataset.train, tokenizer), document_bytes(rows, tokenizer), order=ORDER
        )
        for name, rows in split_by_source(dataset.validation).items()
    }
    per_byte = {name: bits / n_bytes for name, (bits, n_bytes) in bits_by_source.items()}
    return SuiteResult(
        {
            f'ngram{ORDER}_bits_per_byte': mean_by_share(per_byte, dataset.validation),
            'bytes': sum(n_bytes for _, n_bytes in bits_by_source.values()),
        }
    )


def document_bytes(rows: Rows | MixedRows, tokenizer) -> Iterable[np.ndarray]:
    """Yields the bytes of each document of a split."""
    for tokens in rows.documents():
        text = tokenizer.decode(tokens.tolist()).encode()
        yield np.frombuffer(text, np.uint8)


def kneser_ney_bits(
    train: Iterable[np.ndarray], test: Iterable[np.ndarray], order: int
) -> tuple[float, int]:
    """Returns the bits to code `test` under an interpolated Kneser-Ney model of `train`.

    p_n(w | h) = max(c(h w) - D_n, 0) / c(h) + D_n t(h) / c(h) * p_{n-1}(w | h')

    c counts occurrences at the highest order and distinct left neighbours below. t(h) is the number
    of distinct w after h, h' drops the oldest byte, and p_0 = 1/256. D_n = n1 / (n1 + 2 n2), with
    n1 and n2 the numbers of counts equal to 1 and 2. Source: Chen and Goodman 1999, equation 29.

    Args:
      train: bytes of the training documents.
      test: bytes of the test documents.
      order: the largest n.

    Returns:
      (bits to code `test`, its bytes).
    """
    train_grams, test_grams = _encode_grams(train, order), _encode_grams(test, order)
    probability = np.full(len(test_grams), 1 / 256)
    top_counts = np.unique(train_grams, axis=None, return_counts=True)
    levels = [top_counts]
    for _ in range(order - 1):  # a distinct gram counts once for its suffix: continuation counts
        suffixes = levels[0][0] % BASE ** (order - len(levels))
        levels.insert(0, np.unique(suffixes, return_counts=True))
    for n, (grams, counts) in enumerate(levels, start=1):
        n_once, n_twice = np.sum(counts == 1), np.sum(counts == 2)
        discount = n_once / (n_once + 2 * n_twice) if n_once else 0.0
        contexts, first, distinct = np.unique(grams // BASE, return_index=True, return_counts=True)
        totals = np.add.reduceat(counts, first)
        queries = test_grams % BASE**n
        count = _look_up(grams, counts, queries)
        total = _look_up(contexts, totals, queries // BASE)
        n_distinct = _look_up(contexts, distinct, queries // BASE)
        safe = np.maximum(total, 1)
        interpolated = (
            np.maximum(count - discount, 0) / safe + discount * n_distinct / safe * probability
        )
        # A context that never occurred keeps the probability of the lower order.
        probability = np.where(total > 0, interpolated, probability)
    return float(-np.log2(probability).sum()), len(test_grams)


def _encode_grams(documents: Iterable[np.ndarray], order: int) -> np.ndarray:
    """Returns each byte with the order - 1 symbols before it, as a number in base 257."""
    numbers = []
    for text in documents:
        symbols = np.concatenate([np.full(order - 1, START), text.astype(np.int64)])
        gram = np.zeros(len(text), np.int64)
        for i in range(order):
            gram = gram * BASE + symbols[i : i + len(text)]  # 257**5 fits int64
        numbers.append(gram)
    return np.concatenate(numbers)


def _look_up(keys: np.ndarray, values: np.ndarray, queries: np.ndarray) -> np.ndarray:
    """Returns values[keys == queries], 0 for missing keys. keys are sorted."""
    at = np.minimum(np.searchsorted(keys, queries), len(keys) - 1)
    return np.where(keys[at] == queries, values[at], 0)
