"""Minimal pairs: whether a model assigns more probability to the better of two sentences."""

import functools
import glob
import math
import os
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, Any, NamedTuple

import numpy as np
import scipy.stats

from eval.load import Checkpoint
from eval.suites.base import SuiteResult, Table
from lm.data.globs import find_files
from lm.data.kinds import file_suffix
from lm.data.records import read_json_lines
from lm.data.tokenizers import Tokenizer
from lm.inference.scoring import Scorer
from lm.storage.files import expand_home
from modules.options import Option

GOOD, BAD, PARADIGM = 'sentence_good', 'sentence_bad', 'UID'
SUFFIX = '.jsonl'


class SentencePair(NamedTuple):
    """Two sentences of a paradigm. location: the file and line that they come from."""

    paradigm: str
    good: str
    bad: str
    location: str


def minimal_pairs(
    checkpoint: Checkpoint,
    *,
    path: Annotated[str, Option('.jsonl file, folder or glob, in the format of BLiMP')] = '',
    limit: Annotated[int, Option('pairs per paradigm; 0: all', 0)] = 0,
    end: Annotated[bool, Option('whether to score the end of the document (EOS)')] = False,
) -> SuiteResult:
    """Tests which sentence of each minimal pair is more likely.

    The score of a sentence is the sum of log p of its tokens after BOS; `end` adds EOS. The
    accuracy is the mean over paradigms. p_value is from a one-sided binomial test of all pairs
    against 1/2. A tie counts as wrong. Source: Warstadt et al. 2020 (arXiv:1912.00582).

    Args:
      checkpoint: a loaded checkpoint.
      path: .jsonl file, folder or glob, in the format of BLiMP.
      limit: pairs per paradigm; 0: all.
      end: whether to score EOS.
    """
    seq_len = checkpoint.recipe.data.seq_len
    return read_for_training(checkpoint.tokenizer, seq_len, path=path, limit=limit, end=end)(
        checkpoint
    )


def read_for_training(
    tokenizer: Tokenizer, seq_len: int, *, path: str = '', limit: int = 0, end: bool = False
) -> Callable[[Checkpoint], SuiteResult]:
    """Returns a function of a checkpoint that scores pairs, which are read here.

    Args:
      tokenizer: of the checkpoints.
      seq_len: the most tokens of a sentence.
      path: .jsonl file, folder or glob, in the format of BLiMP.
      limit: pairs per paradigm; 0: all.
      end: whether to score EOS.
    """
    pairs = list(read_pairs(path, limit))
    return functools.partial(score_pairs, pairs, _encode_pairs(tokenizer, seq_len, pairs, end))


def score_pairs(
    pairs: Sequence[SentencePair], rows: Sequence[Sequence[int]], checkpoint: Checkpoint
) -> SuiteResult:
    """Returns the result of `minimal_pairs`.

    Args:
      pairs: the sentences.
      rows: their tokens: good, bad, good, bad, ...
      checkpoint: a loaded checkpoint.
    """
    log_p = [scores['log_p'].astype(np.float64) for scores in Scorer(checkpoint)(rows)]
    # Rows alternate good and bad sentences.
    sums, means = (
        np.reshape([f(sentence_log_p) for sentence_log_p in log_p], (-1, 2))
        for f in (np.sum, np.mean)
    )
    margins, is_right = sums[:, 0] - sums[:, 1], sums[:, 0] > sums[:, 1]
    is_right_by_mean = means[:, 0] > means[:, 1]
    names, paradigm_index, counts = np.unique(
        [pair.paradigm for pair in pairs], return_inverse=True, return_counts=True
    )

    def by_paradigm(values):
        return np.bincount(paradigm_index, values) / counts

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
    """Yields the pairs of a .jsonl file, a folder or a glob.

    Args:
      path: the files. Their lines have `sentence_good` and `sentence_bad`, and may have `UID`, the
        paradigm; the default is the name of the file.
      limit: number of pairs of each paradigm, from the first; 0: all.

    Raises:
      ValueError: if there is no such file, or for a line that is not a pair.
    """
    n_by_paradigm: dict[str, int] = {}
    for file in _find_pair_files(path):
        stem = file.name[: file.name.lower().index(SUFFIX)]
        for location, record in read_json_lines(file):
            paradigm = record.get(PARADIGM, stem)
            good: Any = record.get(GOOD)
            bad: Any = record.get(BAD)
            for name, value in ((GOOD, good), (BAD, bad), (PARADIGM, paradigm)):
                if not _is_text(value):
                    raise ValueError(
                        f'{location} is not a minimal pair: {name!r} must be printable text. The '
                        f'line has {", ".join(map(repr, record)) or "no fields"}.'
                    )
            if not limit or n_by_paradigm.get(paradigm, 0) < limit:
                n_by_paradigm[paradigm] = n_by_paradigm.get(paradigm, 0) + 1
                yield SentencePair(paradigm, good, bad, location)
    if not n_by_paradigm:
        raise ValueError(f'--minimal_pairs.path={path} contains no lines.')


def _is_text(value: Any) -> bool:
    # An invalid UTF-8 byte is read as half of a surrogate pair, which no tokenizer takes.
    return isinstance(value, str) and value != '' and value.isprintable()


def _find_pair_files(path: str) -> list[Path]:
    if not path:
        raise ValueError(
            'minimal_pairs needs sentences: set --suite=minimal_pairs:PATH to a .jsonl file, a '
            'folder or a glob. Each line has sentence_good and sentence_bad.'
        )
    pattern = expand_home(path)
    if os.path.isdir(pattern):
        pattern = f'{glob.escape(pattern)}/*'
        files = [p for p in sorted(map(Path, glob.glob(pattern))) if file_suffix(p) == SUFFIX]
    else:
        files = [*find_files(pattern).files]
    if not files:
        raise ValueError(f'--minimal_pairs.path={path} matches no {SUFFIX} file.')
    for file in files:
        if file_suffix(file) != SUFFIX:
            raise ValueError(f'files of minimal pairs must end in {SUFFIX}; got {file}.')
    return files


def _encode_pairs(
    tokenizer: Tokenizer, seq_len: int, pairs: Sequence[SentencePair], end: bool
) -> list[list[int]]:
    """Returns the tokens of good, bad, good, bad, ..."""
    encoded = tokenizer.encode_batch([text for pair in pairs for text in (pair.good, pair.bad)])
    suffix = [tokenizer.eos_id] if end else []
    rows = [[tokenizer.bos_id, *tokens.tolist(), *suffix] for tokens in encoded]
    max_tokens = seq_len + 1
    for i, row in enumerate(rows):
        if not 2 <= len(row) <= max_tokens:
            raise ValueError(
                f'{pairs[i // 2].location}: a sentence must have 1 to {max_tokens - 1} tokens '
                f'(data.seq_len); got {len(row) - 1}. Remove the line.'
            )
    return rows


def _item_names(pairs: Sequence[SentencePair]) -> list[str]:
    """Returns PARADIGM/N for each pair, with N from 0 in each paradigm."""
    last_number: dict[str, int] = {}
    names = []
    for pair in pairs:
        last_number[pair.paradigm] = last_number.get(pair.paradigm, -1) + 1
        names.append(f'{pair.paradigm}/{last_number[pair.paradigm]}')
    return names
