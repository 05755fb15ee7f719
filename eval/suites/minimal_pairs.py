"""Minimal pairs: whether a model finds the better of two sentences the likelier one."""

import glob
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import scipy.stats

from eval.load import Checkpoint
from eval.suites.base import SuiteResult, Table
from lm.data.formats import file_format, read_json_lines
from lm.data.globs import find_files
from lm.inference.scoring import Scorer
from lm.storage.files import expand_home
from modules.options import Option

GOOD, BAD, PARADIGM = 'sentence_good', 'sentence_bad', 'UID'
SUFFIX = '.jsonl'


class SentencePair(NamedTuple):
    """Two sentences of a paradigm, and the line they are from."""

    paradigm: str
    good: str
    bad: str
    location: str


def minimal_pairs(
    checkpoint: Checkpoint,
    *,
    path: Annotated[
        str, Option('.jsonl file, folder of them, or glob, in the format of BLiMP')
    ] = '',
    limit: Annotated[int, Option('pairs of each paradigm; 0: all', 0)] = 0,
    end: Annotated[bool, Option('whether the end of the document is scored too')] = False,
) -> SuiteResult:
    """accuracy on minimal pairs: log p(good sentence) > log p(bad sentence), each a document.

    A sentence's score is the sum of log p of its tokens after BOS, without EOS unless `end`. The
    accuracy is the mean over paradigms; p_value is that of the one-sided binomial test of all pairs
    against 1/2. A tie is wrong. Source: Warstadt et al. 2020 (arXiv:1912.00582).
    """
    pairs = list(read_pairs(path, limit))
    rows = _encode_pairs(checkpoint, pairs, end)
    log_p = [scores['log_p'].astype(np.float64) for scores in Scorer(checkpoint)(rows)]
    sums, means = (np.reshape([f(one) for one in log_p], (-1, 2)) for f in (np.sum, np.mean))
    margins, is_right = sums[:, 0] - sums[:, 1], sums[:, 0] > sums[:, 1]
    is_right_by_mean = means[:, 0] > means[:, 1]
    names, paradigm_of, counts = np.unique(
        [pair.paradigm for pair in pairs], return_inverse=True, return_counts=True
    )

    def by_paradigm(values):
        return np.bincount(paradigm_of, values) / counts

    accuracies, by_mean = by_paradigm(is_right), by_paradigm(is_right_by_mean)
    test = scipy.stats.binomtest(int(is_right.sum()), len(pairs), alternative='greater')
    return SuiteResult(
        {
            'accuracy': float(accuracies.mean()),
            'standard_error': math.sqrt(np.sum(accuracies * (1 - accuracies) / counts))
            / len(names),
            'accuracy_of_pairs': float(is_right.mean()),
            'p_value': float(test.pvalue),
            'accuracy_by_mean': float(by_mean.mean()),
            'pairs': len(pairs),
            'paradigms': len(names),
        },
        items={
            'item': _item_names(pairs),
            'paradigm': [pair.paradigm for pair in pairs],
            'is_right': is_right.astype(int).tolist(),
            'margin': margins.tolist(),
        },
        tables={
            'Accuracy by paradigm': Table(
                {
                    'paradigm': names.tolist(),
                    'pairs': counts.tolist(),
                    'accuracy': accuracies.tolist(),
                    'accuracy by mean': by_mean.tolist(),
                    'mean margin in nats': by_paradigm(margins).tolist(),
                },
                x='paradigm',
                y='accuracy',
            )
        },
    )


def read_pairs(path: str, limit: int = 0) -> Iterator[SentencePair]:
    """Yields the pairs of a .jsonl file, of those in a folder, or of those that match a glob.

    Args:
      path: the files; their lines have `sentence_good` and `sentence_bad`, and may have `UID`, the
        paradigm, in whose place the name of the file stands.
      limit: the first so many of each paradigm; 0: all.

    Raises:
      ValueError: where there is no such file, or a line that is no pair.
    """
    taken: dict[str, int] = {}
    for file in _find_pair_files(path):
        stem = file.name[: file.name.index(SUFFIX)]
        for where, record in read_json_lines(file):
            paradigm = record.get(PARADIGM, stem)
            pair = SentencePair(paradigm, record.get(GOOD), record.get(BAD), where)
            for name, value in ((GOOD, pair.good), (BAD, pair.bad), (PARADIGM, paradigm)):
                if not _is_text(value):
                    raise ValueError(
                        f'{where} is no minimal pair: {name!r} must be a text, and the line has '
                        f'{", ".join(map(repr, record)) or "nothing"}.'
                    )
            if not limit or taken.get(paradigm, 0) < limit:
                taken[paradigm] = taken.get(paradigm, 0) + 1
                yield pair
    if not taken:
        raise ValueError(f'--minimal_pairs.path={path} has no lines.')


def _is_text(value: Any) -> bool:
    # A byte that is no UTF-8 comes as half of a surrogate pair, which no tokenizer takes.
    return isinstance(value, str) and value != '' and value.isprintable()


def _find_pair_files(path: str) -> list[Path]:
    if not path:
        raise ValueError(
            'minimal_pairs needs its sentences: --suite=minimal_pairs:PATH, a .jsonl file, a '
            'folder of them or a glob. Each line has sentence_good and sentence_bad.'
        )
    pattern = expand_home(path)
    if os.path.isdir(pattern):
        pattern = f'{glob.escape(pattern)}/*'
        found = [p for p in sorted(map(Path, glob.glob(pattern))) if file_format(p) == SUFFIX]
    else:
        found = [*find_files(pattern).files]
    if not found:
        raise ValueError(f'--minimal_pairs.path={path} matches no {SUFFIX} file.')
    for file in found:
        if file_format(file) != SUFFIX:
            raise ValueError(f'minimal pairs are lines of {SUFFIX} files; got {file}.')
    return found


def _encode_pairs(
    checkpoint: Checkpoint, pairs: Sequence[SentencePair], end: bool
) -> list[list[int]]:
    """Returns the tokens of good, bad, good, bad, ..."""
    tokenizer = checkpoint.tokenizer
    encoded = tokenizer.encode_batch([text for pair in pairs for text in (pair.good, pair.bad)])
    last = [tokenizer.eos_id] if end else []
    rows = [[tokenizer.bos_id, *tokens.tolist(), *last] for tokens in encoded]
    most = checkpoint.recipe.data.seq_len + 1
    for i, row in enumerate(rows):
        if not 2 <= len(row) <= most:
            raise ValueError(
                f'{pairs[i // 2].location}: a sentence has {len(row) - 1} tokens, and this model '
                f'scores 1 to {most - 1} (data.seq_len). Leave the line out.'
            )
    return rows


def _item_names(pairs: Sequence[SentencePair]) -> list[str]:
    """Returns PARADIGM/N of each pair, N from 0 in each paradigm."""
    seen: dict[str, int] = {}
    names = []
    for pair in pairs:
        seen[pair.paradigm] = seen.get(pair.paradigm, -1) + 1
        names.append(f'{pair.paradigm}/{seen[pair.paradigm]}')
    return names
