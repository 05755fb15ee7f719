"""The objectives of a config: how they change rows, and the fields and ids they add."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from lm.config.mixture import MixedRows, reads_chats, source_flag
from lm.config.recipe import Part, Recipe
from modules.objectives import N_UNNUMBERED, SpecialTokens, TrainingDocument

EVALUATION = 1  # last of the four integers that seed a row's randomness; 0 in training

Row = dict[str, np.ndarray]


def count_marks(recipe: Recipe) -> int:
    """Returns the number of ids that objectives of training or evaluation add to the tokenizer's.

    These are `N_UNNUMBERED` special tokens and the numbered holes; 0 if no objective needs them.
    """
    if not any(part.row.has_special_tokens for part in recipe.objectives):
        return 0
    n_masks = recipe.data.masks  # ty: ignore[missing-attribute]  # an objective's option
    return N_UNNUMBERED + (n_masks or 0)


def is_causal(recipe: Recipe) -> bool:
    """Whether training reads rows unchanged and predicts every token."""
    return all(part.row.leaves_rows for part in recipe.objective)


def batch_fields(recipe: Recipe) -> tuple[str, ...]:
    """Returns the names of the arrays of a training batch, each int32 [B, T+1].

    Conversations, and objectives that change rows, add `targets`, 1 for each token to predict.
    Objectives with prefixes add `prefix`, which numbers the prefixes; 0 is no prefix.
    """
    if not is_causal(recipe):
        return _objective_fields(recipe.objective)
    return ('tokens', 'segments', *(['targets'] if reads_chats(recipe.data) else []))


def _objective_fields(objectives: Sequence[Part]) -> tuple[str, ...]:
    has_prefix = any(part.row.has_prefix for part in objectives)
    return ('tokens', 'segments', 'targets', *(['prefix'] if has_prefix else []))


@dataclasses.dataclass(frozen=True)
class ObjectiveMixture:
    """Draws one objective for each row, by shares; it applies to every document of the row."""

    functions: tuple[Callable[..., TrainingDocument], ...]
    shares: tuple[float, ...]
    fields: tuple[str, ...]
    bos_id: int

    def __call__(self, row: Row, rng: np.random.Generator) -> Row:
        """Returns the row with the arrays that `batch_fields` names."""
        index = int(np.searchsorted(np.cumsum(self.shares), rng.random(), side='right'))
        transform = self.functions[min(index, len(self.functions) - 1)]
        arrays = {name: np.zeros_like(row['tokens']) for name in self.fields}
        arrays |= {'tokens': row['tokens'].copy(), 'segments': row['segments']}
        for place in document_slices(row['segments']):
            document = transform(row['tokens'][place], rng=rng)
            arrays['tokens'][place] = document.tokens
            # BOS begins a document, which the tokens before it cannot predict.
            arrays['targets'][place] = document.targets & (document.tokens != self.bos_id)
            if 'prefix' in arrays:
                arrays['prefix'][place] = document.prefix * row['segments'][place]
        return arrays


def document_slices(segments: np.ndarray) -> Iterator[slice]:
    """Yields the slice of each document in its row; padding belongs to none."""
    edges = np.flatnonzero(np.diff(segments, prepend=0, append=0))
    for start, stop in zip(edges[:-1].tolist(), edges[1:].tolist(), strict=True):
        if segments[start]:
            yield slice(start, stop)


def _build_mixture(
    parts: Sequence[Part], tokenizer: Any, loss_on: Mapping[str, str]
) -> ObjectiveMixture:
    special_tokens = SpecialTokens(tokenizer.bos_id, tokenizer.eos_id, tokenizer.vocab_size)
    functions = (
        functools.partial(
            part.row.transform, special_tokens=special_tokens, **{**part.options, **loss_on}
        )
        for part in parts
    )
    return ObjectiveMixture(
        tuple(functions),
        tuple(part.share for part in parts),
        _objective_fields(parts),
        tokenizer.bos_id,
    )


def check_chats(recipe: Recipe) -> None:
    """Raises ValueError if conversations are to be read by an objective that changes rows."""
    if not reads_chats(recipe.data):
        return
    for field, parts in (
        ('data.objective', recipe.objective),
        ('train.eval_objectives', recipe.eval_objectives),
    ):
        if changed := [part.name for part in parts if not part.row.leaves_rows]:
            raise ValueError(
                f'{source_flag(recipe.data)} has conversations, which only support the causal '
                f'objective, but {field} has {changed[0]}. Set {field}=causal.'
            )


def build_training_mixture(recipe: Recipe, tokenizer: Any) -> ObjectiveMixture | None:
    """Returns the mixture of data.objective; None if rows are read unchanged."""
    return None if is_causal(recipe) else _build_mixture(recipe.objective, tokenizer, {})


def evaluation_rows(recipe: Recipe, tokenizer: Any, rows: Any) -> dict[str, Any]:
    """Builds the validation rows of each objective in train.eval_objectives that changes rows.

    A row is the same in every evaluation and for every data.seed. An objective with holes predicts
    the tokens that fill them, whatever data.loss_on is.

    Args:
      recipe: names the objectives.
      tokenizer: gives the special tokens.
      rows: the validation split.

    Returns:
      {objective: its rows}.
    """
    rows_by_objective = {}
    for part in recipe.eval_objectives:
        if not part.row.leaves_rows:
            loss_on = {'loss_on': 'holes'} if 'loss_on' in part.options else {}
            make_rows = functools.partial(
                ObjectiveRows, mixture=_build_mixture([part], tokenizer, loss_on)
            )
            rows_by_objective[part.name] = (
                rows.map_sources(make_rows) if isinstance(rows, MixedRows) else make_rows(rows)
            )
    return rows_by_objective


@dataclasses.dataclass(frozen=True)
class ObjectiveRows:
    """Rows of the validation split, changed by an objective."""

    rows: Any
    mixture: ObjectiveMixture

    def __len__(self) -> int:
        return len(self.rows)

    def __getitem__(self, i: int) -> Row:
        return self.mixture(self.rows[i], np.random.default_rng((0, 0, i, EVALUATION)))
