"""Text to token ids and back: bytes, a byte-pair encoding trained on the corpus, or one of a file.

A document is BOS + tokens + EOS. BOS and EOS are ids only: they have no spelling in text, so
nothing in a document can be taken for them.
"""

import dataclasses
import functools
import re
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np

from lm.data.cache import file_digest
from lm.storage.files import json_text, open_regular, read_json, sealed
from modules.choices import choose

BYTES = 256
SPECIALS = 2  # BOS and EOS
PART = 1 << 16  # characters: longer texts are cut for the sake of parallelism and memory
# The pattern of GPT-2's byte-pair encoding always cuts here, so parts encode as the whole does: no
# token goes on from a letter to a space or a sign. After a space, or between a sign and a letter,
# it does not always cut.
CUT = re.compile(r'\S(?=[ \t\r\n])|[A-Za-z0-9](?=[!-/:-@\[-`{-~])')
# Characters without a place to cut: encoding them at once takes 100 bytes of memory for each.
LONGEST_UNCUT = 1 << 22

POLL_SEC = 0.1
STOP_SEC = 1  # how long an interrupted training is waited for
LIBRARY_FILE, OWN_FILE = 'tokenizer.json', 'evenkeel_tokenizer.json'


@dataclasses.dataclass(frozen=True)
class ByteTokenizer:
    """A token is a byte of the UTF-8 text. cuttable: a document may be encoded in parts."""

    vocab_size: int = BYTES + SPECIALS
    bos_id: int = BYTES
    eos_id: int = BYTES + 1
    cuttable: ClassVar[bool] = True

    def encode(self, text: str | bytes) -> list[int]:
        return list(text.encode() if isinstance(text, str) else text)

    def parts(self, texts: Iterable[str], name: str) -> Iterator[str]:
        """Yields the texts as they are: every character is encoded alone."""
        yield from texts

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.frombuffer(text.encode(), np.uint8) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return bytes(int(i) for i in ids if i < BYTES).decode('utf-8', 'replace')

    def save(self, folder: str | Path) -> None:
        _write_own(folder, kind='byte')


@dataclasses.dataclass(frozen=True)
class SubwordTokenizer:
    """A tokenizer of the `tokenizers` library, which does not see BOS and EOS."""

    library: Any
    vocab_size: int
    bos_id: int
    eos_id: int
    cuttable: bool

    def encode(self, text: str | bytes) -> list[int]:
        text = text if isinstance(text, str) else bytes(text).decode('utf-8', 'replace')
        return np.concatenate(self.encode_batch(list(self.parts([text], 'the text')))).tolist()

    def parts(self, texts: Iterable[str], name: str) -> Iterator[str]:
        """Yields parts of the joined `texts` whose tokens are those of the whole; one if uncut."""
        yield from cut(texts, name) if self.cuttable else [''.join(texts)]

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        encoded = self.library.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(one.ids, np.int32) for one in encoded]

    def decode(self, ids: Iterable[int]) -> str:
        kept = [int(i) for i in ids if i not in (self.bos_id, self.eos_id)]
        return self.library.decode(kept, skip_special_tokens=False)

    def save(self, folder: str | Path) -> None:
        ids = {'vocab_size': self.vocab_size, 'bos_id': self.bos_id, 'eos_id': self.eos_id}
        Path(folder).mkdir(parents=True, exist_ok=True)
        self.library.save(str(Path(folder) / LIBRARY_FILE))
        library = file_digest(Path(folder) / LIBRARY_FILE)
        _write_own(folder, kind='subword', **ids, cuttable=self.cuttable, library=library)


@dataclasses.dataclass(frozen=True)
class TokenIds:
    """Texts are token ids, as decimals between spaces: for a model whose tokenizer is not here."""

    vocab_size: int
    bos_id: int
    eos_id: int
    cuttable: ClassVar[bool] = False

    @property
    def spec(self) -> str:
        return f'ids:{self.vocab_size},{self.bos_id},{self.eos_id}'

    def encode(self, text: str | bytes) -> list[int]:
        """Returns the ids. Raises ValueError for a word that is none of this vocabulary."""
        words = (text if isinstance(text, str) else bytes(text).decode('utf-8', 'replace')).split()
        for word in words:
            if not (word.isdecimal() and int(word) < self.vocab_size):
                raise ValueError(
                    f'data.tokenizer={self.spec} reads token ids below {self.vocab_size}; got '
                    f'{word[:40]!r}'
                )
        return [int(word) for word in words]

    def parts(self, texts: Iterable[str], name: str) -> Iterator[str]:
        """Yields the text whole: a part could end within an id."""
        yield ''.join(texts)

    def encode_batch(self, texts: Sequence[str]) -> list[np.ndarray]:
        return [np.array(self.encode(text), np.int32) for text in texts]

    def decode(self, ids: Iterable[int]) -> str:
        return ' '.join(str(int(i)) for i in ids if i not in (self.bos_id, self.eos_id))

    def save(self, folder: str | Path) -> None:
        _write_own(folder, kind='ids', **dataclasses.asdict(self))


Tokenizer = ByteTokenizer | SubwordTokenizer | TokenIds


def cut(texts: Iterable[str], name: str) -> Iterator[str]:
    """Yields the joined `texts` of a document in parts of about PART characters, cut at CUT.

    Raises ValueError, with the document's `name`, if LONGEST_UNCUT characters hold no such place.
    """
    waiting, searched = '', 0
    for text in texts:
        waiting += text
        start = 0
        while match := CUT.search(waiting, max(start + PART, searched)):
            yield waiting[start : match.end()]
            start = match.end()
        waiting = waiting[start:]
        searched = max(len(waiting) - 1, 0)  # the last character waits for what follows it
        if len(waiting) > LONGEST_UNCUT:
            raise ValueError(
                f'{name or "a document"} holds {LONGEST_UNCUT:,} characters without a space or a '
                'line end: a byte-pair encoding takes them for one word. Leave it out, or set '
                'data.tokenizer=byte.'
            )
    yield waiting


def _write_own(folder: str | Path, **fields: Any) -> None:
    Path(folder).mkdir(parents=True, exist_ok=True)
    (Path(folder) / OWN_FILE).write_text(json_text(sealed(fields)), encoding='utf-8')


def load(folder: str | Path) -> Tokenizer:
    """Loads what `save` wrote. Raises ValueError if the folder holds no tokenizer of ours, or one
    that was changed since.
    """
    folder = Path(folder)
    own, library = folder / OWN_FILE, folder / LIBRARY_FILE
    if not own.is_file():
        raise ValueError(f'{folder} holds no tokenizer: there is no {OWN_FILE}.')
    match read_json(own):
        case {'kind': 'byte'}:
            return ByteTokenizer()
        case {'kind': 'ids', 'vocab_size': int(size), 'bos_id': int(bos), 'eos_id': int(eos)} if (
            0 <= min(bos, eos) <= max(bos, eos) < size
        ):
            return TokenIds(size, bos, eos)
        case {
            'kind': 'subword',
            'vocab_size': int(size),
            'bos_id': int(bos),
            'eos_id': int(eos),
            'cuttable': bool(cuttable),
            **more,
        } if 0 <= min(bos, eos) <= max(bos, eos) < size:
            loaded = _library(library)
            if 'library' in more and more['library'] != file_digest(library):
                raise ValueError(f'{library} was changed, or damaged, since it was written.')
            return SubwordTokenizer(loaded, size, bos, eos, cuttable)
    raise ValueError(f'{own} describes no tokenizer: it lacks a field, or one is of another type.')


def of_model(folder: Path, size: int, bos: int | None, eos: int | None) -> SubwordTokenizer:
    """Returns the tokenizer.json of a folder for a model with `size` rows of embeddings.

    These may be more than it has ids, but not fewer: a ValueError. BOS and EOS are those that the
    files beside it name, or else `bos` and `eos`; one that there is not is the other one, and where
    there is neither they are the last row.
    """
    library = _library(folder / LIBRARY_FILE)
    vocab = library.get_vocab(with_added_tokens=True)
    if (largest := max(vocab.values(), default=0)) >= size:
        raise ValueError(
            f'{folder / LIBRARY_FILE} has the id {largest}, and the model {size} embeddings'
        )
    named = {name: vocab.get(_declared(folder, name)) for name in ('bos_token', 'eos_token')}
    bos = bos if named['bos_token'] is None else named['bos_token']
    eos = eos if named['eos_token'] is None else named['eos_token']
    eos = (size - 1 if bos is None else bos) if eos is None else eos
    return SubwordTokenizer(library, size, eos if bos is None else bos, eos, cuttable=False)


def _library(path: Path) -> Any:
    import tokenizers as library

    try:
        with open_regular(path) as file:
            loaded = library.Tokenizer.from_buffer(file.read())
    except Exception as error:  # the library raises Exception itself
        raise ValueError(f'{path} is not a tokenizer.json of `tokenizers`: {error}.') from error
    loaded.no_truncation()
    loaded.no_padding()
    loaded.encode_special_tokens = True  # their spelling in a document is text like any other
    return loaded


@dataclasses.dataclass(frozen=True)
class Plan:
    """A tokenizer before there is a corpus."""

    vocab_size: int
    identity: bytes  # all that determines it, besides the corpus if it is trained
    build: Callable[[Iterable[str]], Tokenizer]  # given the training split's texts, or `cut` parts
    is_trained: bool = False


def plan(spec: str) -> Plan:
    """Returns the plan of `byte`, `bpe:SIZE` or `hf:PATH`. Raises ValueError for anything else."""
    kind, _, argument = spec.partition(':')
    if kind not in TOKENIZERS and Path(spec).expanduser().exists():
        raise ValueError(
            f'data.tokenizer must begin with its kind, one of {", ".join(sorted(TOKENIZERS))}; got '
            f'the path {spec!r}. To read the {LIBRARY_FILE} there, set data.tokenizer=hf:{spec}.'
        )
    try:
        make = choose(TOKENIZERS, kind, 'data.tokenizer')
    except ValueError as error:
        raise ValueError(
            f'{error} Nothing is downloaded: bpe:4096 is trained on the text, and hf:PATH is a '
            f'{LIBRARY_FILE} on this machine, or its folder.'
        ) from None
    return make(argument)


def vocab_size(spec: str) -> int:
    """Returns V of a model for `data.tokenizer=spec`: all ids are below it, whatever the corpus."""
    return plan(spec).vocab_size


def _byte(argument: str) -> Plan:
    if argument:
        raise ValueError(f"data.tokenizer 'byte' takes no argument; got 'byte:{argument}'.")
    return Plan(ByteTokenizer.vocab_size, b'byte', lambda texts: ByteTokenizer())


def _bpe(argument: str) -> Plan:
    least = BYTES + SPECIALS
    if not argument.isdecimal() or int(argument) < least:
        raise ValueError(
            f"data.tokenizer 'bpe' needs a size of at least {least} (every byte, BOS and EOS), "
            f"such as bpe:4096; got 'bpe:{argument}'."
        )
    size = int(argument)
    return Plan(size, b'bpe:%d' % size, functools.partial(_train_bpe, size), is_trained=True)


def _train_bpe(size: int, texts: Iterable[str]) -> SubwordTokenizer:
    """Byte-level byte-pair encoding (arXiv:1508.07909, GPT-2's variant): lossless on any text."""
    import tokenizers as library

    byte_level = library.pre_tokenizers.ByteLevel
    bpe = library.Tokenizer(library.models.BPE())
    bpe.pre_tokenizer = byte_level(add_prefix_space=False)
    bpe.decoder = library.decoders.ByteLevel()
    trainer = library.trainers.BpeTrainer(
        vocab_size=size - SPECIALS, initial_alphabet=byte_level.alphabet(), show_progress=False
    )
    _interruptible(lambda fed: bpe.train_from_iterator(fed, trainer), texts)
    # A tiny corpus has too few pairs to fill the vocabulary: the ids before BOS stay unused.
    return SubwordTokenizer(bpe, size, bos_id=size - 2, eos_id=size - 1, cuttable=True)


def _interruptible(train: Callable[[Iterable[str]], None], texts: Iterable[str]) -> None:
    """Calls `train(texts)` in a thread of its own, so that Ctrl-C takes effect at once.

    The library returns to Python only when it is done. After an interrupt it ends with the next
    text or, once it has them all, with its merges, which nobody waits for.
    """
    stopped, done, failed = threading.Event(), threading.Event(), []

    def until_stopped() -> Iterator[str]:
        try:
            for text in texts:
                if stopped.is_set():
                    raise InterruptedError
                yield text
        except Exception as error:  # the library may turn it into another one
            failed.append(error)
            raise

    def work() -> None:
        try:
            train(until_stopped())
        except Exception as error:
            failed.append(error)
        finally:
            done.set()

    try:
        threading.Thread(target=work, daemon=True).start()
        while not done.wait(POLL_SEC):  # a signal that another thread has taken wakes nobody
            pass
    finally:
        stopped.set()
        done.wait(STOP_SEC)
    if failed:
        raise failed[0]


def _hf(argument: str) -> Plan:
    path = Path(argument).expanduser()
    path = path / LIBRARY_FILE if path.is_dir() else path
    if not argument or not path.is_file():
        raise ValueError(
            f"data.tokenizer 'hf' needs the path of a {LIBRARY_FILE}, or of a folder with one; "
            f"got 'hf:{argument}', and {path} is not a file. Nothing is downloaded."
        )
    if path.name == LIBRARY_FILE and (own := path.with_name(OWN_FILE)).is_file():
        saved = load(path.parent)
        identity = b'saved ' + own.read_bytes() + path.read_bytes()
        return Plan(saved.vocab_size, identity, lambda texts: saved)
    library = _library(path)
    vocab = library.get_vocab(with_added_tokens=True)
    size = max(vocab.values()) + 1
    bos, eos = (vocab.get(_declared(path.parent, name)) for name in ('bos_token', 'eos_token'))
    if eos is None:
        eos, size = size, size + 1
    # If one token is both, as in GPT-2, BOS becomes a new one: a model that is to end documents
    # needs EOS as a target, and BOS never is one.
    if bos is None or bos == eos:
        bos, size = size, size + 1
    built = SubwordTokenizer(library, size, bos, eos, cuttable=False)
    identity = b'hf %d %d ' % (bos, eos) + path.read_bytes()
    return Plan(size, identity, lambda texts: built)


def _declared(folder: Path, name: str) -> str | None:
    """Returns the spelling of `bos_token` or `eos_token` in the files beside a tokenizer.json."""
    for file in ('tokenizer_config.json', 'special_tokens_map.json'):
        if (folder / file).is_file():
            token = read_json(folder / file).get(name)
            token = token.get('content') if isinstance(token, dict) else token
            if isinstance(token, str):
                return token
    return None


def _ids(argument: str) -> Plan:
    numbers = argument.split(',')
    if len(numbers) != 3 or not all(number.isdecimal() for number in numbers):
        raise ValueError(
            "data.tokenizer 'ids' needs the size of the vocabulary and the ids that begin and end "
            f"a document, such as ids:50257,50256,50256; got 'ids:{argument}'."
        )
    size, bos, eos = map(int, numbers)
    if not max(bos, eos) < size:
        raise ValueError(f"data.tokenizer 'ids:{argument}': ids must be below {size}.")
    found = TokenIds(size, bos, eos)
    return Plan(size, found.spec.encode(), lambda texts: found)


TOKENIZERS = {'byte': _byte, 'bpe': _bpe, 'hf': _hf, 'ids': _ids}
