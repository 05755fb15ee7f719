"""Models of SentencePiece (arXiv:1808.06226) as tokenizers of `tokenizers`.

A model is a protocol buffer with pieces, their scores and types, and how text is normalized. Its
text is one word with spaces as pieces; a BPE joins the neighbours whose piece has the highest
score, a unigram model takes the split with the highest sum of scores.
"""

import collections
import struct
from collections.abc import Iterator, Sequence
from typing import Any, NamedTuple

from lm.data.byte_ranks import Vocabulary

SPACE = '\u2581'  # stands for a space in pieces
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6  # types of pieces
UNIGRAM, BPE, WORD, CHAR = 1, 2, 3, 4  # types of models
VARINT, FIXED64, BYTES, FIXED32 = 0, 1, 2, 5  # wire types of protocol buffers
MAX_VARINT_BITS = 64
NFKC_RULES = ('nmt_nfkc', 'nfkc', 'nmt_nfkc_cf', 'nfkc_cf')  # the rules that build on NFKC
TILDE, PLACEHOLDER = '\uff5e', '\ufdd0'  # Unicode keeps the second for use inside a program


class SentencePiece(NamedTuple):
    """A token of a model, by its id in the list of pieces."""

    text: str
    score: float
    type: int


class SentencePieceModel(NamedTuple):
    """The fields of a model that determine the pieces of a text.

    Attributes:
      pieces: by id.
      model_type: UNIGRAM, BPE, WORD or CHAR.
      has_byte_fallback: characters without a piece become bytes.
      bos_id: of the piece that begins a document, -1 if there is none.
      eos_id: of the piece that ends a document, -1 if there is none.
      rules: the name of the rules of normalization.
      charsmap: the compiled rules; b'' if there are none.
      adds_space: before the text.
      removes_spaces: at both ends, and all but one in a run.
      escapes_spaces: spaces become SPACE.
      is_space_suffix: the added space stands behind the text.
    """

    pieces: list[SentencePiece]
    model_type: int
    has_byte_fallback: bool
    bos_id: int
    eos_id: int
    rules: str
    charsmap: bytes
    adds_space: bool
    removes_spaces: bool
    escapes_spaces: bool
    is_space_suffix: bool


def parse_model(content: bytes) -> SentencePieceModel:
    """Returns a model. Raises ValueError if the bytes are none."""
    pieces, trainer, normalizer = [], _Message(b''), _Message(b'')
    for field, value in _read_fields(content):
        if not isinstance(value, bytes):
            continue
        if field == 1:
            piece = _Message(value)
            pieces.append(
                SentencePiece(piece.read_text(1), piece.read_float(2), piece.read_int(3, NORMAL))
            )
        elif field == 2:
            trainer = _Message(value)
        elif field == 3:
            normalizer = _Message(value)
    if not pieces:
        raise ValueError('it has no pieces')

    return SentencePieceModel(
        pieces=pieces,
        model_type=trainer.read_int(3, UNIGRAM),
        has_byte_fallback=bool(trainer.read_int(35, 0)),
        bos_id=_to_signed(trainer.read_int(41, 1)),
        eos_id=_to_signed(trainer.read_int(42, 2)),
        rules=normalizer.read_text(1),
        charsmap=normalizer.read_bytes(2, b''),
        adds_space=bool(normalizer.read_int(3, 1)),
        removes_spaces=bool(normalizer.read_int(4, 1)),
        escapes_spaces=bool(normalizer.read_int(5, 1)),
        is_space_suffix=bool(trainer.read_int(24, 0)),
    )


class _Message:
    """The last value of each field of a message. Raises ValueError for a value of another type."""

    def __init__(self, content: bytes):
        self._values = dict(_read_fields(content))

    def read_int(self, field: int, default: int) -> int:
        return self._read(field, default, int)

    def read_bytes(self, field: int, default: bytes) -> bytes:
        return self._read(field, default, bytes)

    def read_float(self, field: int) -> float:
        value = self.read_bytes(field, bytes(4))
        if len(value) != 4:
            raise ValueError(f'its field {field} is of another type')
        return struct.unpack('<f', value)[0]

    def read_text(self, field: int) -> str:
        return self.read_bytes(field, b'').decode()

    def _read(self, field: int, default: Any, expected: type) -> Any:
        value = self._values.get(field, default)
        if not isinstance(value, expected):
            raise ValueError(f'its field {field} is of another type')
        return value


def _to_signed(number: int) -> int:
    return number - (1 << 64) if number >> 63 else number


def _read_fields(content: bytes) -> Iterator[tuple[int, Any]]:
    """Yields (number, value) of a message: an int, or the bytes of a string, message or float."""
    at = 0
    while at < len(content):
        key, at = _read_varint(content, at)
        wire_type = key & 7
        if wire_type == VARINT:
            value, at = _read_varint(content, at)
            yield key >> 3, value
            continue
        size = {FIXED64: 8, FIXED32: 4}.get(wire_type)
        if wire_type == BYTES:
            size, at = _read_varint(content, at)
        if size is None or at + size > len(content):
            raise ValueError(f'it is not a protocol buffer, or truncated, at byte {at:,}')
        yield key >> 3, content[at : at + size]
        at += size


def _read_varint(content: bytes, at: int) -> tuple[int, int]:
    number = 0
    for shift in range(0, MAX_VARINT_BITS + 6, 7):
        if at >= len(content):
            break
        number |= (content[at] & 127) << shift
        at += 1
        if content[at - 1] < 128:
            return number, at
    raise ValueError(f'it is not a protocol buffer, or truncated, at byte {at:,}')


def read_sentencepiece(content: bytes) -> Vocabulary:
    """Returns the tokenizer of a model.

    Raises:
      ValueError: for bytes that are no model, and for a model that `tokenizers` cannot follow.
    """
    model = parse_model(content)
    _check_supported(model)
    import tokenizers

    build = _build_unigram if model.model_type == UNIGRAM else _build_bpe
    library = tokenizers.Tokenizer(build(model))
    if steps := _list_normalizers(model):
        library.normalizer = tokenizers.normalizers.Sequence(steps)
    symbols = [piece.text for piece in model.pieces if piece.type == USER_DEFINED]
    patterns = [_match_longest(symbols)] if symbols else []
    if model.model_type == UNIGRAM:
        patterns += _match_unknown(model.pieces)
    if patterns:
        pattern = tokenizers.Regex('|'.join(patterns))
        library.pre_tokenizer = tokenizers.pre_tokenizers.Split(pattern, 'isolated')
    _check_symbols(symbols, library)
    decoders = tokenizers.decoders
    steps = [decoders.ByteFallback(), decoders.Fuse()]
    if model.escapes_spaces:
        steps.insert(0, decoders.Replace(SPACE, ' '))
    if model.adds_space:
        steps.append(decoders.Strip(' ', 1, 0))
    library.decoder = decoders.Sequence(steps)
    library.add_special_tokens(
        [
            tokenizers.AddedToken(piece.text, normalized=False, special=True)
            for piece in model.pieces
            if piece.type in (UNKNOWN, CONTROL)
        ]
    )
    bos, eos = (
        model.pieces[i].text if 0 <= i < len(model.pieces) else None
        for i in (model.bos_id, model.eos_id)
    )
    return Vocabulary(library, bos, eos)


def _check_supported(model: SentencePieceModel) -> None:
    types = {piece.type for piece in model.pieces}
    reasons = {
        'its words come from another program (model_type word)': model.model_type == WORD,
        'it adds a space after the text (treat_whitespace_as_suffix)': model.is_space_suffix,
        'it has unused pieces (type UNUSED)': UNUSED in types,
        'it has no piece for unknown characters': UNKNOWN not in types,
        f'it has custom normalization rules ({model.rules})': bool(model.charsmap)
        and model.rules not in NFKC_RULES,
        'one of its user-defined symbols is part of another': model.model_type == UNIGRAM
        and _overlap([piece.text for piece in model.pieces if piece.type == USER_DEFINED]),
        'two of its pieces are equal': len({p.text for p in model.pieces}) < len(model.pieces),
    }
    for reason, holds in reasons.items():
        if holds:
            raise ValueError(f'{reason}, which tokenizer.json does not support')


def _overlap(symbols: Sequence[str]) -> bool:
    """Whether a run of symbols can be split in several ways, which a unigram model scores."""
    return any(len({*text}) == 1 and len(text) > 1 for text in symbols) or any(
        inner in outer for inner in symbols for outer in symbols if inner != outer
    )


def _list_normalizers(model: SentencePieceModel) -> list[Any]:
    import tokenizers

    normalizers, regex = tokenizers.normalizers, tokenizers.Regex
    steps: list[Any] = []
    if model.charsmap:
        # The library applies one rule to a character with all its marks, and drops marks: NFKC
        # composes them before, which the rules do too. They leave the wide tilde as it is.
        steps = [normalizers.NFKC(), normalizers.Precompiled(model.charsmap)]
        if model.rules.startswith('nmt'):
            steps.insert(0, normalizers.Replace(TILDE, PLACEHOLDER))
            steps.append(normalizers.Replace(PLACEHOLDER, TILDE))
    if model.removes_spaces:
        end = f'[ {SPACE}]+' if model.escapes_spaces else ' +'
        steps.append(normalizers.Replace(regex(rf'\A +|{end}\z'), ''))
        steps.append(normalizers.Replace(regex(' {2,}'), ' '))
    if model.adds_space:
        steps.append(normalizers.Prepend(' '))
    if model.escapes_spaces:
        steps.append(normalizers.Replace(' ', SPACE))
    return steps


def _match_longest(texts: Sequence[str]) -> str:
    """Returns a regular expression of the longest of some texts, in time of its length."""
    tree: dict[str, Any] = {}
    for text in texts:
        node = tree
        for character in text:
            node = node.setdefault(character, {})
        node[''] = {}

    def render(node: dict[str, Any]) -> str:
        branches = [f'{_escape(c)}{render(below)}' for c, below in node.items() if c]
        if not branches:
            return ''
        return f'(?:{"|".join(branches)})' + ('?' if '' in node else '')

    return render(tree)


def _match_unknown(pieces: Sequence[SentencePiece]) -> list[str]:
    """Returns patterns of characters without a piece, in spellings of pieces that no text has.

    A unigram model of `tokenizers` prefers any piece to an unknown character. No piece has one, so
    that nothing changes if it is a word by itself.
    """
    normal = {piece.text for piece in pieces if piece.type == NORMAL}
    endings = collections.defaultdict(list)
    for piece in pieces:
        if piece.type in (UNKNOWN, CONTROL, BYTE):
            at = next(
                (i for i, character in enumerate(piece.text) if character not in normal), None
            )
            if at is not None:
                endings[piece.text[: at + 1]].append(piece.text[at + 1 :])
    return [
        f'(?<={_escape(start[:-1])}){_escape(start[-1])}(?={_match_longest(ends)})'
        for start, ends in endings.items()
    ]


def _escape(text: str) -> str:
    return ''.join(f'\\x{{{ord(character):x}}}' for character in text)


def _check_symbols(symbols: Sequence[str], library: Any) -> None:
    """Raises ValueError if the normalizer changes a user-defined symbol: theirs does not."""
    for text in symbols if library.normalizer else ():
        if text not in library.normalizer.normalize_str(f'x{text}x'):
            raise ValueError(
                f'its normalization changes its user-defined symbol {text!r}, which tokenizer.json '
                'does not support'
            )


def _build_bpe(model: SentencePieceModel) -> Any:
    import tokenizers

    vocab = {piece.text: i for i, piece in enumerate(model.pieces)}
    merges = [] if model.model_type == CHAR else list_merges(model.pieces)
    unknown = next(piece.text for piece in model.pieces if piece.type == UNKNOWN)
    return tokenizers.models.BPE(
        vocab,
        merges,
        unk_token=unknown,
        fuse_unk=True,
        byte_fallback=model.has_byte_fallback,
        # A symbol that the user defined is a word by itself, and has no merges.
        ignore_merges=any(piece.type == USER_DEFINED for piece in model.pieces),
    )


def list_merges(pieces: Sequence[SentencePiece]) -> list[tuple[str, str]]:
    """Returns all pairs of pieces that join to a piece, those with the highest score first.

    Among equal scores the leftmost pair of the text is joined first. Runs of a character have one
    score in LLaMA's models: there the leftmost pair is that with the longest left part.

    Raises:
      ValueError: if other pieces have the same score, or if a piece has a character that is none.
    """
    scores = {piece.text: piece.score for piece in pieces if piece.type == NORMAL}
    by_score = collections.defaultdict(set)
    for text, score in scores.items():
        if len(text) > 1:
            by_score[score].add(text)
    merges = []
    for _, texts in sorted(by_score.items(), reverse=True):
        characters = {character for text in texts for character in text}
        if len(texts) > 1 and len(characters) > 1:
            equal = ' and '.join(map(repr, sorted(texts)[:2]))
            raise ValueError(f'{equal} have the same score, which tokenizer.json does not support')
        if missing := [character for character in characters if character not in scores]:
            raise ValueError(
                f'the character {min(missing)!r} is in a piece but is not a piece itself, which '
                'tokenizer.json does not support'
            )
        pairs = [(text[:at], text[at:]) for text in texts for at in range(1, len(text))]
        pairs = [pair for pair in pairs if pair[0] in scores and pair[1] in scores]
        merges += sorted(pairs, key=lambda pair: (-len(pair[0]), -len(pair[1]), pair))
    return merges


def _build_unigram(model: SentencePieceModel) -> Any:
    import tokenizers

    normal = [piece.score for piece in model.pieces if piece.type == NORMAL]
    # No text may spell a control piece: below every split of the spelling into characters. The
    # library scores unknown characters below all pieces, which changes nothing where each has none.
    longest = max(len(piece.text) for piece in model.pieces)
    lowest = min(normal, default=0.0) * (longest + 1) - longest - 1
    vocab = []
    for piece in model.pieces:
        score = 0.0 if piece.type == USER_DEFINED else lowest
        vocab.append((piece.text, piece.score if piece.type == NORMAL else score))
    unknown = next(i for i, piece in enumerate(model.pieces) if piece.type == UNKNOWN)
    return tokenizers.models.Unigram(vocab, unknown, model.has_byte_fallback)
