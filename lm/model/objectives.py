"""The objectives of a config: what they make of rows, and what they add to batch and vocabulary."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np

from lm.config.mixture import Mixed
from lm.config.recipe import Part, Recipe
from modules.attention import ATTENTIONS
from modules.objectives import MARKS, Document, Marks
from modules.options import options

LEAST_WITH_MARKS = 8  # of data.seq_len: one hole's four marks, a token in it, and some around it
TRAINED = 'data.objective'
EVALUATION = 1  # the last of four numbers that a row is drawn by; in training that is 0

Row = dict[str, np.ndarray]


def check_objectives(recipe: Recipe) -> None:
    """ValueError for rows too short for marks, attention that cannot see a whole prefix, and an
    option of the loss that nothing trained reads.
    """
    data = recipe.data
    if n_marks(recipe) and data.seq_len < LEAST_WITH_MARKS:
        raise ValueError(
            f'data.objective={data.objective} and train.eval_objectives='
            f'{recipe.train.eval_objectives} put marks into rows, for which data.seq_len must be '
            f'at least {LEAST_WITH_MARKS}; got {data.seq_len}'
        )
    layer = recipe.attention
    for part in recipe.objectives:
        if part.row.has_prefix and not layer.row.has_scores:
            able = [name for name, row in ATTENTIONS.items() if row.has_scores]
            raise ValueError(
                f'{part} lets the tokens of a prefix see each other, and {layer} shows no later '
                f'ones. Choose model.attention={"|".join(able)}, or another objective.'
            )
    _check_loss_on(recipe)


def _check_loss_on(recipe: Recipe) -> None:
    """ValueError where evaluation alone has holes, since it always counts what fills them."""
    loss_on = recipe.data.loss_on
    defaults = {
        part.path: options(part.row)['loss_on'].default
        for part in recipe.objectives
        if 'loss_on' in options(part.row)
    }
    if loss_on not in (None, *defaults.values()) and TRAINED not in defaults:
        raise ValueError(
            f'data.loss_on={loss_on} is of training, and data.objective={recipe.data.objective} '
            'has no holes; evaluation counts what fills them, always. Leave it out, or None.'
        )


def n_marks(recipe: Recipe) -> int:
    """How many ids the vocabulary has behind those of the tokenizer: MARKS and the holes that can
    be numbered, where an objective needs them, in training or evaluation; or 0.
    """
    if not any(part.row.has_marks for part in recipe.objectives):
        return 0
    return MARKS + (recipe.data.masks or 0)


def leaves_rows(recipe: Recipe) -> bool:
    """Whether training reads rows as they are, and predicts all of their tokens."""
    return all(part.row.leaves_rows for part in recipe.objective)


def batch_fields(recipe: Recipe) -> tuple[str, ...]:
    """The arrays of a training batch; each is int32 [B, T+1].

    With an objective that changes rows, `targets` is 1 for each token to predict. With one that has
    prefixes, `prefix` numbers them, 0 being none.
    """
    if leaves_rows(recipe):
        return ('tokens', 'segments')
    has_prefix = any(part.row.has_prefix for part in recipe.objective)
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


def training_mixture(recipe: Recipe, tokenizer: Any) -> Mixture | None:
    """The mixture of data.objective; None where it leaves rows as they are."""
    if leaves_rows(recipe):
        return None
    functions = [function_of(part, part.options, tokenizer) for part in recipe.objective]
    shares = tuple(part.share for part in recipe.objective)
    return Mixture(tuple(functions), shares, batch_fields(recipe))


def evaluated(recipe: Recipe, tokenizer: Any, rows: Any) -> dict[str, Any]:
    """{name: rows as the objective has them} for those of train.eval_objectives that change them.

    A row is the same in every evaluation and for every data.seed. Where an objective has holes,
    what fills them is the target, whatever data.loss_on is.
    """
    found = {}
    for part in recipe.eval_objectives:
        if part.row.leaves_rows:
            continue
        own = dict(part.options)
        if 'loss_on' in own:
            own['loss_on'] = 'holes'
        fields = ('tokens', 'segments', 'targets', *(['prefix'] if part.row.has_prefix else []))
        mixture = Mixture((function_of(part, own, tokenizer),), (1.0,), fields)
        mapped = functools.partial(Mapped, mixture=mixture)
        found[part.name] = rows.mapped(mapped) if isinstance(rows, Mixed) else mapped(rows)
    return found


def function_of(part: Part, own: Mapping[str, Any], tokenizer: Any) -> Callable[..., Document]:
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
        return self.mixture(self.rows[i], np.random.default_rng((0, 0, i, EVALUATION)))
