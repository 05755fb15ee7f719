"""The objectives of a config: how they change rows, and what they add to batch and vocabulary."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lm.config.mixture import MixedRows
from lm.config.recipe import Part, Recipe
from modules.objectives import N_UNNUMBERED, SpecialTokens, TrainingDocument

EVALUATION = 1  # the last of four numbers that a row is drawn by; in training that is 0

Row = dict[str, np.ndarray]


def count_marks(recipe: Recipe) -> int:
    """Returns the number of ids that objectives of training or evaluation add to the tokenizer's.

    They are MARKS and the numbered holes; 0 where no objective needs them.
    """
    if not any(part.row.has_special_tokens for part in recipe.objectives):
        return 0
    return N_UNNUMBERED + (recipe.data.masks or 0)


def is_causal(recipe: Recipe) -> bool:
    """Whether training reads rows as they are, and predicts all of their tokens."""
    return all(part.row.leaves_rows for part in recipe.objective)


def batch_fields(recipe: Recipe) -> tuple[str, ...]:
    """Returns the names of the arrays of a training batch; each is int32 [B, T+1].

    `targets` is 1 for each token to predict, of an objective that changes rows. `prefix` numbers
    the prefixes of one that has some, 0 being none.
    """
    return ('tokens', 'segments') if is_causal(recipe) else _objective_fields(recipe.objective)


def _objective_fields(objectives: Sequence[Part]) -> tuple[str, ...]:
    has_prefix = any(part.row.has_prefix for part in objectives)
    return ('tokens', 'segments', 'targets', *(['prefix'] if has_prefix else []))


@dataclasses.dataclass(frozen=True)
class ObjectiveMixture:
    """Draws one objective for each row, by shares; all documents of the row have it."""

    functions: tuple[Callable[..., TrainingDocument], ...]
    shares: tuple[float, ...]
    fields: tuple[str, ...]

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """Returns the row with the arrays that `batch_fields` names."""
        at = int(np.searchsorted(np.cumsum(self.shares), rng.random(), side='right'))
        of_document = self.functions[min(at, len(self.functions) - 1)]
        found = {name: np.zeros_like(row['tokens']) for name in self.fields}
        found |= {'tokens': row['tokens'].copy(), 'segments': row['segments']}
        for place in document_slices(row['segments']):
            made = of_document(row['tokens'][place], rng=rng)
            found['tokens'][place], found['targets'][place] = made.tokens, made.targets
            if 'prefix' in found:
                found['prefix'][place] = made.prefix * row['segments'][place]
        return found


def document_slices(segments: np.ndarray) -> Iterator[slice]:
    """Yields the place in its row of each document; padding is none."""
    edges = np.flatnonzero(np.diff(segments, prepend=0, append=0))
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if segments[start]:
            yield slice(start, stop)


def _build_mixture(
    parts: Sequence[Part], tokenizer: Any, loss_on: Mapping[str, str]
) -> ObjectiveMixture:
    marks = SpecialTokens(tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size)
    functions = (
        functools.partial(part.row.transform, special_tokens=marks, **{**part.options, **loss_on})
        for part in parts
    )
    return ObjectiveMixture(
        tuple(functions), tuple(part.share for part in parts), _objective_fields(parts)
    )


def build_training_mixture(recipe: Recipe, tokenizer: Any) -> ObjectiveMixture | None:
    """Returns the mixture of data.objective; None where it leaves rows as they are."""
    return None if is_causal(recipe) else _build_mixture(recipe.objective, tokenizer, {})


def evaluation_rows(recipe: Recipe, tokenizer: Any, rows: Any) -> dict[str, Any]:
    """Returns {name: changed rows} for the objectives of train.eval_objectives that change them.

    A row is the same in every evaluation and for every data.seed. The targets of an objective with
    holes are what fills them, whatever data.loss_on is.
    """
    found = {}
    for part in recipe.eval_objectives:
        if not part.row.leaves_rows:
            loss_on = {'loss_on': 'holes'} if 'loss_on' in part.options else {}
            mapped = functools.partial(
                ObjectiveRows, mixture=_build_mixture([part], tokenizer, loss_on)
            )
            found[part.name] = (
                rows.map_sources(mapped) if isinstance(rows, MixedRows) else mapped(rows)
            )
    return found


@dataclasses.dataclass(frozen=True)
class ObjectiveRows:
    """Rows of the validation split as an objective has them."""

    rows: Any
    mixture: ObjectiveMixture

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        return self.mixture(self.rows[i], np.random.default_rng((0, 0, i, EVALUATION)))
