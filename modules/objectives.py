"""Objectives: functions that choose the predicted tokens of a document, and the tokens they see.

A function takes the tokens [n] of a document that lie in one row, and returns as many tokens, so
that rows keep their shape and documents their place. Special tokens take the room of text: of the
last tokens of a document that begins in the row, or of the first tokens of a document continued
from an earlier row. The rest is a contiguous stretch of the text. A document too short for its
special tokens is unchanged. Only NumPy is used: this code runs where batches are made.
"""

import dataclasses
from collections.abc import Callable
from typing import Annotated, Any, NamedTuple

import numpy as np

from modules.facts import accept_any
from modules.options import Option

N_UNNUMBERED = 5  # special tokens before <mask_0>: sep, eom, prefix, suffix, middle
MIN_SEQ_LEN = 8  # one hole's four special tokens, a token in it, and some around it


class SpecialTokens(NamedTuple):
    """Ids of tokens that no text contains.

    `bos` and `eos` are the tokenizer's; the others follow from `first` on. `sep` ends a document
    with holes, and the contents of the holes follow it; `eom` ends the content of a hole.
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
        """Returns the token of hole i, from 0."""
        return self.first + N_UNNUMBERED + i


class TrainingDocument(NamedTuple):
    """The tokens of a document in training."""

    tokens: np.ndarray  # int32 [n]
    targets: np.ndarray  # bool [n]: the tokens to predict, each from the tokens before it
    prefix: np.ndarray  # bool [n]: the tokens that see each other


Piece = tuple[np.ndarray | list[int], bool]  # (tokens, whether they are predicted)

LOSS_DESCRIPTION = 'predict the whole document, or only the contents of holes'
LossOn = Annotated[str, Option(LOSS_DESCRIPTION, choices=('document', 'holes'))]


def causal(
    tokens: np.ndarray, special_tokens: SpecialTokens, rng: np.random.Generator
) -> TrainingDocument:
    """Predicts every token from the tokens before it."""
    return _keep_document(tokens, True)


def prefix(
    tokens: np.ndarray, special_tokens: SpecialTokens, rng: np.random.Generator
) -> TrainingDocument:
    """Prefix language modelling (arXiv:1910.10683): predicts the tokens after a prefix.

    All tokens of the prefix see each other. The length of the prefix is uniform from 1 to `n - 1`,
    for a document of `n` tokens, as others describe T5's code, which we have not read.
    """
    length = int(rng.integers(1, len(tokens))) if len(tokens) > 1 else 0
    within = np.arange(len(tokens)) < length
    return TrainingDocument(tokens, ~within, within)


def span_corruption(
    tokens: np.ndarray,
    special_tokens: SpecialTokens,
    rng: np.random.Generator,
    *,
    mask_ratio_least: Annotated[float, Option('smallest share of the text in holes', 0, 1)] = 0.15,
    mask_ratio_most: Annotated[float, Option('largest share of the text in holes', 0, 1)] = 0.5,
    span_least: Annotated[int, Option('length of the shortest hole, in tokens', 1)] = 3,
    span_most: Annotated[int, Option('length of the longest hole, in tokens', 1)] = 64,
    masks: Annotated[
        int, Option('maximum holes per document; each needs a special token', 1, 1024)
    ] = 32,
    loss_on: LossOn = 'holes',
) -> TrainingDocument:
    """Span corruption, as in CodeGen2 (arXiv:2305.02309): predicts the content of holes after the
    text.

        text <mask_1> text <mask_2> text EOS <sep> <mask_1> hole <eom> <mask_2> hole <eom>

    The share of the text in holes, the lengths of holes and their places are uniformly distributed.
    The last hole is cut to make up the share; if the share needs more holes than `masks`, it is
    smaller. <mask_i> and <sep> are never predicted.

    The order of special tokens for one hole is checked against the card of the released models;
    their training code is not released. Our choices: several holes follow in order; the bounds are
    the smallest and largest of UL2's denoisers (arXiv:2205.05131, as Levanter's code quotes its
    first table); the loss is only on holes, as in T5.
    """
    begins, ends, room = _find_ends(tokens, special_tokens)
    is_text = loss_on == 'document'
    share = rng.uniform(mask_ratio_least, mask_ratio_most)
    lengths = _fit_spans(rng.integers(span_least, span_most + 1, size=masks), share, room)
    if lengths is None:
        return _keep_document(tokens, is_text)
    text = _crop_text(tokens, begins, ends, room - _count_special(len(lengths)))
    starts = (
        _draw_places(rng, len(text) - lengths.sum(), len(lengths)) + np.cumsum(lengths) - lengths
    )
    pieces: list[Piece] = [(tokens[:begins], False)]
    holes: list[Piece] = []
    position = 0
    for i, (start, length) in enumerate(zip(starts.tolist(), lengths.tolist(), strict=True)):
        mask: Piece = ([special_tokens.mask(i)], False)
        pieces += [(text[position:start], is_text), mask]
        position = start + length
        holes += [mask, (text[start:position], True), ([special_tokens.eom], True)]
    pieces += [(text[position:], is_text), (tokens[len(tokens) - ends :], is_text)]
    return _join_pieces([*pieces, ([special_tokens.sep], False), *holes])


def check_seq_len(recipe: Any, part: Any) -> None:
    """Raises ValueError for rows too short for special tokens."""
    if recipe.data.seq_len < MIN_SEQ_LEN:
        raise ValueError(
            f'{part} adds special tokens to rows, so data.seq_len must be at least {MIN_SEQ_LEN}; '
            f'got {recipe.data.seq_len}'
        )


def check_bounds(recipe: Any, part: Any) -> None:
    """Raises ValueError for a minimum above its maximum, and as `check_seq_len` does."""
    check_seq_len(recipe, part)
    for name in ('mask_ratio', 'span'):
        minimum, maximum = part.options[f'{name}_least'], part.options[f'{name}_most']
        if minimum > maximum:
            raise ValueError(
                f'data.{name}_least must be at most data.{name}_most; got {minimum} and {maximum}'
            )


def infill(
    tokens: np.ndarray,
    special_tokens: SpecialTokens,
    rng: np.random.Generator,
    *,
    loss_on: LossOn = 'document',
) -> TrainingDocument:
    """Fill-in-the-middle in the order PSM (arXiv:2207.14255): predicts the middle after prefix and
    suffix.

        <prefix> text <suffix> text EOS <middle> text <eom>

    The two cuts are uniform over all places, as in code that follows the paper. The loss is on all
    three parts, as we remember the paper. Our choices: <eom> ends the middle in place of the
    paper's token that ends documents, so that a document cut by its row does not seem to end;
    <prefix>, <suffix> and <middle> are never predicted; every document is cut, since a mixture sets
    the share of such documents.
    """
    begins, ends, room = _find_ends(tokens, special_tokens)
    is_text, room = loss_on == 'document', room - 4  # 4 special tokens
    if room < 1:
        return _keep_document(tokens, is_text)
    text = _crop_text(tokens, begins, ends, room)
    first, last = sorted(rng.integers(0, room + 1, size=2).tolist())
    pieces: list[Piece] = [
        (tokens[:begins], False),
        ([special_tokens.prefix], False),
        (text[:first], is_text),
    ]
    pieces += [([special_tokens.suffix], False), (text[last:], is_text)]
    pieces += [(tokens[len(tokens) - ends :], is_text), ([special_tokens.middle], False)]
    return _join_pieces([*pieces, (text[first:last], True), ([special_tokens.eom], True)])


def _keep_document(tokens: np.ndarray, are_targets: bool) -> TrainingDocument:
    return TrainingDocument(tokens, np.full(len(tokens), are_targets), np.zeros(len(tokens), bool))


def _find_ends(tokens: np.ndarray, special_tokens: SpecialTokens) -> tuple[int, int, int]:
    """Returns (1 if BOS begins the tokens, 1 if EOS ends the text that is kept, tokens between
    these).

    A document that begins in the row loses its last tokens, and EOS with them.
    """
    begins = int(tokens[0] == special_tokens.bos)
    ends = int(not begins and tokens[-1] == special_tokens.eos)
    return begins, ends, len(tokens) - begins - ends


def _crop_text(tokens: np.ndarray, begins: int, ends: int, count: int) -> np.ndarray:
    if begins:
        return tokens[1 : 1 + count]
    stop = len(tokens) - ends
    return tokens[stop - count : stop]


def _count_special(holes: Any) -> Any:
    """Returns the number of special tokens: per hole two <mask_i> and one <eom>, and one <sep>."""
    return 3 * holes + 1


def _fit_spans(lengths: np.ndarray, share: float, room: int) -> np.ndarray | None:
    """Returns the first of the drawn lengths that fill `share` of the text; None: no room for a
    hole.

    The text is the part of `room` tokens that the special tokens of the holes leave.
    """
    text = room - _count_special(np.arange(1, len(lengths) + 1))
    lengths, text = lengths[text >= 1], text[text >= 1]
    if not len(lengths):
        return None
    target = np.maximum(1, np.rint(share * text).astype(int))
    is_filled = np.cumsum(lengths) >= target
    count = int(np.argmax(is_filled)) + 1 if is_filled.any() else len(lengths)
    before = int(lengths[: count - 1].sum())
    last = min(int(target[count - 1]) - before, int(lengths[count - 1]))
    if last < 1:  # the special tokens of this hole take the room of its content
        return lengths[: count - 1]
    return np.append(lengths[: count - 1], last)


def _draw_places(rng: np.random.Generator, text: int, holes: int) -> np.ndarray:
    """Returns the number of `text` tokens before each hole: uniform over all arrangements."""
    chosen = np.sort(rng.choice(text + holes, size=holes, replace=False))
    return chosen - np.arange(holes)


def _join_pieces(pieces: list[Piece]) -> TrainingDocument:
    tokens = np.concatenate([np.asarray(piece, np.int32) for piece, _ in pieces])
    targets = np.repeat([is_target for _, is_target in pieces], [len(p) for p, _ in pieces])
    return TrainingDocument(tokens, targets, np.zeros(len(tokens), bool))


def check_prefix_attention(recipe: Any, part: Any) -> None:
    """Raises ValueError for attention that cannot show later tokens."""
    if not recipe.attention.row.has_scores:
        from modules.attention import ATTENTIONS  # imports JAX, which batch makers avoid

        supported = [name for name, row in ATTENTIONS.items() if row.has_scores]
        raise ValueError(
            f'{part} lets the tokens of a prefix see each other, but {recipe.attention} shows no '
            f'later tokens. Choose model.attention={"|".join(supported)}, or another objective.'
        )


@dataclasses.dataclass(frozen=True)
class Objective:
    """A row of `OBJECTIVES`: transform(tokens, special_tokens, rng, **options) -> document."""

    transform: Callable[..., TrainingDocument]
    has_special_tokens: bool = False  # whether the vocabulary must hold `SpecialTokens`
    has_prefix: bool = False  # whether tokens see later ones
    leaves_rows: bool = False  # whether rows stay as they are, with every token a target
    check: Callable[[Any, Any], None] = accept_any  # of a config (`modules.facts`)


OBJECTIVES = {
    'causal': Objective(causal, leaves_rows=True),
    'prefix': Objective(prefix, has_prefix=True, check=check_prefix_attention),
    'span_corruption': Objective(span_corruption, has_special_tokens=True, check=check_bounds),
    'infill': Objective(infill, has_special_tokens=True, check=check_seq_len),
}
