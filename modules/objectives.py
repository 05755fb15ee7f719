"""What is predicted of a document: each objective is a function of its tokens in one row.

A function gets the tokens [n] of a document, as far as it is in the row, and gives as many back, so
that rows keep their shape and documents their place. Marks take room, and text is left out for it:
the last tokens of a document that begins in the row, the first ones of a document that goes on from
an earlier row. What stays is one stretch of the text, and a document too short for its marks
is left as it is. NumPy alone: this runs where batches are made.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

from modules.facts import demands_nothing
from modules.options import Option

MARKS = 5  # those that are not numbered


class Marks(NamedTuple):
    """Ids that no text holds. bos, eos: the tokenizer's; the others follow from `first` on."""

    bos: int
    eos: int
    first: int

    @property
    def sep(self) -> int:
        """Ends a document with holes; what fills them follows."""
        return self.first

    @property
    def eom(self) -> int:
        """Ends what fills a hole."""
        return self.first + 1

    @property
    def prefix(self) -> int:
        return self.first + 2

    @property
    def suffix(self) -> int:
        return self.first + 3

    @property
    def middle(self) -> int:
        return self.first + 4

    def mask(self, i: int) -> int:
        """The hole with number i, from 0."""
        return self.first + MARKS + i


class Document(NamedTuple):
    """tokens: int32 [n]. targets: bool [n], the tokens to predict, each from those before it.
    prefix: bool [n], the tokens that see each other.
    """

    tokens: np.ndarray
    targets: np.ndarray
    prefix: np.ndarray


LossOn = Annotated[
    str,
    Option('what is predicted: all text, or what fills the holes', choices=('document', 'holes')),
]


def causal(tokens: np.ndarray, marks: Marks, rng: np.random.Generator) -> Document:
    """Every token, from those before it."""
    del marks, rng
    return _unchanged(tokens, True)


def prefix(tokens: np.ndarray, marks: Marks, rng: np.random.Generator) -> Document:
    """The tokens behind a prefix whose tokens all see each other (arXiv:1910.10683).

    The prefix has 1 to n - 1 tokens, all numbers alike: so others describe T5's code, which was not
    read for this.
    """
    del marks
    length = int(rng.integers(1, len(tokens))) if len(tokens) > 1 else 0
    within = np.arange(len(tokens)) < length
    return Document(tokens, ~within, within)


def span_corruption(
    tokens: np.ndarray,
    marks: Marks,
    rng: np.random.Generator,
    *,
    mask_ratio_least: Annotated[float, Option('least share of the text in holes', 0, 1)] = 0.15,
    mask_ratio_most: Annotated[float, Option('largest share of the text in holes', 0, 1)] = 0.5,
    span_least: Annotated[int, Option('tokens of the shortest hole', 1)] = 3,
    span_most: Annotated[int, Option('tokens of the longest hole', 1)] = 64,
    masks: Annotated[int, Option('most holes of a document; each is a token', 1, 1024)] = 32,
    loss_on: LossOn = 'holes',
) -> Document:
    """Holes in the text, and behind it what fills them (CodeGen2, arXiv:2305.02309).

        text <mask_1> text <mask_2> text EOS <sep> <mask_1> hole <eom> <mask_2> hole <eom>

    The share of the text in holes is uniform, and so are the lengths of holes, of which the last is
    cut to make up the share; then they are placed, all ways alike. <mask_i> and <sep> are never
    predicted. With more holes needed than `masks` the share is smaller.

    Checked: the order of marks for one hole, in the card of the released models. Their training
    code is not released. Ours: that several holes follow in order; the bounds, which are the
    smallest and largest of UL2's denoisers (arXiv:2205.05131, as Levanter's code quotes its first
    table); and the loss on holes alone, as in T5.
    """
    begins, ends, room = _ends(tokens, marks)
    is_text = loss_on == 'document'
    share = rng.uniform(mask_ratio_least, mask_ratio_most)
    lengths = _spans(rng.integers(span_least, span_most + 1, size=masks), share, room)
    if lengths is None:
        return _unchanged(tokens, is_text)
    kept = _kept(tokens, begins, ends, room - _cost(len(lengths)))
    starts = _places(rng, len(kept) - lengths.sum(), len(lengths)) + np.cumsum(lengths) - lengths
    pieces, holes, at = [(tokens[:begins], False)], [], 0
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        mask = ([marks.mask(i)], False)
        pieces += [(kept[at:start], is_text), mask]
        at = start + length
        holes += [mask, (kept[start:at], True), ([marks.eom], True)]
    pieces += [(kept[at:], is_text), (tokens[len(tokens) - ends :], is_text)]
    return _joined([*pieces, ([marks.sep], False), *holes])


def bounds_in_order(recipe: Any, part: Any) -> None:
    """Raises ValueError for a least value above the largest."""
    del recipe
    for name in ('mask_ratio', 'span'):
        least, most = part.options[f'{name}_least'], part.options[f'{name}_most']
        if least > most:
            raise ValueError(
                f'data.{name}_least must be at most data.{name}_most; got {least} and {most}'
            )


def infill(
    tokens: np.ndarray, marks: Marks, rng: np.random.Generator, *, loss_on: LossOn = 'document'
) -> Document:
    """The middle behind prefix and suffix: PSM of fill-in-the-middle (arXiv:2207.14255).

        <prefix> text <suffix> text EOS <middle> text <eom>

    The two cuts are uniform over all places, checked in code that follows the paper; the loss is on
    all three parts, as the paper is remembered to have it. Ours: <eom> ends the middle, where the
    paper has the token that ends documents, so that a document cut by its row does not seem to end;
    <prefix>, <suffix> and <middle> are never predicted; every document is cut, since a mixture says
    how many are.
    """
    begins, ends, room = _ends(tokens, marks)
    is_text, room = loss_on == 'document', room - 4  # of which so many are marks
    if room < 1:
        return _unchanged(tokens, is_text)
    kept = _kept(tokens, begins, ends, room)
    first, last = sorted(rng.integers(0, room + 1, size=2).tolist())
    return _joined(
        [
            (tokens[:begins], False),
            ([marks.prefix], False),
            (kept[:first], is_text),
            ([marks.suffix], False),
            (kept[last:], is_text),
            (tokens[len(tokens) - ends :], is_text),
            ([marks.middle], False),
            (kept[first:last], True),
            ([marks.eom], True),
        ]
    )


def _unchanged(tokens: np.ndarray, are_targets: bool) -> Document:
    return Document(tokens, np.full(len(tokens), are_targets), np.zeros(len(tokens), bool))


def _ends(tokens: np.ndarray, marks: Marks) -> tuple[int, int, int]:
    """(1 where BOS begins it, 1 where EOS ends what is kept, tokens of text and marks between).

    Of a document that begins here its last tokens are left out, and EOS with them.
    """
    begins = int(tokens[0] == marks.bos)
    ends = int(not begins and tokens[-1] == marks.eos)
    return begins, ends, len(tokens) - begins - ends


def _kept(tokens: np.ndarray, begins: int, ends: int, count: int) -> np.ndarray:
    """The text that stays."""
    if begins:
        return tokens[1 : 1 + count]
    stop = len(tokens) - ends
    return tokens[stop - count : stop]


def _cost(holes: np.ndarray | int) -> np.ndarray | int:
    """Marks of so many holes: each twice its number and <eom>, and one <sep>."""
    return 3 * holes + 1


def _spans(drawn: np.ndarray, share: float, room: int) -> np.ndarray | None:
    """The first of the lengths drawn, as many as take `share` of the text that their marks leave of
    `room` tokens; None where there is no room for one.
    """
    text = room - _cost(np.arange(1, len(drawn) + 1))
    drawn, text = drawn[text >= 1], text[text >= 1]
    if not len(drawn):
        return None
    wanted = np.maximum(1, np.rint(share * text).astype(int))
    enough = np.cumsum(drawn) >= wanted
    count = int(np.argmax(enough)) + 1 if enough.any() else len(drawn)
    before = int(drawn[: count - 1].sum())
    last = min(int(wanted[count - 1]) - before, int(drawn[count - 1]))
    if last < 1:  # the marks of one hole more have taken what it was to hold
        return drawn[: count - 1]
    return np.append(drawn[: count - 1], last)


def _places(rng: np.random.Generator, text: int, holes: int) -> np.ndarray:
    """How many of `text` tokens stand before each hole: every way to place them alike."""
    chosen = np.sort(rng.choice(text + holes, size=holes, replace=False))
    return chosen - np.arange(holes)


def _joined(pieces: list[tuple[np.ndarray | list[int], bool]]) -> Document:
    tokens = np.concatenate([np.asarray(piece, np.int32) for piece, _ in pieces])
    targets = np.repeat([is_target for _, is_target in pieces], [len(p) for p, _ in pieces])
    return Document(tokens, targets, np.zeros(len(tokens), bool))


@dataclasses.dataclass(frozen=True)
class Objective:
    """of_document(tokens, marks, rng, **options) -> Document. has_marks: whether the vocabulary
    must hold `Marks`; has_prefix: whether tokens see later ones; leaves_rows: whether it gives rows
    back as they are, with every token a target; check: its own rule (`modules.facts`).
    """

    of_document: Callable[..., Document]
    has_marks: bool = False
    has_prefix: bool = False
    leaves_rows: bool = False
    check: Callable[[Any, Any], None] = demands_nothing


OBJECTIVES = {
    'causal': Objective(causal, leaves_rows=True),
    'prefix': Objective(prefix, has_prefix=True),
    'span_corruption': Objective(span_corruption, has_marks=True, check=bounds_in_order),
    'infill': Objective(infill, has_marks=True),
}
