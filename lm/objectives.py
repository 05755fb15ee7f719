"""The objectives of a config: what they make of rows, and what they add to batch and vocabulary."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lm.choice import shares_of
from lm.config import Config, Part, given, option_of, parts_of
from modules.objectives import MARKS, Document, Marks
from modules.options import options

TRAINED, EVALUATED = 'data.objective', 'train.eval_objectives'
CAUSAL = 'causal'
EVALUATION = 1  # of the numbers that rows are drawn by, the last; those of training have none

Row = dict[str, np.ndarray]


def objectives_of(config: Config, path: str) -> list[Part]:
    return [part for part in parts_of(config) if part.path == path]


def n_marks(config: Config) -> int:
    """How many ids the vocabulary has behind those of the tokenizer: MARKS and the holes that can
    be numbered, where an objective needs them, in training or evaluation; or 0.
    """
    parts = [part for part in parts_of(config) if part.path in (TRAINED, EVALUATED)]
    masks = [option_of(config, part, 'masks') or 0 for part in parts]
    return MARKS + max(masks) if any(part.row.has_marks for part in parts) else 0


def batch_fields(config: Config) -> tuple[str, ...]:
    """The arrays of a training batch; each is int32 [B, T+1].

    With an objective other than causal, `targets` is 1 for each token to predict. With one that has
    prefixes, `prefix` numbers them, 0 being none.
    """
    if config.data.objective == CAUSAL:
        return ('tokens', 'segments')
    has_prefix = any(part.row.has_prefix for part in objectives_of(config, TRAINED))
    return ('tokens', 'segments', 'targets', *(['prefix'] if has_prefix else []))


@dataclasses.dataclass(frozen=True)
class Mixture:
    """Of each row one objective, drawn by its share; all documents of the row have it."""

    functions: tuple[Callable[..., Document], ...]
    shares: tuple[float, ...]
    fields: tuple[str, ...]

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """The row with the arrays that `batch_fields` has."""
        at = int(np.searchsorted(np.cumsum(self.shares), rng.random(), side='right'))
        of_document = self.functions[min(at, len(self.functions) - 1)]
        found = {name: np.zeros_like(row['tokens']) for name in self.fields}
        found |= {'tokens': row['tokens'].copy(), 'segments': row['segments']}
        for place in documents(row['segments']):
            made = of_document(row['tokens'][place], rng=rng)
            found['tokens'][place], found['targets'][place] = made.tokens, made.targets
            if 'prefix' in found:
                found['prefix'][place] = made.prefix * row['segments'][place]
        return found


def documents(segments: np.ndarray) -> Iterator[slice]:
    """The place in its row of each document; padding is none."""
    edges = np.flatnonzero(np.diff(segments, prepend=0, append=0))
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if segments[start]:
            yield slice(start, stop)


def training_mixture(config: Config, tokenizer: Any) -> Mixture | None:
    """That of data.objective; None where it is causal and leaves rows as they are."""
    if config.data.objective == CAUSAL:
        return None
    shares = shares_of(TRAINED, config.data.objective)
    functions = [
        function_of(part, given(config, part), tokenizer) for part in objectives_of(config, TRAINED)
    ]
    return Mixture(tuple(functions), tuple(shares.values()), batch_fields(config))


def evaluated(config: Config, tokenizer: Any, rows: Any) -> dict[str, Any]:
    """{name: rows as the objective has them} for those of train.eval_objectives besides causal.

    A row is the same in every evaluation and for every data.seed. Where an objective has holes,
    what fills them is the target, whatever data.loss_on is.
    """
    found = {}
    for part in objectives_of(config, EVALUATED):
        if part.name == CAUSAL:
            continue
        own = given(config, part)
        if 'loss_on' in options(part.row):
            own['loss_on'] = 'infill'
        fields = ('tokens', 'segments', 'targets', *(['prefix'] if part.row.has_prefix else []))
        mixture = Mixture((function_of(part, own, tokenizer),), (1.0,), fields)
        found[part.name] = Mapped(rows, mixture)
    return found


def function_of(part: Part, own: dict[str, Any], tokenizer: Any) -> Callable[..., Document]:
    marks = Marks(tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size)
    return functools.partial(part.row.of_document, marks=marks, **own)


@dataclasses.dataclass(frozen=True)
class Mapped:
    """Rows of the validation split as an objective has them."""

    rows: Any
    mixture: Mixture

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        return self.mixture(self.rows[i], np.random.default_rng((i, EVALUATION)))
