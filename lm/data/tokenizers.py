"""Text to token ids and back: bytes, a byte-pair encoding of the corpus, or a tokenizer file.

A document is BOS + tokens + EOS. BOS and EOS are ids only: they have no spelling, so that no text
can be mistaken for them.
"""

import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lm.data.cache import file_digest
from lm.data.tokenizer_files import (  # noqa: F401, some are imported from here
    CONFIG_FILE,
    LIBRARY_FILE,
    SPECIALS_FILE,
    read_end_tokens,
    read_files_beside,
    read_special_token,
    special_token_text,
    write_files_beside,
)
from lm.data.vocabularies import Vocabulary, find_vocabulary, read_vocabulary
from lm.storage.files import (
    expand_home,
    first_line,
    format_json,
    read_json,
    replace_file,
    seal_record,
    write_text,
)
from modules.choices import choose

BYTES = 256
SPECIALS = 2  # BOS and EOS
PART = 1 << 16  # characters: longer texts are cut for the sake of parallelism and memory
# The pre-tokenizer of GPT-2 always splits here (no token continues from a letter to a space or a
# sign), so parts encode to the same tokens as the whole. After a space, and between a sign and a
# letter, it does not always split.
CUT = re.compile(r'\S(?=[ \t\r\n])|[A-Za-z0-9](?=[!-/:-@\[-`{-~])')
# Characters without a place to cut; encoding takes 100 bytes of memory for each of them.
LONGEST_UNCUT = 1 << 22

POLL_SEC = 0.1
STOP_SEC = 1  # wait for an interrupted training
TOKENIZER_FILE = 'evenkeel_tokenizer.json'


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """Tokens are bytes of the UTF-8 text. cuttable: a document may be encoded in parts."""

    vocab_size: int = BYTES + SPECIALS
    bos_id: int = BYTES
    eos_id: int = BYTES + 1
    cuttable: ClassVar[bool] = True

    def encode(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def split(self, texts: Iterable[str], name: str) -> Iterator[str]:
        """Yields the texts unchanged: every character is encoded alone."""
        yield from texts

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < BYTES).decode('utf-8', 'replace')

    def save(self, folder: str | Path) -> None:
        _write_tokenizer_file(folder, kind='byte')


@dataclasses.dataclass(frozen=True)
class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library, which does not see BOS and EOS.

    The library may have tokens at ids from vocab_size on: Gemma 3 has one, for images, that its
    text models have no row for. A text that needs such a token cannot be encoded.

    Attributes:
      beside: {name: content} of the files that belong to it (`lm.data.tokenizer_files`).
    """

    library: Any
    vocab_size: int
    bos_id: int
    eos_id: int
    cuttable: bool
    beside: Mapping[str, bytes] = dataclasses.field(default_factory=dict, compare=False, repr=False)

    def encode(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else bytes(text).decode('utf-8', 'replace')
        return np.concatenate(self.encode_batch(list(self.split([text], 'the text')))).tolist()

    def split(self, texts: Iterable[str], name: str) -> Iterator[str]:
        """Yields parts of the joined `texts` that encode to the tokens of the whole.

        It is a single part if the tokenizer is not cuttable.
        """
        yield from split_text(texts, name) if self.cuttable else [''.join(texts)]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Returns the tokens of each text.

        Raises ValueError if a token has no row, or if the library cannot encode a text: a
        vocabulary may lack both a character and an unknown token.
        """
        try:
            encodings = self.library.encode_batch_fast(texts, add_special_tokens=False)
        except Exception as error:  # the library raises Exception itself
            raise ValueError(
                f'data.tokenizer cannot encode the text ({first_line(error)}). Use a tokenizer '
                'whose vocabulary has every byte, or an unknown token.'
            ) from error
        tokens = [np.array(encoding.ids, np.int32) for encoding in encodings]
        for ids in tokens:
            check_token_ids(ids, self.vocab_size, self.library)
        return tokens

    def list_tokens_without_row(self) -> dict[int, str]:
        """Returns {id: token} for the ids from vocab_size on."""
        return _list_tokens_from(self.vocab_size, self.library)

    def decode(self, ids: Iterable[int]) -> str:
        text_ids = [int(i) for i in ids if i not in (self.bos_id, self.eos_id)]
        return self.library.decode(text_ids, skip_special_tokens=False)

    def save(self, folder: str | Path) -> None:
        ids = {'vocab_size': self.vocab_size, 'bos_id': self.bos_id, 'eos_id': self.eos_id}
        Path(folder).mkdir(parents=True, exist_ok=True)
        with replace_file(Path(folder) / LIBRARY_FILE) as temporary:
            self.library.save(str(temporary))
        library = file_digest(Path(folder) / LIBRARY_FILE)
        _write_tokenizer_file(
            folder, kind='subword', **ids, cuttable=self.cuttable, library=library
        )
        write_files_beside(Path(folder), self.beside)


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """A tokenizer for texts of token ids, as decimals between spaces, if the model's own is not
    here. beside: as of `SubwordTokenizer`.
    """

    vocab_size: int
    bos_id: int
    eos_id: int
    beside: Mapping[str, bytes] = dataclasses.field(default_factory=dict, compare=False, repr=False)
    cuttable: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        return f'ids:{self.vocab_size},{self.bos_id},{self.eos_id}'

    def encode(self, text: str | bytes) -> list[int]:
        """Returns the ids. Raises ValueError for a word that is no id below the vocabulary size."""
        words = (text if isinstance(text, str) else bytes(text).decode('utf-8', 'replace')).split()
        for word in words:
            if not (word.isdecimal() and int(word) < self.vocab_size):
                raise ValueError(
                    f'data.tokenizer={self.spec} reads token ids below {self.vocab_size}; got '
                    f'{word[:40]!r}'
                )
        return [int(word) for word in words]

    def split(self, texts: Iterable[str], name: str) -> Iterator[str]:
        """Yields the whole text, because a part could end within an id."""
        yield ''.join(texts)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self.encode(text), np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return ' '.join(str(int(i)) for i in ids if i not in (self.bos_id, self.eos_id))

    def save(self, folder: str | Path) -> None:
        ids = {'vocab_size': self.vocab_size, 'bos_id': self.bos_id, 'eos_id': self.eos_id}
        _write_tokenizer_file(folder, kind='ids', **ids)
        write_files_beside(Path(folder), self.beside)


Tokenizer = ByteTokenizer | SubwordTokenizer | TokenIds


def check_token_ids(ids: Sequence[int] | np.ndarray, size: int, library: Any) -> None:
    """Raises ValueError, with the token, if an id has no row in the embedding of a model.

    Without it, an array on an accelerator would give some other row.

    Args:
      ids: that a text was encoded to.
      size: rows of the embedding.
      library: the tokenizer of the `tokenizers` library, which spells the token.
    """
    largest = int(np.max(ids, initial=0))
    if largest >= size:
        raise ValueError(
            f'the text has the token {library.id_to_token(largest)!r}, id {largest}, but the model '
            f'has {size} embeddings. Remove it from the text.'
        )


def _list_tokens_from(first: int, library: Any) -> dict[int, str]:
    tokens = {i: token for token, i in library.get_vocab(with_added_tokens=True).items()}
    return {i: tokens[i] for i in sorted(tokens) if i >= first}


def split_text(texts: Iterable[str], name: str) -> Iterator[str]:
    """Yields the joined `texts` of a document in parts of about PART characters, cut at CUT.

    Raises ValueError, with the document's `name`, if LONGEST_UNCUT characters have no place to cut.
    """
    pending, searched = '', 0
    for text in texts:
        pending += text
        start = 0
        while match := CUT.search(pending, max(start + PART, searched)):
            yield pending[start : match.end()]
            start = match.end()
        pending = pending[start:]
        searched = max(len(pending) - 1, 0)  # the last character waits for what follows it
        if len(pending) > LONGEST_UNCUT:
            raise ValueError(
                f'{name or "a document"} has {LONGEST_UNCUT:,} characters without a space or line '
                'end, which byte-pair encoding would treat as one word. Leave it out, or set '
                'data.tokenizer=byte.'
            )
    yield pending


def _write_tokenizer_file(folder: str | Path, **fields: Any) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    write_text(Path(folder) / TOKENIZER_FILE, format_json(seal_record(fields)))


def load(folder: str | Path) -> Tokenizer:
    """Loads a folder that `save` wrote.

    Raises ValueError if it holds no tokenizer of this program, or one that was changed.
    """
    folder = Path(folder)
    tokenizer_file, library = folder / TOKENIZER_FILE, folder / LIBRARY_FILE
    if not tokenizer_file.is_file():
        raise ValueError(f'{folder} has no tokenizer: {TOKENIZER_FILE} is missing.')
    match read_json(tokenizer_file):
        case {'kind': 'byte'}:
            return ByteTokenizer()
        case {'kind': 'ids', 'vocab_size': int(size), 'bos_id': int(bos), 'eos_id': int(eos)} if (
            0 <= min(bos, eos) <= max(bos, eos) < size
        ):
            return TokenIds(size, bos, eos, read_files_beside(folder))
        case {
            'kind': 'subword',
            'vocab_size': int(size),
            'bos_id': int(bos),
            'eos_id': int(eos),
            'cuttable': bool(cuttable),
            **optional,
        } if 0 <= min(bos, eos) <= max(bos, eos) < size:
            loaded = _load_library(library).library
            if 'library' in optional and optional['library'] != file_digest(library):
                raise ValueError(f'{library} was changed or damaged after it was written.')
            beside = read_files_beside(folder)
            return SubwordTokenizer(loaded, size, bos, eos, cuttable, beside)
    raise ValueError(
        f'{tokenizer_file} does not describe a tokenizer: a field is missing or has another type.'
    )


def load_for_model(folder: Path, size: int, bos: int | None, eos: int | None) -> SubwordTokenizer:
    """Returns the tokenizer of a folder for a model.

    BOS and EOS are the tokens that the files beside it name, or else `bos` and `eos`. If one is
    missing, the other stands for both; if both are, the last row does. Tokens that were added to
    the vocabulary may be without a row (`SubwordTokenizer.list_tokens_without_row`).

    Args:
      folder: holds a vocabulary (`lm.data.vocabularies`).
      size: rows of the model's embedding; may exceed the number of ids.
      bos: the model's token that begins a document, if known.
      eos: the model's token that ends a document, if known.

    Returns:
      The tokenizer.

    Raises:
      ValueError: if there is none, and if the id of BOS, of EOS, or of a token that was not added,
        is not below `size`.
    """
    if (path := find_vocabulary(folder)) is None:
        raise ValueError(f'{folder} has no vocabulary')
    vocabulary = _load_library(path)
    library = vocabulary.library
    vocab = library.get_vocab(with_added_tokens=True)
    # Tokens are added behind a vocabulary. If that itself has more ids, it is another model's.
    without_row = _list_tokens_from(size, library)
    if learned := without_row.keys() - library.get_added_tokens_decoder().keys():
        raise ValueError(f'{path} has the id {max(learned)}, but the model has {size} embeddings')
    special_ids = {
        'bos_token': vocab.get(read_special_token(folder, 'bos_token')),
        'eos_token': vocab.get(read_special_token(folder, 'eos_token')),
    }
    for name, token in special_ids.items():
        if token in without_row:
            raise ValueError(
                f'the {name} of {folder} is {without_row[token]!r}, id {token}, but the model has '
                f'{size} embeddings. Choose a token that has one.'
            )
    bos = bos if special_ids['bos_token'] is None else special_ids['bos_token']
    eos = eos if special_ids['eos_token'] is None else special_ids['eos_token']
    bos = vocab.get(vocabulary.bos) if bos is None else bos
    eos = vocab.get(vocabulary.eos) if eos is None else eos
    eos = (size - 1 if bos is None else bos) if eos is None else eos
    beside = read_files_beside(folder)
    return SubwordTokenizer(library, size, eos if bos is None else bos, eos, False, beside)


def _load_library(path: Path) -> Vocabulary:
    """Returns a vocabulary that encodes whole texts, and special tokens in them as text."""
    vocabulary = read_vocabulary(path)
    vocabulary.library.no_truncation()
    vocabulary.library.no_padding()
    vocabulary.library.encode_special_tokens = True  # their spelling is text like any other
    return vocabulary


@dataclasses.dataclass(frozen=True)
class TokenizerPlan:
    """A tokenizer whose corpus is not known yet.

    Attributes:
      vocab_size: all ids are below it.
      identity: determines the tokenizer, together with the corpus if it is trained.
      build: makes the tokenizer from the texts of the training split, or parts of `split_text`.
      is_trained: whether `build` reads the texts.
      beside: the files that belong to the tokenizer. `build` leaves them out, since prepared data
        do not depend on them.
    """

    vocab_size: int
    identity: bytes
    build: Callable[[Iterable[str]], Tokenizer]
    is_trained: bool = False
    beside: Mapping[str, bytes] = dataclasses.field(default_factory=dict)

    def add_files(self, tokenizer: Tokenizer) -> Tokenizer:
        """Returns the tokenizer of this plan together with the files that belong to it."""
        if isinstance(tokenizer, ByteTokenizer):
            return tokenizer
        return dataclasses.replace(tokenizer, beside=self.beside)


def plan_tokenizer(spec: str) -> TokenizerPlan:
    """Returns the plan of `byte`, `bpe:SIZE` or `hf:PATH`. Raises ValueError for anything else."""
    kind, _, argument = spec.partition(':')
    if kind not in TOKENIZERS and Path(expand_home(spec)).exists():
        raise ValueError(
            f'data.tokenizer must begin with its kind, one of {", ".join(sorted(TOKENIZERS))}; got '
            f'the path {spec!r}. To read the vocabulary there, set data.tokenizer=hf:{spec}.'
        )
    try:
        make_plan = choose(TOKENIZERS, kind, 'data.tokenizer')
    except ValueError as error:
        raise ValueError(
            f'{error} Nothing is downloaded: bpe:4096 is trained on the text, and hf:PATH is a '
            f'{LIBRARY_FILE} or another vocabulary on this machine, or its folder.'
        ) from None
    return make_plan(argument)


def vocab_size(spec: str) -> int:
    """Returns V of a model with `data.tokenizer=spec`: all ids are below it, for any corpus."""
    return plan_tokenizer(spec).vocab_size


def _plan_byte(argument: str) -> TokenizerPlan:
    if argument:
        raise ValueError(f"data.tokenizer 'byte' takes no argument; got 'byte:{argument}'.")
    return TokenizerPlan(ByteTokenizer.vocab_size, b'byte', lambda texts: ByteTokenizer())


def _plan_bpe(argument: str) -> TokenizerPlan:
    min_size = BYTES + SPECIALS
    if not argument.isdecimal() or int(argument) < min_size:
        raise ValueError(
            f"data.tokenizer 'bpe' needs a size of at least {min_size} (every byte, BOS and EOS), "
            f"such as bpe:4096; got 'bpe:{argument}'."
        )
    size = int(argument)
    return TokenizerPlan(
        size, b'bpe:%d' % size, functools.partial(_train_bpe, size), is_trained=True
    )


def _train_bpe(size: int, texts: Iterable[str]) -> SubwordTokenizer:
    """Trains a byte-level BPE (arXiv:1508.07909, GPT-2's variant), which is lossless on any
    text.
    """
    import tokenizers as library

    byte_level = library.pre_tokenizers.ByteLevel
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size - SPECIALS, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    _run_interruptibly(lambda stoppable: bpe.train_from_iterator(stoppable, trainer), texts)
    # A tiny corpus has too few pairs to fill the vocabulary: the ids before BOS stay unused.
    return SubwordTokenizer(bpe, size, bos_id=size - 2, eos_id=size - 1, cuttable=True)


def _run_interruptibly(train: Callable[[Iterable[str]], None], texts: Iterable[str]) -> None:
    """Calls `train(texts)` in a thread, so that Ctrl-C takes effect at once.

    The library returns to Python only when it is done. After an interrupt it stops at the next
    text; once it has read all texts, it finishes its merges in the background.
    """
    stopped, done, failed = threading.Event(), threading.Event(), []

    def stoppable_texts() -> Iterator[str]:
        try:
            for text in texts:
                if stopped.is_set():
                    raise InterruptedError
                yield text
        except Exception as error:  # the library may turn it into another one
            failed.append(error)
            raise

    def run_training() -> None:
        try:
            train(stoppable_texts())
        except Exception as error:
            failed.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=run_training, daemon=True).start()
        while not done.wait(POLL_SEC):  # a signal that another thread has taken wakes nobody
            pass
    finally:
        stopped.set()
        done.wait(STOP_SEC)
    if failed:
        raise failed[0]


def find_library_file(spec: str) -> Path | None:
    """Returns the path that data.tokenizer=hf:PATH means, or None for another kind."""
    kind, _, argument = spec.partition(':')
    path = Path(expand_home(argument))
    return None if kind != 'hf' else path / LIBRARY_FILE if path.is_dir() else path


def _plan_hf(argument: str) -> TokenizerPlan:
    path = Path(expand_home(argument))
    folder = path if path.is_dir() else path.parent
    is_saved = path in (folder, folder / LIBRARY_FILE) and (folder / TOKENIZER_FILE).is_file()
    if argument and is_saved:
        return _plan_saved(folder)
    vocabulary_path = find_vocabulary(path) if path.is_dir() else path
    if not argument or vocabulary_path is None or not vocabulary_path.is_file():
        raise ValueError(
            f"data.tokenizer 'hf' needs the path of a {LIBRARY_FILE}, of a vocabulary of "
            'SentencePiece, tiktoken, tekken or GPT-2, or of a folder with one; got '
            f"'hf:{argument}', but "
            + (f'{path} has none, or several.' if path.is_dir() else f'{path} is not a file.')
            + ' Nothing is downloaded.'
        )
    vocabulary = _load_library(vocabulary_path)
    library = vocabulary.library
    vocab = library.get_vocab(with_added_tokens=True)
    size = max(vocab.values()) + 1
    bos, eos = (
        vocab.get(read_special_token(folder, name) or default)
        for name, default in (('bos_token', vocabulary.bos), ('eos_token', vocabulary.eos))
    )
    if eos is None:
        eos, size = size, size + 1
    # If one token is both, as in GPT-2, BOS becomes a new one: a model that is to end documents
    # needs EOS as a target, and BOS never is one.
    if bos is None or bos == eos:
        bos, size = size, size + 1
    built = SubwordTokenizer(library, size, bos, eos, cuttable=False)
    is_converted = vocabulary_path.name != LIBRARY_FILE
    content = library.to_str().encode() if is_converted else vocabulary_path.read_bytes()
    identity = b'hf %d %d ' % (bos, eos) + content
    return TokenizerPlan(size, identity, lambda texts: built, beside=read_files_beside(folder))


def _plan_saved(folder: Path) -> TokenizerPlan:
    """Returns the plan of a folder that `save` wrote."""
    saved = load(folder)
    if isinstance(saved, ByteTokenizer):
        return _plan_byte('')
    files = (folder / name for name in (TOKENIZER_FILE, LIBRARY_FILE))
    identity = b'saved ' + b''.join(file.read_bytes() for file in files if file.is_file())
    built = dataclasses.replace(saved, beside={})
    return TokenizerPlan(saved.vocab_size, identity, lambda texts: built, beside=saved.beside)


def _plan_ids(argument: str) -> TokenizerPlan:
    numbers = argument.split(',')
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            "data.tokenizer 'ids' needs the size of the vocabulary and the ids that begin and end "
            f"a document, such as ids:50257,50256,50256; got 'ids:{argument}'."
        )
    size, bos, eos = map(int, numbers)
    if not max(bos, eos) < size:
        raise ValueError(f"data.tokenizer 'ids:{argument}': ids must be below {size}.")
    tokenizer = TokenIds(size, bos, eos)
    return TokenizerPlan(size, tokenizer.spec.encode(), lambda texts: tokenizer)


TOKENIZERS = {'byte': _plan_byte, 'bpe': _plan_bpe, 'hf': _plan_hf, 'ids': _plan_ids}
