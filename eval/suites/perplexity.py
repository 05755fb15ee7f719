"""Loss on the validation split that the run held out, or on any text, by document and domain."""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Annotated, Any

import numpy as np

from eval.load import Checkpoint, open_data
from eval.suites.base import SuiteResult, Table
from eval.suites.reading import validation_batches
from eval.suites.text_source import encode_conversations, encode_source
from lm.config.mixture import CHAT, MixedRows, split_by_source
from lm.data import Rows
from lm.data.rows import ChatTargets
from lm.inference.scoring import Scorer, fetch_pipelined, jit_score_batch, log_probabilities
from lm.run.evaluate import validation_losses
from modules.options import Option

CHUNK_TOKENS = 1 << 22  # tokens of windows that are scored at once

Stride = Annotated[int, Option('tokens by which windows advance; 0: rows as in training', 0)]
Documents = Annotated[int, Option('documents per source, from the first; 0: all', 0)]
TextSource = Annotated[str, Option('text to score, such as text:FILE; empty: validation split')]


@dataclasses.dataclass
class ScoredDocument:
    """A document of the split: the nats, the number of its targets, and bytes of their text."""

    domain: str
    number: int
    nats: float
    tokens: int
    bytes: int
    digest: str


@dataclasses.dataclass(frozen=True)
class SplitSize:
    """Target tokens and bytes of the part of a split that is read."""

    n_tokens: int
    n_bytes: int


def perplexity(
    checkpoint: Checkpoint,
    *,
    stride: Stride = 0,
    documents: Documents = 0,
    source: TextSource = '',
) -> SuiteResult:
    """Measures loss, perplexity and bits per byte of text.

    The text is the validation split, or `source`. validation_ce is the loss in nats per token;
    perplexity = exp(validation_ce). Every token of the split counts once; in conversations, only
    the answers and their ends count. Without a stride the split is read as in training: in rows of
    data.seq_len tokens, with attention between the documents of a row unless data.mask_documents is
    set. With a stride, each document is read alone, in windows of data.seq_len tokens that advance
    by `stride`. Each token then has at least data.seq_len - stride tokens of context, or all of its
    document before it.

    For a mixture, the numbers are means over its sources, weighted by data.mixture, and each source
    also has its own ce, unless all share data.validation_source. `items` has the nats of each
    document.

    With `source`, that text is scored instead of the split, with the tokenizer of the checkpoint,
    and `validation_ce` is named `ce`. Bits per byte count all bytes of the text. If the tokens
    cannot restore all of them, `lost_share` is the share that is lost.

    Args:
      checkpoint: a loaded checkpoint.
      stride: tokens between two windows; 0: rows as in training.
      documents: number of documents per source, from the first; 0: all.
      source: a `data.source`; empty: the validation split of the run's data.
    """
    length = checkpoint.recipe.data.seq_len
    if stride > length:
        raise ValueError(
            f'--perplexity.stride must be at most data.seq_len={length}, or windows would skip '
            f'tokens; got {stride}.'
        )
    if source:
        return score_source(checkpoint, source, stride, documents)
    split = open_data(checkpoint).validation
    sources = split_by_source(split)
    if empty := [name for name, rows in sources.items() if not len(rows)]:
        raise ValueError(
            f'the validation split{f" of {empty[0]}" if empty[0] else ""} is empty: the run was '
            'trained with data.validation_fraction='
            f'{checkpoint.recipe.data.validation_fraction}. Set --perplexity.source to score '
            'another text.'
        )
    scored: list[ScoredDocument] = []
    sums, sizes = {}, {}
    for name, rows in sources.items():
        source_documents = score_documents(checkpoint, name, rows, stride, documents)
        sums[name], sizes[name] = sum_documents(rows, source_documents)
        scored += source_documents
    is_mixture = isinstance(split, MixedRows)
    size: Any = dataclasses.replace(split, sources=(*sizes.values(),)) if is_mixture else sizes['']
    numbers = validation_losses(sums, size) | {'tokens': size.n_tokens, 'bytes': size.n_bytes}
    fields = checkpoint.recipe.data
    table = domain_table(scored, fields.validation_source or fields.source)
    return SuiteResult(numbers, document_items(scored), {'Bits per byte by domain': table})


def score_documents(
    checkpoint: Checkpoint, domain: str, rows: Rows, stride: int, limit: int
) -> list[ScoredDocument]:
    """Returns the scored documents of rows.

    Args:
      checkpoint: a loaded checkpoint.
      domain: the name of their source.
      rows: the documents.
      stride: tokens between two windows; 0: rows as in training.
      limit: number of documents, from the first; 0: all.
    """
    n_documents = min(limit or rows.n_documents, rows.n_documents)
    nats_D, tokens_D = select_scorer(stride)(checkpoint, rows, n_documents)
    texts = (checkpoint.tokenizer.decode(tokens.tolist()) for tokens in rows.documents())
    bytes_D = rows.targets.n_bytes if isinstance(rows.targets, ChatTargets) else None
    return list(describe_documents(domain, texts, nats_D, tokens_D, bytes_D))


def sum_documents(
    rows: Rows, documents: Sequence[ScoredDocument]
) -> tuple[list[dict[str, Any]], SplitSize]:
    """Returns the sum of the losses, and the tokens and bytes that it is of.

    A capped source is counted by its documents; its own totals would include those without a score.
    """
    size = count_targets(documents)
    sums = [{'ce': math.fsum(document.nats for document in documents), 'tokens': size.n_tokens}]
    return sums, size if len(documents) < rows.n_documents else SplitSize(
        rows.n_tokens, rows.n_bytes
    )


def count_targets(documents: Sequence[ScoredDocument]) -> SplitSize:
    """Returns the targets of documents, and the bytes of their text."""
    n_bytes = sum(document.bytes for document in documents)
    return SplitSize(sum(document.tokens for document in documents), n_bytes)


def select_scorer(stride: int) -> Callable[..., tuple[np.ndarray, np.ndarray]]:
    """Returns the function that scores rows: `score_windows`, or `score_rows` without a stride."""
    return functools.partial(score_windows, stride=stride) if stride else score_rows


def score_source(checkpoint: Checkpoint, source: str, stride: int, limit: int) -> SuiteResult:
    """Returns the numbers of a text, or of conversations, that are no part of the run's data.

    Args:
      checkpoint: a loaded checkpoint.
      source: of the text.
      stride: tokens between two windows; 0: rows as in training.
      limit: number of documents; 0: all.
    """
    encode = encode_conversations if source.startswith(CHAT) else encode_source
    rows, texts, lost_share, _ = encode(checkpoint, source, '--perplexity.source', limit)
    nats_D, tokens_D = select_scorer(stride)(checkpoint, rows, len(texts))
    bytes_D = rows.targets.n_bytes if isinstance(rows.targets, ChatTargets) else None
    scored = list(describe_documents('', texts, nats_D, tokens_D, bytes_D))
    size: Any = count_targets(scored)
    sums = [{'ce': math.fsum(document.nats for document in scored), 'tokens': size.n_tokens}]
    numbers: dict[str, Any] = validation_losses({'': sums}, size)
    numbers = {'ce': numbers.pop('validation_ce')} | numbers
    numbers |= {'tokens': size.n_tokens, 'bytes': size.n_bytes}
    numbers |= {'lost_share': lost_share} if lost_share else {}
    table = domain_table(scored, source)
    return SuiteResult(numbers, document_items(scored), {'Bits per byte by domain': table})


def score_rows(
    checkpoint: Checkpoint, rows: Rows, n_documents: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scores the first documents in the rows and batches of the training loop.

    Args:
      checkpoint: a loaded checkpoint.
      rows: of the split.
      n_documents: D, number of documents.

    Returns:
      (nats, target tokens) of the documents, [D].
    """
    bos_id, mask_documents = checkpoint.tokenizer.bos_id, checkpoint.recipe.data.mask_documents
    document_RT = [rows.document_ids(i)[1:] for i in range(len(rows))]
    is_counted_RT = [(document_T >= 0) & (document_T < n_documents) for document_T in document_RT]
    chosen = [i for i, is_counted_T in enumerate(is_counted_RT) if is_counted_T.any()]
    step = jit_score_batch(checkpoint.learner, checkpoint.mesh, log_probabilities, mask_documents)
    batches = validation_batches(checkpoint, RowSubset(rows, chosen), tokens=0)
    scores = fetch_pipelined(step(checkpoint.weights, batch) for batch in batches)
    log_p_RT = itertools.chain.from_iterable(batch_scores['log_p'] for batch_scores in scores)
    nats_D, tokens_D = np.zeros(n_documents), np.zeros(n_documents, np.int64)
    for i, log_p_T in zip(chosen, log_p_RT, strict=False):  # the last batch is padded
        row = rows[i]
        is_target_T = row.get('targets', row['tokens'] != bos_id)[1:].astype(bool)
        is_target_T &= is_counted_RT[i]
        np.add.at(nats_D, document_RT[i][is_target_T], -log_p_T[is_target_T])
        np.add.at(tokens_D, document_RT[i][is_target_T], 1)
    return nats_D, tokens_D


@dataclasses.dataclass(frozen=True)
class RowSubset:
    """Some rows of a split, by their numbers."""

    rows: Rows
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.rows[self.numbers[i]]


def score_windows(
    checkpoint: Checkpoint, rows: Rows, n_documents: int, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Scores the first documents, each alone.

    Args:
      checkpoint: a loaded checkpoint.
      rows: of the split.
      n_documents: D, number of documents.
      stride: tokens between two windows.

    Returns:
      (nats, target tokens) of the documents, [D].
    """
    score, bos_id = Scorer(checkpoint), checkpoint.tokenizer.bos_id
    nats_D, tokens_D = np.zeros(n_documents), np.zeros(n_documents, np.int64)
    documents = itertools.islice(rows.documents(with_marks=True), n_documents)
    # Whether each token is a target rides along in the windows of its document.
    windows = (
        (number, tokens, n_context, is_target)
        for number, document in enumerate(documents)
        for (tokens, n_context), (is_target, _) in zip(
            split_windows(document, rows.seq_len, stride),
            split_windows(rows.find_targets(number, bos_id), rows.seq_len, stride),
            strict=True,
        )
    )
    while group := list(itertools.islice(windows, max(1, CHUNK_TOKENS // rows.seq_len))):
        scores = score([tokens for _, tokens, _, _ in group])  # ty: ignore[invalid-argument-type]  arrays
        for (number, _, n_context, in_window), window_scores in zip(group, scores, strict=True):
            is_target = in_window[1 + n_context :]
            nats_D[number] -= window_scores['log_p'][n_context:][is_target].sum(dtype=np.float64)
            tokens_D[number] += is_target.sum()
    return nats_D, tokens_D


def split_windows(tokens: np.ndarray, length: int, stride: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields windows that together score each token but the first exactly once.

    Args:
      tokens: of a document.
      length: tokens of a window that are scored or context.
      stride: tokens between two windows.

    Yields:
      (at most length + 1 tokens, the number of their scores that an earlier window has).
    """
    for start in range(0, max(1, len(tokens) - 1 - length + stride), stride):
        yield tokens[start : start + length + 1], (length - stride if start else 0)


def describe_documents(
    domain: str,
    texts: Iterable[str],
    nats_D: np.ndarray,
    tokens_D: np.ndarray,
    bytes_D: np.ndarray | None = None,
) -> Iterator[ScoredDocument]:
    """Yields the documents of a source.

    Args:
      domain: the source.
      texts: of the documents; there may be more than scores.
      nats_D: of each document.
      tokens_D: target tokens of each document.
      bytes_D: bytes of the targets of each document; None: of all its text.
    """
    for number, (text, nats, n) in enumerate(
        zip(texts, nats_D.tolist(), tokens_D.tolist(), strict=False)
    ):
        content = text.encode()
        digest = hashlib.blake2b(content, digest_size=8).hexdigest()  # of a whole conversation
        n_bytes = len(content) if bytes_D is None else int(bytes_D[number])
        yield ScoredDocument(domain, number, nats, n, n_bytes, digest)


def document_items(documents: Sequence[ScoredDocument]) -> dict[str, list[Any]]:
    """Returns a column for each quantity.

    A document is named by its text, so that its name does not depend on the tokenizer or the
    mixture.
    """
    copies: Counter[str] = Counter()
    names = []
    for document in documents:
        copies[document.digest] += 1
        number = copies[document.digest]
        names.append(f'{document.digest}-{number}' if number > 1 else document.digest)
    fields = ('domain', 'number', 'nats', 'tokens', 'bytes')
    return {'item': names} | {field: [getattr(d, field) for d in documents] for field in fields}


def domain_table(documents: Sequence[ScoredDocument], source: str) -> Table:
    """Returns the table of domains, the sources of a mixture. `source` names a single domain."""
    rows = []
    for domain in dict.fromkeys(document.domain for document in documents):
        domain_documents = [document for document in documents if document.domain == domain]
        nats, tokens, n_bytes = (
            sum(getattr(document, field) for document in domain_documents)
            for field in ('nats', 'tokens', 'bytes')
        )
        bits = nats / math.log(2) / n_bytes if n_bytes else math.nan
        rows.append((domain or source, len(domain_documents), tokens, n_bytes, bits))
    heads = ('domain', 'documents', 'tokens', 'bytes', 'bits per byte')
    return Table.from_rows(heads, rows, x='domain', y='bits per byte')
