"""The files beside a tokenizer.json: its settings, special tokens and chat templates.

They change no token of a text, so prepared data do not depend on them. They go wherever the
tokenizer goes: a run keeps those of its own data.tokenizer, and an export writes them.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lm.storage.files import UnreadableFile, open_regular, read_json, replace_file

LIBRARY_FILE = 'tokenizer.json'
CONFIG_FILE, SPECIALS_FILE = 'tokenizer_config.json', 'special_tokens_map.json'
ADDED_FILE, GENERATION_FILE = 'added_tokens.json', 'generation_config.json'
TEMPLATE_FILE, TEMPLATES_FOLDER = 'chat_template.jinja', 'additional_chat_templates'
# chat_template.json is the older form of a template, of models that read images too.
FILES_BESIDE = (
    CONFIG_FILE,
    SPECIALS_FILE,
    ADDED_FILE,
    GENERATION_FILE,
    TEMPLATE_FILE,
    'chat_template.json',
)
SPECIAL_TOKENS = ('bos', 'eos', 'unk', 'sep', 'pad', 'cls', 'mask')  # NAME_token there
MAX_BYTES = 1 << 26  # a tokenizer_config.json with 100,000 added tokens has 20 MB


def list_files_beside(folder: Path) -> Iterator[str]:
    """Yields the names of the files that belong to a folder's tokenizer, relative to the folder."""
    yield from (name for name in FILES_BESIDE if (folder / name).is_file())
    templates = sorted((folder / TEMPLATES_FOLDER).glob('*.jinja'))
    yield from (f'{TEMPLATES_FOLDER}/{path.name}' for path in templates if path.is_file())


def read_files_beside(folder: Path) -> dict[str, bytes]:
    """Returns {name: content} of the files that belong to a folder's tokenizer.

    Raises UnreadableFile for a file above MAX_BYTES.
    """
    contents = {}
    for name in list_files_beside(folder):
        with open_regular(folder / name) as file:
            contents[name] = file.read(MAX_BYTES + 1)
        if len(contents[name]) > MAX_BYTES:
            raise UnreadableFile(f'{folder / name} has more than {MAX_BYTES:,} bytes')
    return contents


def write_files_beside(folder: Path, contents: Mapping[str, bytes]) -> None:
    """Writes files that `read_files_beside` returned into another folder."""
    for name, content in contents.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        with replace_file(folder / name) as temporary:
            temporary.write_bytes(content)


def read_special_token(folder: Path, name: str) -> str | None:
    """Returns the spelling of `bos_token` or `eos_token` in the files beside a tokenizer.json."""
    for file in (CONFIG_FILE, SPECIALS_FILE):
        if (folder / file).is_file():
            text = special_token_text(read_json(folder / file).get(name))
            if text is not None:
                return text
    return None


def special_token_text(token: Any) -> str | None:
    """Returns the text of a special token, which may be an object, or None if it has none."""
    token = token.get('content') if isinstance(token, dict) else token
    return token if isinstance(token, str) else None


def read_end_tokens(folder: Path) -> frozenset[int]:
    """Returns the tokens that end a text, as listed in the model's generation_config.json.

    Values that are no token ids are ignored: other programs write arbitrary values there.
    """
    path = folder / GENERATION_FILE
    end_ids = read_json(path).get('eos_token_id') if path.is_file() else None
    end_ids = end_ids if isinstance(end_ids, list) else [end_ids]
    return frozenset(token for token in end_ids if type(token) is int and token >= 0)
