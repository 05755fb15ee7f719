"""Finds the vocabulary in a folder or file, and reads those of other libraries.

A tokenizer.json is read as it is. SentencePiece's models, tiktoken's and tekken's ranks, and
GPT-2's vocab.json with merges.txt become a tokenizer of the library `tokenizers` with the same ids.
Where that is not possible, the error says why, and the command that makes a tokenizer.json.
"""

import functools
import shlex
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from lm.data.byte_ranks import QWEN_PATTERN, Vocabulary, is_rank_file, read_tekken, read_tiktoken
from lm.data.sentencepiece_model import parse_model, read_sentencepiece
from lm.data.tokenizer_files import (
    ADDED_FILE,
    CONFIG_FILE,
    LIBRARY_FILE,
    SPECIAL_TOKENS,
    SPECIALS_FILE,
    special_token_text,
)
from lm.storage.files import UnreadableFile, first_line, open_regular, read_json

TEKKEN_FILE, PIECES_FILE, GPT2_FILE, MERGES_FILE = (
    'tekken.json',
    'tokenizer.model',
    'vocab.json',
    'merges.txt',
)
PATTERNS = ('*.tiktoken', '*.model', '*.model.v*')  # names that programs give to vocabularies
MAX_IDS = 1 << 22  # the largest vocabularies in use have a million
MAX_BYTES = 1 << 28  # a tokenizer.json with a vocabulary of 262,000 has 33 MB
# Classes of transformers, and types of models, whose vocab.json is cut into words as GPT-2's.
GPT2_CLASSES = ('GPT2', 'Roberta', 'Bart', 'Longformer', 'LED', 'CodeGen', 'Whisper')
GPT2_TYPES = ('gpt2', 'roberta', 'bart', 'longformer', 'led', 'codegen', 'gptj', 'gpt_neo', 'opt')
QWEN_CLASSES, QWEN_TYPES = ('Qwen2',), ('qwen2', 'qwen3', 'qwen2_moe', 'qwen3_moe')
# What changes the tokenizer that is made of a vocabulary.
FILES_READ = (CONFIG_FILE, SPECIALS_FILE, ADDED_FILE, MERGES_FILE, 'config.json')
# With this release the ids are those of the vocabulary's own library.
CONVERTER = ('transformers==5.24.0', 'sentencepiece', 'protobuf', 'tiktoken')


def find_vocabulary(folder: Path) -> Path | None:
    """Returns the file with a folder's vocabulary, a tokenizer.json before all others."""
    for name in (LIBRARY_FILE, TEKKEN_FILE, PIECES_FILE):
        if (folder / name).is_file():
            return folder / name
    for pattern in PATTERNS:
        if paths := [path for path in sorted(folder.glob(pattern)) if path.is_file()]:
            return paths[0] if len(paths) == 1 else None
    return folder / GPT2_FILE if (folder / GPT2_FILE).is_file() else None


def read_vocabulary(path: Path) -> Vocabulary:
    """Returns the vocabulary in a file, whatever library it is of.

    Raises:
      ValueError: for a file that is none, or that `tokenizers` cannot follow.
    """
    if path.name == LIBRARY_FILE:
        return _convert_file(path, _read_content(path))
    # A config is checked, sized and opened: a conversion of 200,000 ranks takes seconds each time.
    beside = (path.parent / name for name in FILES_READ)
    contents = tuple(_read_content(file) for file in beside if file.is_file())
    return _convert_with_tokens(path, _read_content(path), contents)


def _read_content(path: Path) -> bytes:
    with open_regular(path) as file:
        content = file.read(MAX_BYTES + 1)
    if len(content) > MAX_BYTES:
        raise UnreadableFile(f'{path} has more than {MAX_BYTES:,} bytes')
    return content


@functools.lru_cache(maxsize=2)
def _convert_with_tokens(path: Path, content: bytes, contents: tuple[bytes, ...]) -> Vocabulary:
    """Returns a vocabulary with the tokens that the files beside it, of these `contents`, list."""
    vocabulary = _convert_file(path, content)
    add_listed_tokens(vocabulary.library, path.parent)
    return vocabulary


def _convert_file(path: Path, content: bytes) -> Vocabulary:
    kind, reader = _select_reader(path, content)
    try:
        vocabulary = reader()
        check_ids(vocabulary.library)
        return vocabulary
    except Exception as error:  # the library raises Exception itself
        advice = describe_conversion(path)
        raise ValueError(
            f'{path} is not {kind} that can be read: {first_line(error)}. {advice}'.rstrip()
        ) from error


def check_ids(library: Any) -> None:
    """Raises ValueError for an id from MAX_IDS on: a model has a row for each id below the largest,
    and the library lists each that is missing when it writes a vocabulary.
    """
    ids = library.get_vocab(with_added_tokens=True).values()
    if (largest := max(ids, default=0)) >= MAX_IDS:
        raise ValueError(f'its ids must be below {MAX_IDS:,}; got {largest:,}')


def _select_reader(path: Path, content: bytes) -> tuple[str, Callable[[], Vocabulary]]:
    """Returns (the kind of a file, a function that reads it)."""
    if path.name in (GPT2_FILE, MERGES_FILE):
        return 'a vocabulary like that of GPT-2', lambda: read_gpt2(path.parent)
    if path.name == TEKKEN_FILE or (path.suffix == '.json' and b'"token_bytes"' in content[:65536]):
        return 'a vocabulary of tekken', lambda: read_tekken(content)
    if content.lstrip()[:1] == b'{':
        return 'a tokenizer.json of `tokenizers`', lambda: _read_library_file(content)
    if is_rank_file(content):
        return 'ranks of tiktoken', lambda: read_tiktoken(content)
    if path.suffix == '.json':
        return 'a tokenizer.json of `tokenizers`', lambda: _read_library_file(content)
    return 'a model of SentencePiece', lambda: read_sentencepiece(content)


def _read_library_file(content: bytes) -> Vocabulary:
    import tokenizers

    return Vocabulary(tokenizers.Tokenizer.from_buffer(content))


def read_gpt2(folder: Path) -> Vocabulary:
    """Returns the tokenizer of a vocab.json and a merges.txt that GPT-2's program could read.

    Raises:
      ValueError: for another program's, by the class or model type that the folder names.
    """
    import tokenizers as library

    config, model = (_read_if_there(folder / name) for name in (CONFIG_FILE, 'config.json'))
    class_name = str(config.get('tokenizer_class') or '').removesuffix('Fast')
    class_name, model_type = class_name.removesuffix('Tokenizer'), model.get('model_type')
    is_qwen = class_name in QWEN_CLASSES or (not class_name and model_type in QWEN_TYPES)
    is_gpt2 = class_name in GPT2_CLASSES or (not class_name and model_type in (*GPT2_TYPES, None))
    if not (is_gpt2 or is_qwen):
        raise ValueError(f'{class_name or model_type} cuts text differently from GPT-2')
    if not (folder / MERGES_FILE).is_file():
        raise ValueError(f'there is no {MERGES_FILE} beside it')
    bpe = library.models.BPE.from_file(str(folder / GPT2_FILE), str(folder / MERGES_FILE))
    byte_level = library.pre_tokenizers.ByteLevel
    tokenizer = library.Tokenizer(bpe)
    if missing := [c for c in byte_level.alphabet() if tokenizer.token_to_id(c) is None]:
        raise ValueError(f'it has no token for the byte that is written as {missing[0]!r}')
    if is_qwen:
        tokenizer.normalizer = library.normalizers.NFC()
        tokenizer.pre_tokenizer = library.pre_tokenizers.Sequence(
            [
                library.pre_tokenizers.Split(library.Regex(QWEN_PATTERN), 'isolated'),
                byte_level(add_prefix_space=False, use_regex=False),
            ]
        )
    else:
        tokenizer.pre_tokenizer = byte_level(config.get('add_prefix_space') is True)
    tokenizer.decoder = library.decoders.ByteLevel()
    # The classes of these programs have them without any file.
    defaults = ('<|endoftext|>',) if tokenizer.token_to_id('<s>') is None else ('<s>', '</s>')
    present = [text for text in defaults if tokenizer.token_to_id(text) is not None]
    tokenizer.add_special_tokens(present)
    return Vocabulary(tokenizer, *([present[0], present[-1]] if present else []))


def add_listed_tokens(library: Any, folder: Path) -> None:
    """Adds the tokens that the files beside a vocabulary list, at their ids.

    Raises:
      ValueError: if an id is taken, or leaves a gap.
    """
    import tokenizers

    for token_id, token in sorted(_list_added_tokens(folder), key=lambda entry: entry[0]):
        library.add_tokens([token])
        if (actual := library.token_to_id(token.content)) != token_id:
            raise ValueError(
                f'{folder} lists the token {token.content!r} with id {token_id}, but it gets '
                f'{actual}: the files beside the vocabulary belong to another vocabulary'
            )
    config = _read_if_there(folder / SPECIALS_FILE) | _read_if_there(folder / CONFIG_FILE)
    for name in SPECIAL_TOKENS:
        text = special_token_text(config.get(f'{name}_token'))
        if text and library.token_to_id(text) is not None:
            special = tokenizers.AddedToken(text, normalized=False, special=True)
            library.add_special_tokens([special])


def _list_added_tokens(folder: Path) -> Iterator[tuple[int, Any]]:
    """Yields (id, token) of tokenizer_config.json, or else of added_tokens.json."""
    import tokenizers

    settings = ('lstrip', 'rstrip', 'single_word', 'normalized', 'special')
    listed = _read_if_there(folder / CONFIG_FILE).get('added_tokens_decoder')
    for number, entry in (listed if isinstance(listed, dict) else {}).items():
        match entry:
            case {'content': str(text)} if number.isdecimal():
                flags = {name: entry[name] for name in settings if type(entry.get(name)) is bool}
                yield int(number), tokenizers.AddedToken(text, **flags)
    if not listed:
        for text, number in _read_if_there(folder / ADDED_FILE).items():
            if type(number) is int:
                yield number, tokenizers.AddedToken(text, normalized=False, special=True)


def _read_if_there(path: Path) -> dict[str, Any]:
    return read_json(path) if path.is_file() else {}


def describe_conversion(path: Path) -> str:
    """Returns the command that leads on with a vocabulary that is not read here, or ''."""
    packages = ' '.join(f'--with {package}' for package in CONVERTER)
    prefix = f'To make a {LIBRARY_FILE} of it, run: uv run --no-project {packages} python -c'
    if path.name in (GPT2_FILE, MERGES_FILE):
        if not (path.parent / MERGES_FILE).is_file():
            return ''
        code = (
            'import sys, transformers as t; t.AutoTokenizer.from_pretrained(sys.argv[1])'
            f'.backend_tokenizer.save(sys.argv[1] + "/{LIBRARY_FILE}")'
        )
        return f"{prefix} '{code}' {shlex.quote(str(path.parent))}"
    content = _read_content(path)
    if is_rank_file(content):
        code = (
            'import sys; from transformers.convert_slow_tokenizer import TikTokenConverter as C; '
            'C(sys.argv[1], sys.argv[2], extra_special_tokens=sys.argv[4:]).converted()'
            '.save(sys.argv[3])'
        )
        target = shlex.quote(str(path.parent / LIBRARY_FILE))
        return f"{prefix} '{code}' {shlex.quote(str(path))} PATTERN {target} SPECIAL_TOKEN ..."
    return '' if path.suffix == '.json' else _describe_encoding(path, content)


def _describe_encoding(path: Path, content: bytes) -> str:
    """Returns the command that encodes a text with SentencePiece itself, if it is its model."""
    try:
        model = parse_model(content)
    except ValueError:
        return ''
    size = len(model.pieces)
    bos, eos = (i if 0 <= i < size else size - 1 for i in (model.bos_id, model.eos_id))
    code = (
        'import json, sys, sentencepiece; '
        'encode = sentencepiece.SentencePieceProcessor(sys.argv[1]).encode; '
        '[print(json.dumps({"text": " ".join(map(str, encode(json.loads(line)["text"])))})) '
        'for line in sys.stdin]'
    )
    return (
        'To encode text with one {"text": ...} per line, run: uv run --no-project --with '
        f"sentencepiece python -c '{code}' {shlex.quote(str(path))} <TEXT.jsonl >IDS.jsonl. Then "
        f'set data.source=text:IDS.jsonl and data.tokenizer=ids:{size},{bos},{eos}.'
    )
