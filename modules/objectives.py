"""Objectives: functions that say which tokens of a document are predicted, and from which.

A function takes the tokens [n] of a document that lie in one row, and returns as many, so that rows
keep their shape and documents their place. Marks take room, for which text is left out: the last
tokens of a document that begins in the row, the first ones of a document that goes on from an
earlier row. What stays is one stretch of the text; a document too short for its marks is left as it
is. Only NumPy is used: this runs where batches are made.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

from modules.facts import accept_any
from modules.options import Option

N_UNNUMBERED = 5  # how many are not numbered
MIN_SEQ_LEN = 8  # tokens of a row: one hole's four marks, a token in it, and some around it


class SpecialTokens(NamedTuple):
    """Ids that no text holds.

    bos, eos: the tokenizer's; the others follow from `first` on. `sep` ends a document with holes,
    after which comes what fills them; `eom` ends what fills a hole.
    """

    bos: int
    eos: int
    first: int

    sep = property(lambda self: self.first)
    eom = property(lambda self: self.first + 1)
    prefix = property(lambda self: self.first + 2)
    suffix = property(lambda self: self.first + 3)
    middle = property(lambda self: self.first + 4)

    def mask(self, i: int) -> int:
        """Returns the mark of hole i, from 0."""
        return self.first + N_UNNUMBERED + i


class TrainingDocument(NamedTuple):
    """The tokens of a document as they are trained on."""

    tokens: np.ndarray  # int32 [n]
    targets: np.ndarray  # bool [n]: those to predict, each from those before it
    prefix: np.ndarray  # bool [n]: those that see each other


LOSS_DESCRIPTION = 'what is predicted: all text, or what fills the holes'
LossOn = Annotated[str, Option(LOSS_DESCRIPTION, choices=('document', 'holes'))]


def causal(
    tokens: np.ndarray, special_tokens: SpecialTokens, rng: np.random.Generator
) -> TrainingDocument:
    """Every token, from those before it."""
    return _keep_document(tokens, True)


def prefix(
    tokens: np.ndarray, special_tokens: SpecialTokens, rng: np.random.Generator
) -> TrainingDocument:
    """The tokens behind a prefix whose tokens all see each other (arXiv:1910.10683).

    The length of the prefix is uniform from 1 to n - 1, as others describe T5's code, which was not
    read for this.
    """
    length = int(rng.integers(1, len(tokens))) if len(tokens) > 1 else 0
    within = np.arange(len(tokens)) < length
    return TrainingDocument(tokens, ~within, within)


def span_corruption(
    tokens: np.ndarray,
    special_tokens: SpecialTokens,
    rng: np.random.Generator,
    *,
    mask_ratio_least: Annotated[float, Option('least share of the text in holes', 0, 1)] = 0.15,
    mask_ratio_most: Annotated[float, Option('largest share of the text in holes', 0, 1)] = 0.5,
    span_least: Annotated[int, Option('tokens of the shortest hole', 1)] = 3,
    span_most: Annotated[int, Option('tokens of the longest hole', 1)] = 64,
    masks: Annotated[int, Option('most holes of a document; each is a token', 1, 1024)] = 32,
    loss_on: LossOn = 'holes',
) -> TrainingDocument:
    """Holes in the text, and behind it what fills them (CodeGen2, arXiv:2305.02309).

        text <mask_1> text <mask_2> text EOS <sep> <mask_1> hole <eom> <mask_2> hole <eom>

    The share of the text in holes is uniform, and so are the lengths of holes, the last of which is
    cut to make up the share; their places are uniform too. <mask_i> and <sep> are never predicted.
    Where more holes than `masks` would be needed, the share is smaller.

    The order of marks for one hole is checked against the card of the released models, whose
    training code is not released. Our choices: several holes follow in order; the bounds are the
    smallest and largest of UL2's denoisers (arXiv:2205.05131, as Levanter's code quotes its first
    table); the loss is on holes alone, as in T5.
    """
    begins, ends, room = _find_ends(tokens, special_tokens)
    is_text = loss_on == 'document'
    share = rng.uniform(mask_ratio_least, mask_ratio_most)
    lengths = _fit_spans(rng.integers(span_least, span_most + 1, size=masks), share, room)
    if lengths is None:
        return _keep_document(tokens, is_text)
    kept = _crop_text(tokens, begins, ends, room - _count_special(len(lengths)))
    starts = (
        _draw_places(rng, len(kept) - lengths.sum(), len(lengths)) + np.cumsum(lengths) - lengths
    )
    pieces, holes, at = [(tokens[:begins], False)], [], 0
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        mask = ([special_tokens.mask(i)], False)
        pieces += [(kept[at:start], is_text), mask]
        at = start + length
        holes += [mask, (kept[start:at], True), ([special_tokens.eom], True)]
    pieces += [(kept[at:], is_text), (tokens[len(tokens) - ends :], is_text)]
    return _join_pieces([*pieces, ([special_tokens.sep], False), *holes])


def check_seq_len(recipe: Any, part: Any) -> None:
    """Raises ValueError for rows too short for marks."""
    if recipe.data.seq_len < MIN_SEQ_LEN:
        raise ValueError(
            f'{part} puts marks into rows, for which data.seq_len must be at least '
            f'{MIN_SEQ_LEN}; got {recipe.data.seq_len}'
        )


def check_bounds(recipe: Any, part: Any) -> None:
    """Raises ValueError for a least value above the largest, and as `check_seq_len` does."""
    check_seq_len(recipe, part)
    for name in ('mask_ratio', 'span'):
        least, most = part.options[f'{name}_least'], part.options[f'{name}_most']
        if least > most:
            raise ValueError(
                f'data.{name}_least must be at most data.{name}_most; got {least} and {most}'
            )


def infill(
    tokens: np.ndarray,
    special_tokens: SpecialTokens,
    rng: np.random.Generator,
    *,
    loss_on: LossOn = 'document',
) -> TrainingDocument:
    """The middle behind prefix and suffix: PSM of fill-in-the-middle (arXiv:2207.14255).

        <prefix> text <suffix> text EOS <middle> text <eom>

    The two cuts are uniform over all places, as in code that follows the paper; the loss is on all
    three parts, as we remember the paper. Our choices: <eom> ends the middle, where the paper has
    the token that ends documents, so that a document cut by its row does not seem to end; <prefix>,
    <suffix> and <middle> are never predicted; every document is cut, since a mixture says how many
    are.
    """
    begins, ends, room = _find_ends(tokens, special_tokens)
    is_text, room = loss_on == 'document', room - 4  # 4 of these are marks
    if room < 1:
        return _keep_document(tokens, is_text)
    kept = _crop_text(tokens, begins, ends, room)
    first, last = sorted(rng.integers(0, room + 1, size=2).tolist())
    pieces = [(tokens[:begins], False), ([special_tokens.prefix], False), (kept[:first], is_text)]
    pieces += [([special_tokens.suffix], False), (kept[last:], is_text)]
    pieces += [(tokens[len(tokens) - ends :], is_text), ([special_tokens.middle], False)]
    return _join_pieces([*pieces, (kept[first:last], True), ([special_tokens.eom], True)])


def _keep_document(tokens: np.ndarray, are_targets: bool) -> TrainingDocument:
    return TrainingDocument(tokens, np.full(len(tokens), are_targets), np.zeros(len(tokens), bool))


def _find_ends(tokens: np.ndarray, special_tokens: SpecialTokens) -> tuple[int, int, int]:
    """Returns (1 where BOS begins it, 1 where EOS ends what is kept, tokens between these).

    A document that begins here loses its last tokens, and EOS with them.
    """
    begins = int(tokens[0] == special_tokens.bos)
    ends = int(not begins and tokens[-1] == special_tokens.eos)
    return begins, ends, len(tokens) - begins - ends


def _crop_text(tokens: np.ndarray, begins: int, ends: int, count: int) -> np.ndarray:
    if begins:
        return tokens[1 : 1 + count]
    stop = len(tokens) - ends
    return tokens[stop - count : stop]


def _count_special(holes: np.ndarray | int) -> np.ndarray | int:
    """Returns the number of marks: for each hole twice <mask_i> and <eom>, and one <sep>."""
    return 3 * holes + 1


def _fit_spans(lengths: np.ndarray, share: float, room: int) -> np.ndarray | None:
    """Returns as many of the drawn lengths as take `share` of the text; None: no room for one.

    The text is what the marks of the holes leave of `room` tokens.
    """
    text = room - _count_special(np.arange(1, len(lengths) + 1))
    lengths, text = lengths[text >= 1], text[text >= 1]
    if not len(lengths):
        return None
    wanted = np.maximum(1, np.rint(share * text).astype(int))
    enough = np.cumsum(lengths) >= wanted
    count = int(np.argmax(enough)) + 1 if enough.any() else len(lengths)
    before = int(lengths[: count - 1].sum())
    last = min(int(wanted[count - 1]) - before, int(lengths[count - 1]))
    if last < 1:  # the marks of this hole have taken what it was to hold
        return lengths[: count - 1]
    return np.append(lengths[: count - 1], last)


def _draw_places(rng: np.random.Generator, text: int, holes: int) -> np.ndarray:
    """Returns how many of `text` tokens stand before each hole: uniform over all ways."""
    chosen = np.sort(rng.choice(text + holes, size=holes, replace=False))
    return chosen - np.arange(holes)


def _join_pieces(pieces: list[tuple[np.ndarray | list[int], bool]]) -> TrainingDocument:
    tokens = np.concatenate([np.asarray(piece, np.int32) for piece, _ in pieces])
    targets = np.repeat([is_target for _, is_target in pieces], [len(p) for p, _ in pieces])
    return TrainingDocument(tokens, targets, np.zeros(len(tokens), bool))


def check_prefix_attention(recipe: Any, part: Any) -> None:
    """Raises ValueError for attention that cannot show later tokens."""
    if not recipe.attention.row.has_scores:
        from modules.attention import ATTENTIONS  # not where batches are made

        able = [name for name, row in ATTENTIONS.items() if row.has_scores]
        raise ValueError(
            f'{part} lets the tokens of a prefix see each other, and {recipe.attention} shows no '
            f'later ones. Choose model.attention={"|".join(able)}, or another objective.'
        )


@dataclasses.dataclass(frozen=True)
class Objective:
    """A row of `OBJECTIVES`: of_document(tokens, marks, rng, **options) -> Document."""

    transform: Callable[..., TrainingDocument]
    has_special_tokens: bool = False  # whether the vocabulary must hold `SpecialTokens`
    has_prefix: bool = False  # whether tokens see later ones
    leaves_rows: bool = False  # whether rows stay as they are, with every token a target
    check: Callable[[Any, Any], None] = accept_any  # its own rule (`modules.facts`)


OBJECTIVES = {
    'causal': Objective(causal, leaves_rows=True),
    'prefix': Objective(prefix, has_prefix=True, check=check_prefix_attention),
    'span_corruption': Objective(span_corruption, has_special_tokens=True, check=check_bounds),
    'infill': Objective(infill, has_special_tokens=True, check=check_seq_len),
}
