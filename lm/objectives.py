"""The objectives of a config: what they make of rows, and what they add to batch and vocabulary."""

import dataclasses
import functools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from lm.choice import shares_of
from lm.config import Part, given, part_at, parts_at
from lm.mixture import Mixed
from lm.sections import Config
from modules.attention import ATTENTIONS
from modules.objectives import MARKS, Document, Marks
from modules.options import options

LEAST_WITH_MARKS = 8  # of data.seq_len: one hole's four marks, a token in it, and some around it
TRAINED, EVALUATED = 'data.objective', 'train.eval_objectives'
CAUSAL = 'causal'
EVALUATION = 1  # the last of four numbers that a row is drawn by; in training that is 0

Row = dict[str, np.ndarray]


def all_objectives(config: Config) -> list[Part]:
    """Those of training, then those of evaluation."""
    return parts_at(config, TRAINED) + parts_at(config, EVALUATED)


def has_prefix(config: Config) -> bool:
    """Whether attention has to show tokens later ones."""
    return any(part.row.has_prefix for part in all_objectives(config))


def check_objectives(config: Config) -> None:
    """ValueError for bounds in the wrong order, rows too short for marks, attention that cannot see
    a whole prefix, and an option of the loss that nothing trained reads.
    """
    data = config.data
    for name in ('mask_ratio', 'span'):
        least, most = (getattr(data, f'{name}_{end}') for end in ('least', 'most'))
        if least is not None and least > most:
            raise ValueError(
                f'data.{name}_least must be at most data.{name}_most; got {least} and {most}'
            )
    if n_marks(config) and data.seq_len < LEAST_WITH_MARKS:
        raise ValueError(
            f'data.objective={data.objective} and train.eval_objectives='
            f'{config.train.eval_objectives} put marks into rows, for which data.seq_len must be '
            f'at least {LEAST_WITH_MARKS}; got {data.seq_len}'
        )
    for part in all_objectives(config):
        if part.row.has_prefix:
            _check_attention(config, part)
    _check_loss_on(config)


def _check_attention(config: Config, objective: Part) -> None:
    layer, what = part_at(config, 'model.attention'), f'{objective.path}={objective.name}'
    if not hasattr(layer.row, 'scores'):
        able = [name for name, row in ATTENTIONS.items() if hasattr(row, 'scores')]
        raise ValueError(
            f'{what} lets the tokens of a prefix see each other, and model.attention={layer.name} '
            f'shows no later ones. Choose model.attention={"|".join(able)}, or another objective.'
        )
    if config.attention.affine_scaled:
        raise ValueError(
            f'{what} lets the tokens of a prefix see each other, and the mean that '
            'attention.affine_scaled=True adds is of earlier ones. Leave one of them out.'
        )


def _check_loss_on(config: Config) -> None:
    """ValueError where evaluation alone has holes, since it always counts what fills them."""
    loss_on = config.data.loss_on
    defaults = {
        part.path: options(part.row)['loss_on'].default
        for part in all_objectives(config)
        if 'loss_on' in options(part.row)
    }
    if loss_on not in (None, *defaults.values()) and TRAINED not in defaults:
        raise ValueError(
            f'data.loss_on={loss_on} is of training, and data.objective={config.data.objective} '
            'has no holes; evaluation counts what fills them, always. Leave it out, or None.'
        )


def n_marks(config: Config) -> int:
    """How many ids the vocabulary has behind those of the tokenizer: MARKS and the holes that can
    be numbered, where an objective needs them, in training or evaluation; or 0.
    """
    if not any(part.row.has_marks for part in all_objectives(config)):
        return 0
    return MARKS + (config.data.masks or 0)


def batch_fields(config: Config) -> tuple[str, ...]:
    """The arrays of a training batch; each is int32 [B, T+1].

    With an objective other than causal, `targets` is 1 for each token to predict. With one that has
    prefixes, `prefix` numbers them, 0 being none.
    """
    if config.data.objective == CAUSAL:
        return ('tokens', 'segments')
    has_prefix = any(part.row.has_prefix for part in parts_at(config, TRAINED))
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
        function_of(part, given(config, part), tokenizer) for part in parts_at(config, TRAINED)
    ]
    return Mixture(tuple(functions), tuple(shares.values()), batch_fields(config))


def evaluated(config: Config, tokenizer: Any, rows: Any) -> dict[str, Any]:
    """{name: rows as the objective has them} for those of train.eval_objectives besides causal.

    A row is the same in every evaluation and for every data.seed. Where an objective has holes,
    what fills them is the target, whatever data.loss_on is.
    """
    found = {}
    for part in parts_at(config, EVALUATED):
        if part.name == CAUSAL:
            continue
        own = given(config, part)
        if 'loss_on' in options(part.row):
            own['loss_on'] = 'holes'
        fields = ('tokens', 'segments', 'targets', *(['prefix'] if part.row.has_prefix else []))
        mixture = Mixture((function_of(part, own, tokenizer),), (1.0,), fields)
        mapped = functools.partial(Mapped, mixture=mixture)
        found[part.name] = rows.mapped(mapped) if isinstance(rows, Mixed) else mapped(rows)
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
        return self.mixture(self.rows[i], np.random.default_rng((0, 0, i, EVALUATION)))
