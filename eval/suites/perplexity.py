"""Loss on the validation split the run held out, by document and by domain."""

import dataclasses
import functools
import hashlib
import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np

from eval.load import Checkpoint, open_data
from eval.suites.base import Result, Table
from lm import data
from lm.config.mixture import by_source
from lm.data import Rows
from lm.devices.mesh import batch_parts, put_batch
from lm.inference.scoring import Scorer, fetched, jit_score_batch, log_probabilities
from lm.run.evaluate import validation_losses
from modules.options import Option

AT_ONCE = 1 << 22  # tokens of windows that are packed together

Stride = Annotated[int, Option('tokens a window moves on; 0: rows as training reads them', 0)]
Documents = Annotated[int, Option('how many are read, the first of each source; 0: all', 0)]


@dataclasses.dataclass
class ScoredDocument:
    """A document of the split: nats of its tokens, how many they are, and its text's bytes."""

    domain: str
    number: int
    nats: float
    tokens: int
    bytes: int
    digest: str


@dataclasses.dataclass(frozen=True)
class Counts:
    """Target tokens and bytes of the part of a split that is read."""

    n_tokens: int
    n_bytes: int


def perplexity(checkpoint: Checkpoint, *, stride: Stride = 0, documents: Documents = 0) -> Result:
    """validation_ce in nats per token, bits_per_byte, and perplexity = exp(validation_ce).

    The validation split counts, every token once. Without a stride it is read as in training: rows
    of data.seq_len tokens, whose documents see each other unless data.mask_documents is set. With
    one each document is read alone, in windows of data.seq_len tokens that move on by `stride`: a
    token has at least data.seq_len - stride tokens of context, or its whole document before it.

    For a mixture the numbers are means over its sources, weighted by data.mixture, and each has its
    own ce; `items` has the nats of each document, of whatever source.
    """
    length = checkpoint.recipe.data.seq_len
    if stride > length:
        raise ValueError(
            f'--perplexity.stride={stride} is more than data.seq_len={length}: the windows would '
            f'leave out tokens. Give {length} at most.'
        )
    split = open_data(checkpoint).validation
    sources = by_source(split)
    if empty := [name for name, rows in sources.items() if not len(rows)]:
        raise ValueError(
            f'the validation split{f" of {empty[0]}" if empty[0] else ""} holds no text: the run '
            'was trained with data.validation_fraction='
            f'{checkpoint.recipe.data.validation_fraction}.'
        )
    score = functools.partial(by_windows, stride=stride) if stride else by_rows
    found: list[ScoredDocument] = []
    sums, counts = {}, {}
    for name, rows in sources.items():
        most = min(documents or rows.n_documents, rows.n_documents)
        nats_D, tokens_D = score(checkpoint, rows, most)
        own = list(described(checkpoint, name, rows, nats_D, tokens_D))
        sums[name] = [{'ce': math.fsum(nats_D), 'tokens': tokens_D.sum()}]
        counts[name] = (
            Counts(sum(one.tokens for one in own), sum(one.bytes for one in own))
            if most < rows.n_documents
            else Counts(rows.n_tokens, rows.n_bytes)
        )
        found += own
    read = counts[''] if '' in counts else dataclasses.replace(split, parts=(*counts.values(),))
    losses = validation_losses(sums, read)
    numbers = losses | {'tokens': read.n_tokens, 'bytes': read.n_bytes}
    table = by_domain(found, checkpoint.recipe.data.source)
    return Result(numbers, items_of(found), {'Bits per byte by domain': table})


def by_rows(checkpoint: Checkpoint, rows: Rows, most: int) -> tuple[np.ndarray, np.ndarray]:
    """Returns (nats, target tokens) of the first `most` documents [D], read in the rows and batches
    of the training loop.
    """
    mesh, recipe, bos_id = checkpoint.mesh, checkpoint.recipe, checkpoint.tokenizer.bos_id
    owners_RT = [rows.documents_of(i)[1:] for i in range(len(rows))]
    read = [i for i, owner_T in enumerate(owners_RT) if np.any((owner_T >= 0) & (owner_T < most))]
    parts = batch_parts(mesh)
    size = -(-(recipe.data.batch_size // recipe.train.microbatches) // parts) * parts
    masks = recipe.data.mask_documents
    step = jit_score_batch(checkpoint.learner, mesh, log_probabilities, masks)
    batches = data.evaluation_batches(Selected(rows, read), batch_size=size, limit=0)
    scores = fetched(step(checkpoint.weights, put_batch(mesh, batch)) for batch in batches)
    log_p_T = itertools.chain.from_iterable(one['log_p'] for one in scores)
    nats_D, tokens_D = np.zeros(most), np.zeros(most, np.int64)
    for i, log_p in zip(read, log_p_T, strict=False):  # the last batch is padded
        owner, token = owners_RT[i], rows[i]['tokens'][1:]
        counts = (owner >= 0) & (owner < most) & (token != bos_id)
        np.add.at(nats_D, owner[counts], -log_p[counts])
        np.add.at(tokens_D, owner[counts], 1)
    return nats_D, tokens_D


@dataclasses.dataclass(frozen=True)
class Selected:
    """Some rows of a split, by their numbers."""

    rows: Rows
    numbers: Sequence[int]

    def __len__(self) -> int:
        return len(self.numbers)

    def __getitem__(self, i: int) -> dict[str, np.ndarray]:
        return self.rows[self.numbers[i]]


def by_windows(
    checkpoint: Checkpoint, rows: Rows, most: int, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns (nats, target tokens) of the first `most` documents [D], each read alone."""
    score, bos_id = Scorer(checkpoint), checkpoint.tokenizer.bos_id
    nats_D, tokens_D = np.zeros(most), np.zeros(most, np.int64)
    documents = itertools.islice(rows.documents(with_marks=True), most)
    windows = (
        (number, *window)
        for number, tokens in enumerate(documents)
        for window in windows_of(tokens, rows.seq_len, stride)
    )
    while group := list(itertools.islice(windows, max(1, AT_ONCE // rows.seq_len))):
        scores = score([tokens for _, tokens, _ in group])
        for (number, tokens, before), own in zip(group, scores, strict=True):
            counts = tokens[1 + before :] != bos_id
            nats_D[number] -= own['log_p'][before:][counts].sum(dtype=np.float64)
            tokens_D[number] += counts.sum()
    return nats_D, tokens_D


def windows_of(tokens: np.ndarray, length: int, stride: int) -> Iterator[tuple[np.ndarray, int]]:
    """Yields (length + 1 tokens of a document at most, how many of their scores an earlier window
    has). Each token but the first has a score that no earlier window has, once.
    """
    for start in range(0, max(1, len(tokens) - 1 - length + stride), stride):
        yield tokens[start : start + length + 1], (length - stride if start else 0)


def described(
    checkpoint: Checkpoint, domain: str, rows: Rows, nats_D: np.ndarray, tokens_D: np.ndarray
) -> Iterator[ScoredDocument]:
    """Yields the documents of a source, which have these nats and target tokens."""
    decode = checkpoint.tokenizer.decode
    for number, (tokens, nats, n) in enumerate(
        zip(rows.documents(), nats_D.tolist(), tokens_D.tolist(), strict=False)
    ):
        text = decode(tokens.tolist()).encode()
        digest = hashlib.blake2b(text, digest_size=8).hexdigest()
        yield ScoredDocument(domain, number, nats, n, len(text), digest)


def items_of(documents: Sequence[ScoredDocument]) -> dict[str, list[Any]]:
    """Returns a column of each quantity. A document is named by its text, so that runs with other
    tokenizers, or with the text in another mixture, name it equally.
    """
    seen: Counter[str] = Counter()
    names = []
    for one in documents:
        seen[one.digest] += 1
        again = f'-{seen[one.digest]}' if seen[one.digest] > 1 else ''
        names.append(f'{one.digest}{again}')
    fields = ('domain', 'number', 'nats', 'tokens', 'bytes')
    return {'item': names} | {name: [getattr(one, name) for one in documents] for name in fields}


def by_domain(documents: Sequence[ScoredDocument], source: str) -> Table:
    """Returns the table of domains, the sources of a mixture; `source` names a single one."""
    rows = []
    for domain in dict.fromkeys(one.domain for one in documents):
        own = [one for one in documents if one.domain == domain]
        nats, tokens, n_bytes = (
            sum(getattr(one, name) for one in own) for name in ('nats', 'tokens', 'bytes')
        )
        bits = nats / math.log(2) / n_bytes if n_bytes else math.nan
        rows.append((domain or source, len(own), tokens, n_bytes, bits))
    heads = ('domain', 'documents', 'tokens', 'bytes', 'bits per byte')
    columns = dict(zip(heads, map(list, zip(*rows, strict=True)), strict=True))
    return Table(columns, x='domain', y='bits per byte')
