"""Model folders as a stranger might give them: a valid one, and some 1,500 ways to spoil it.

Each kind changes one thing of a folder that imports: a field of config.json, a header of
safetensors, the index, a tokenizer's file, or the target of a name. It lists words that the refusal
must have.
"""

import dataclasses
import json
import os
import random
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import tokenizers as library

from eval.convert import safetensors
from tests.fixtures.hf.seeded import CASES as FOLDER
from tests.fixtures.hf.seeded import read_folder, weight

CASES = read_folder(FOLDER)
FAMILIES = ('llama3', 'gpt2', 'gemma3', 'gpt_oss', 'pythia', 'phi3_long', 'qwen3_moe', 'smollm3')
WORDS = [f'w{i}' for i in range(50)]
ONE_FILE, INDEX = safetensors.ONE_FILE, safetensors.INDEX
SHARDS = ('model-00001-of-00002.safetensors', 'model-00002-of-00002.safetensors')
SHARD_BYTES = 12_000  # half of the smallest case
MANY_DIGITS = '9' * 4000  # Python reads 4,300 at most
RAW = '@raw@'  # a string that begins so stands for JSON text that json.dumps would not write


@dataclasses.dataclass(frozen=True)
class Kind:
    """A way to spoil a folder.

    Attributes:
      case: the family in `CASES`.
      spoil: changes the folder.
      words: words that a refusal must have.
      imports: whether the folder may still be imported, because the change affects no number.
    """

    case: str
    spoil: Callable[[Path], None]
    words: tuple[str, ...]
    imports: bool = False


def write_model(folder: Path, case: str) -> None:
    """Writes a valid folder: config.json, one file of weights, a tokenizer, and its settings."""
    folder.mkdir(parents=True)
    config = CASES[case]['config']
    (folder / 'config.json').write_text(json.dumps(config))
    safetensors.write_file(folder / ONE_FILE, read_tensors(case))
    vocab = {word: i + 3 for i, word in enumerate(WORDS)} | {'<unk>': 0, '<s>': 1, '</s>': 2}
    words = library.Tokenizer(library.models.WordLevel(vocab, '<unk>'))
    words.pre_tokenizer = library.pre_tokenizers.Whitespace()
    words.save(str(folder / 'tokenizer.json'))
    settings = {'bos_token': '<s>', 'eos_token': {'content': '</s>'}, 'chat_template': 'x'}
    (folder / 'tokenizer_config.json').write_text(json.dumps(settings))
    (folder / 'special_tokens_map.json').write_text(json.dumps({'eos_token': '</s>'}))
    (folder / 'generation_config.json').write_text(json.dumps({'eos_token_id': [2]}))
    (folder / 'chat_template.jinja').write_text('{{ messages }}')


def read_tensors(case: str) -> dict[str, safetensors.Tensor]:
    arrays = {name: weight(name, shape) for name, shape in CASES[case]['tensors'].items()}
    return {n: safetensors.Tensor(x.dtype, x.shape, lambda x=x: x) for n, x in arrays.items()}


def in_shards(folder: Path, case: str) -> None:
    """Writes the weights as several files with their index."""
    (folder / ONE_FILE).unlink()
    names = [*CASES[case]['tensors']]
    tensors, half = read_tensors(case), len(names) // 2
    parts = (names[:half], names[half:])
    for file, part in zip(SHARDS, parts, strict=True):
        safetensors.write_file(folder / file, {name: tensors[name] for name in part})
    named = {n: file for file, part in zip(SHARDS, parts, strict=True) for n in part}
    (folder / INDEX).write_text(json.dumps({'metadata': {'total_size': 1}, 'weight_map': named}))


# What is no regular file.


def fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path)


def directory(path: Path) -> None:
    path.unlink(missing_ok=True)
    path.mkdir()


def unix_socket(path: Path) -> None:
    path.unlink(missing_ok=True)
    folder = os.getcwd()
    os.chdir(path.parent)  # the path of a socket has 107 bytes at most
    try:
        with socket.socket(socket.AF_UNIX) as server:
            server.bind(path.name)
    finally:
        os.chdir(folder)


def link_to(target: str) -> Callable[[Path], None]:
    def link(path: Path) -> None:
        path.unlink(missing_ok=True)
        path.symlink_to(target)

    return link


def link_to_fifo(path: Path) -> None:
    path.unlink(missing_ok=True)
    os.mkfifo(path.with_name('a.pipe'))
    path.symlink_to('a.pipe')


STRANGE_FILES = {
    'a pipe': fifo,
    'a folder': directory,
    'a socket': unix_socket,
    'a device': link_to('/dev/zero'),
    'a link to a pipe': link_to_fifo,
    'a link to itself': lambda path: link_to(path.name)(path),
    'a broken link': link_to('/nowhere/at/all'),
}
READ = (
    'config.json',
    ONE_FILE,
    INDEX,
    SHARDS[1],
    'tokenizer.json',
    'tokenizer_config.json',
    'special_tokens_map.json',
    'generation_config.json',
    'chat_template.jinja',
)


def strange_files() -> Iterator[tuple[str, Kind]]:
    for name in READ:
        for what, make in STRANGE_FILES.items():

            def spoil(folder: Path, name: str = name, make: Any = make) -> None:
                if name in (INDEX, SHARDS[1]):
                    in_shards(folder, 'llama3')
                make(folder / name)

            yield f'{name}: {what}', Kind('llama3', spoil, (name,))


# config.json

NUMBERS = ('0', '-1', '1.5', 'true', '"16"', '1000000000', '1e30', '1e999', 'NaN', 'Infinity')
ANY = ('null', '[]', '{}', '[[[1]]]', '"x"', '-Infinity', MANY_DIGITS, f'-{MANY_DIGITS}')
OTHERS = (*NUMBERS, *ANY, '[16, 16]', '{"a": NaN}', '""', '"\\u0000"', '[' * 200 + ']' * 200)


def with_field(name: str, text: str) -> Callable[[Path], None]:
    """Sets a field of config.json, which may be nested ('a/b'), to JSON text."""

    def spoil(folder: Path) -> None:
        config = json.loads((folder / 'config.json').read_text())
        *above, last = name.split('/')
        place = config
        for part in above:
            place = place[int(part) if isinstance(place, list) else part]
        place[int(last) if isinstance(place, list) else last] = RAW
        whole = json.dumps(config).replace(f'"{RAW}"', text)
        (folder / 'config.json').write_text(whole)

    return spoil


def without_field(name: str) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        config = json.loads((folder / 'config.json').read_text())
        del config[name]
        (folder / 'config.json').write_text(json.dumps(config))

    return spoil


def paths_in(value: Any, above: str = '') -> Iterator[str]:
    """Yields the path of each field, and of nested fields."""
    items = value.items() if isinstance(value, dict) else enumerate(value)
    for name, inner in items:
        yield f'{above}{name}'
        if isinstance(inner, dict | list):
            yield from paths_in(inner, f'{above}{name}/')


def config_fields(per_field: int) -> Iterator[tuple[str, Kind]]:
    """Yields `per_field` other values for each field of each family, and each field removed."""
    rng = random.Random(0)
    for case in FAMILIES:
        for path in paths_in(CASES[case]['config']):
            for text in rng.sample(OTHERS, per_field):
                short = text if len(text) < 30 else f'{text[:10]}...'
                spoil = with_field(path, text)
                yield f'{case}: {path}={short}', Kind(case, spoil, ('config.json',), imports=True)
        for name in CASES[case]['config']:
            kind = Kind(case, without_field(name), ('config.json',), imports=True)
            yield f'{case}: no {name}', kind


# Each must be refused by the name of its field. Case, field, JSON texts.
REFUSED_FIELDS = [
    ('llama3', 'hidden_size', ('"16"', 'true', '0', '-16', '16.5', '1e999', 'NaN', '[16]', '{}')),
    ('llama3', 'hidden_size', ('1000000000', MANY_DIGITS, '1' + '0' * 30, 'null')),
    ('llama3', 'num_hidden_layers', ('1000000000', MANY_DIGITS, '0', '"2"', 'true', '[2]', '3')),
    ('llama3', 'num_attention_heads', ('1000000000', MANY_DIGITS, '0', 'null', '"4"', '[]', '3')),
    ('llama3', 'num_key_value_heads', ('1000000000', '0', '"2"', '-2', '{}')),
    ('llama3', 'intermediate_size', ('1000000000', MANY_DIGITS, '0', '"24"', 'true', '-24')),
    ('llama3', 'head_dim', ('1000000000', '"4"', 'true', '-4', '[]', '4.5')),
    ('llama3', 'max_position_embeddings', ('0', '-1', '"64"', 'true', '[]', MANY_DIGITS)),
    ('llama3', 'rms_norm_eps', ('"x"', 'NaN', 'Infinity', '-1', '[]', 'true', MANY_DIGITS)),
    ('llama3', 'rope_parameters', ('[]', '"x"', 'true', '3', '[[1]]')),
    ('llama3', 'rope_parameters/factor', ('"8"', 'NaN', '-1', '0', 'true', '[8]', MANY_DIGITS)),
    ('llama3', 'rope_parameters/rope_theta', ('"x"', 'NaN', '-1', '0', '1e999', '{}', 'true')),
    ('llama3', 'rope_parameters/rope_type', ('[]', '{}', '3', 'true', '"x"')),
    ('llama3', 'tie_word_embeddings', ('1', '"true"', '[]', '{}', '2.5')),
    ('llama3', 'attention_bias', ('1', '"true"', '[]', '{}')),
    ('llama3', 'hidden_act', ('[]', '{}', '3', '"x"', '[["silu"]]')),
    ('llama3', 'model_type', ('[]', '{}', '3', 'null', '"llamb"', '"' + 'x' * 10**6 + '"')),
    ('llama3', 'eos_token_id', ('"2"', 'true', '2.5', '[true]', '[["x"]]', '{}', MANY_DIGITS)),
    ('llama3', 'bos_token_id', ('"2"', 'true', '2.5', '{}')),
    ('llama3', 'vocab_size', ('"64"', 'true', '0', '-1', '64.5', '[]', MANY_DIGITS)),
    ('gemma3', 'layer_types', ('"x"', '{}', '3', '[3, 3, 3]', '[["x"], ["x"], ["x"]]', '[null]')),
    ('gemma3', 'layer_types', ('["full_attention"]', '[{}]')),
    ('gemma3', 'rope_parameters', ('[]', '"x"', '{"full_attention": 3}', '{"x": {}}')),
    ('gemma3', 'rope_parameters/full_attention', ('[]', '"x"', '3')),
    ('gemma3', 'sliding_window', ('"8"', 'true', '-8', '0', '[8]', '8.5', MANY_DIGITS)),
    ('gemma3', 'query_pre_attn_scalar', ('0', '-9', '"9"', 'true', 'NaN', '[]')),
    ('gemma3', 'final_logit_softcapping', ('"x"', 'NaN', '-1', 'true', '[]')),
    ('gpt2', 'activation_function', ('[]', '{}', '3', 'null', '"x"')),
    ('gpt2', 'n_inner', ('"64"', 'true', '-64', '1000000000', '[]')),
    ('gpt2', 'n_positions', ('1000000000', MANY_DIGITS, '0', '"32"', 'null')),
    ('gpt2', 'n_layer', ('1000000000', MANY_DIGITS, '0', 'null')),
    ('gpt2', 'scale_attn_weights', ('1', '"x"', '[]', 'false')),
    ('gpt_oss', 'num_local_experts', ('1000000000', MANY_DIGITS, '0', '"4"', '[4]', 'true')),
    ('gpt_oss', 'num_experts_per_tok', ('1000000000', '0', '"2"', 'true', '5')),
    ('gpt_oss', 'quantization_config', ('[]', '"x"', '3', '{"quant_method": []}')),
    ('gpt_oss', 'rope_parameters/truncate', ('"x"', '3', '[]')),
    ('phi3_long', 'rope_parameters/short_factor', ('"x"', '3', '[]', '["x"]', '[[1]]', '[NaN, 1]')),
    ('phi3_long', 'original_max_position_embeddings', ('"8"', '0', '[]', 'true')),
    ('qwen3_moe', 'norm_topk_prob', ('1', '[]', '{}', '"x"')),
    ('qwen3_moe', 'mlp_only_layers', ('[0]', '"x"', '{}', '3')),
    ('smollm3', 'no_rope_layers', ('[1]', '"x"', '{}', '[1, "0"]', '[[1], [0]]', '[1, true]')),
    ('smollm3', 'no_rope_layer_interval', ('"2"', '-1', 'true', '[]')),
    ('gptj', 'rotary_dim', ('"4"', 'true', '0', '-4', '3', '10', '1000000000', 'null', '[]')),
    ('starcoder2', 'use_bias', ('1', '"x"', '[]', 'null')),
    ('pythia', 'use_parallel_residual', ('1', '[]', '{}', '"x"')),
    ('pythia', 'rope_parameters/partial_rotary_factor', ('"x"', '-1', '2', 'NaN', '[]', 'true')),
]


def refused_fields() -> Iterator[tuple[str, Kind]]:
    for case, path, texts in REFUSED_FIELDS:
        for text in texts:
            short = text if len(text) < 30 else f'{text[:10]}...'
            words = ('config.json', path.rpartition('/')[2])
            yield f'{case}: {path}={short} refused', Kind(case, with_field(path, text), words)


def bytes_in(name: str, content: bytes) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(content)


def sparse(name: str, size: int) -> Callable[[Path], None]:
    def spoil(folder: Path) -> None:
        (folder / name).write_bytes(b'')
        os.truncate(folder / name, size)

    return spoil


def old_text(name: str, change: Callable[[bytes], bytes]) -> Callable[[Path], None]:
    return lambda folder: (folder / name).write_bytes(change((folder / name).read_bytes()))


NO_JSON = {
    'empty': b'',
    'cut': b'{"model_type": "lla',
    'null': b'null',
    'a list': b'[]',
    'a text': b'"x"',
    'a number': b'9' * 5000,
    'NaN': b'NaN',
    'no UTF-8': b'{"model_type": "\xff\xfe"}',
    'UTF-16': '{"model_type": "llama"}'.encode('utf-16'),
    'zeros': bytes(1000),
    'nested lists': b'[' * 100_000,
    'nested objects': b'{"a":' * 20_000,
    'closed nesting': b'{"model_type": ' + b'[' * 900 + b']' * 900 + b'}',
    'words behind it': b'{} x',
    'a lone surrogate': b'{"model_type": "\\ud800"}',
}


def whole_files() -> Iterator[tuple[str, Kind]]:
    for what, content in NO_JSON.items():
        for name in ('config.json', 'tokenizer_config.json', 'generation_config.json'):
            if what == 'a lone surrogate' and name != 'config.json':
                continue
            yield f'{name}: {what}', Kind('llama3', bytes_in(name, content), (name,))
        yield (
            f'tokenizer.json: {what}',
            Kind('llama3', bytes_in('tokenizer.json', content), ('tokenizer.json',)),
        )

        def write_index(folder: Path, content: bytes = content) -> None:
            in_shards(folder, 'llama3')
            (folder / INDEX).write_bytes(content)

        yield f'{INDEX}: {what}', Kind('llama3', write_index, (INDEX,))
    for name in sorted({*READ} - {ONE_FILE, INDEX, SHARDS[1], 'special_tokens_map.json'}):
        yield f'{name}: 8 GB', Kind('llama3', sparse(name, 8 << 30), (name,))
    for name in ('config.json', 'tokenizer_config.json', 'generation_config.json'):
        mark = old_text(name, lambda text: b'\xef\xbb\xbf' + text)
        yield f'{name}: a byte order mark', Kind('llama3', mark, (name,), imports=True)


MORE_TEXT = {
    '100,000 fields more': (b''.join(b', "f%d": 1' % i for i in range(10**5)), 'fields'),
    'a field twice': (b', "hidden_size": 17', 'hidden_size'),
    'hidden_sizes more': (b', "hidden_sizes": 16', 'hidden_sizes'),
    'transformers_weights more': (b', "transformers_weights": "../x"', 'transformers_weights'),
    'layer_types more': (b', "layer_types": "../x"', 'layer_types'),
    'a field without a name': (b', "": "../x"', ''),
    'a field with a newline': (b', "a\\nb": 1', ''),
    'a field of a megabyte': (b', "%s": 1' % (b'x' * 10**6), ''),
    'a value of a megabyte': (b', "x": "%s"' % (b'x' * 10**6), 'x='),
    'a dropout of a text': (b', "x_dropout": "\\u001b[2J"', 'x_dropout'),
    'NaN in a list': (b', "id2label": [[NaN]]', 'id2label'),
}
INNER = {
    'null': None,
    'a list': [],
    'a text': 'x',
    'an empty one': {},
    'one with a size of a text': {'hidden_size': '16'},
    'one of 10**9 layers': {'num_hidden_layers': 10**9},
    'one with a list in place of RoPE': {'rope_parameters': []},
    'one with another within': {'text_config': {'text_config': {}}},
}


def longer_configs() -> Iterator[tuple[str, Kind]]:
    for what, (text, word) in MORE_TEXT.items():
        spoil = old_text('config.json', lambda old, text=text: old[:-1] + text + b'}')
        yield f'config.json: {what}', Kind('llama3', spoil, ('config.json', word))
    same = old_text('config.json', lambda old: old[:-1] + b', "hidden_size": 16}')
    yield 'config.json: a field twice, alike', Kind('llama3', same, (), imports=True)
    for what, inner in INNER.items():

        def wrap(folder: Path, inner: Any = inner) -> None:
            config = CASES['gemma3']['config']
            inner = config | inner if isinstance(inner, dict) and inner else inner
            whole = {'model_type': 'gemma3', 'text_config': inner}
            (folder / 'config.json').write_text(json.dumps(whole))

        yield f'config.json: text_config is {what}', Kind('gemma3', wrap, ('config.json',))


# Weights


def raw_file(header: Any, data: bytes = b'', length: int | None = None) -> bytes:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return (len(text) if length is None else length).to_bytes(8, 'little') + text + data


def edited_header(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    """Writes the file of weights with another header before the same data."""

    def spoil(folder: Path) -> None:
        content = (folder / ONE_FILE).read_bytes()
        length = int.from_bytes(content[:8], 'little')
        header = json.loads(content[8 : 8 + length])
        changed = change(header)
        (folder / ONE_FILE).write_bytes(
            raw_file(header if changed is None else changed, content[8 + length :])
        )

    return spoil


FIRST = 'model.embed_tokens.weight'


def entry(**fields: Any) -> Callable[[dict[str, Any]], None]:
    return lambda header: header[FIRST].update(fields)


def rename_tensor(name: str) -> Callable[[dict[str, Any]], dict[str, Any]]:
    return lambda header: {name if n == FIRST else n: x for n, x in header.items()}


HEADERS = {
    'dtype F4': entry(dtype='F4'),
    'dtype []': entry(dtype=[]),
    'dtype {}': entry(dtype={}),
    'dtype null': entry(dtype=None),
    'dtype 3': entry(dtype=3),
    'dtype F64': entry(dtype='F64'),
    'dtype I32': entry(dtype='I32'),
    'dtype BOOL': entry(dtype='BOOL'),
    'shape null': entry(shape=None),
    'shape a text': entry(shape='64'),
    'shape {}': entry(shape={}),
    'shape 3': entry(shape=3),
    'shape of texts': entry(shape=['64', '16']),
    'shape of lists': entry(shape=[[64, 16]]),
    'shape of flags': entry(shape=[True, True]),
    'shape of floats': entry(shape=[64.0, 16.0]),
    'shape negative': entry(shape=[-64, -16]),
    'shape swapped': entry(shape=[16, 64]),
    'shape flat': entry(shape=[1024]),
    'shape empty': entry(shape=[]),
    'shape zero': entry(shape=[0, 16], data_offsets=[0, 0]),
    'shape that overflows': entry(shape=[2**32, 2**32]),
    'shape that overflows to zero': entry(shape=[2**33, 2**31], data_offsets=[0, 0]),
    'shape of large axes': entry(shape=[10**4000] * 5000),
    'shape of a million axes': entry(shape=[1] * 10**6),
    'shape of 70 axes': entry(shape=[64, 16] + [1] * 68),
    'shape of many digits': entry(shape=[10**4000, 1]),
    'offsets null': entry(data_offsets=None),
    'offsets of one': entry(data_offsets=[0]),
    'offsets of three': entry(data_offsets=[0, 1, 2]),
    'offsets a text': entry(data_offsets='01'),
    'offsets {}': entry(data_offsets={'0': 1, '1': 2}),
    'offsets negative': entry(data_offsets=[-4096, 0]),
    'offsets swapped': entry(data_offsets=[4096, 0]),
    'offsets beyond': entry(data_offsets=[10**18, 10**18 + 4096]),
    'offsets of many digits': entry(data_offsets=[0, 10**4000]),
    'offsets overlap': entry(data_offsets=[4, 4100]),
    'entry null': lambda header: {**header, FIRST: None},
    'entry []': lambda header: {**header, FIRST: []},
    'entry a text': lambda header: {**header, FIRST: 'x'},
    'no entries': lambda header: {},
    'metadata alone': lambda header: {'__metadata__': {}},
    'metadata a list': lambda header: {**header, '__metadata__': []},
    'name empty': rename_tensor(''),
    'name a path': rename_tensor('../../etc/passwd'),
    'name of braces': rename_tensor('{L}{E}{0.__class__}'),
    'name with a newline': rename_tensor('a\nb\x1b[2J'),
    'name of a megabyte': rename_tensor('x' * 10**6),
    'layer 10**9': rename_tensor('model.layers.1000000000.mlp.up_proj.weight'),
    'layer -1': rename_tensor('model.layers.-1.mlp.up_proj.weight'),
    'layer of many digits': rename_tensor(f'model.layers.{"9" * 5000}.mlp.up_proj.weight'),
}
MAY_IMPORT = ('metadata a list',)
RAW_FILES = {
    'empty': b'',
    'seven bytes': bytes(7),
    'length 0': bytes(8),
    'length 2**63': raw_file(b'{}', length=2**63),
    'length 2**64 - 1': raw_file(b'{}', length=2**64 - 1),
    'length beyond': raw_file(b'{}', length=50),
    'length 1': raw_file(b'{}', length=1),
    'no JSON': raw_file(b'x' * 100),
    'no UTF-8': raw_file(b'{"\xff": 1}'),
    'nested lists': raw_file(b'[' * 100_000),
    'nested objects': raw_file(b'{"a":' * 100_000),
    'null': raw_file(b'null'),
    'a list': raw_file(b'[]'),
    'NaN': raw_file(b'{"a": NaN}'),
    'a number': raw_file(b'1' * 5000),
    'twice': raw_file(b'{"a": 1, "a": 2}'),
    'zeros': bytes(4096),
    'a pickle': b'PK\x03\x04' + bytes(4096),
    'a pointer of LFS': b'version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 1\n',
    'a web page': b'<!doctype html><html></html>' * 40,
}


def many_names(folder: Path) -> None:
    """Returns a header of 300,000 empty tensors."""
    of = {'dtype': 'F32', 'shape': [0], 'data_offsets': [0, 0]}
    text = json.dumps({f'model.layers.{i}.x': of for i in range(300_000)}).encode()
    (folder / ONE_FILE).write_bytes(raw_file(text))


def names_twice(folder: Path) -> None:
    """Returns a header of 200,000 names, the last one twice."""
    names = [*range(200_000), 199_999]
    of = '{"dtype": "F32", "shape": [0], "data_offsets": [0, 0]}'
    text = '{' + ', '.join(f'"{i}": {of}' for i in names) + '}'
    (folder / ONE_FILE).write_bytes(raw_file(text.encode()))


def weights() -> Iterator[tuple[str, Kind]]:
    for what, change in HEADERS.items():
        spoil = edited_header(change)
        yield f'{ONE_FILE}: {what}', Kind('llama3', spoil, (), imports=what in MAY_IMPORT)
    for what, content in RAW_FILES.items():
        yield f'{ONE_FILE}: {what}', Kind('llama3', bytes_in(ONE_FILE, content), (ONE_FILE,))
    yield f'{ONE_FILE}: 300,000 names', Kind('llama3', many_names, ())
    yield f'{ONE_FILE}: a name of many twice', Kind('llama3', names_twice, (ONE_FILE,))
    yield f'{ONE_FILE}: 8 GB of zeros', Kind('llama3', sparse(ONE_FILE, 8 << 30), (ONE_FILE,))
    truncate = old_text(ONE_FILE, lambda content: content[:-100])
    yield f'{ONE_FILE}: cut', Kind('llama3', truncate, (ONE_FILE,))
    longer = old_text(ONE_FILE, lambda content: content + bytes(100))
    yield f'{ONE_FILE}: longer', Kind('llama3', longer, (ONE_FILE,))
    delete = lambda folder: (folder / ONE_FILE).unlink()  # noqa: E731
    yield f'{ONE_FILE}: gone', Kind('llama3', delete, (ONE_FILE,))


def weight_maps() -> dict[str, Callable[[dict[str, Any]], Any]]:
    def map_all_to(file: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda index: {'weight_map': dict.fromkeys(index['weight_map'], file)}

    def map_first_to(file: Any) -> Callable[[dict[str, Any]], Any]:
        return lambda index: index['weight_map'].update({FIRST: file})

    paths = ('../x', '/etc/passwd', 'a/b', '..', '.', '', 'a\\b', 'x' * 5000, 'a\0b', '~', '\ud800')
    types = (None, 3, True, [], {}, [SHARDS[0]], 1.5)
    return (
        {f'all in {path!r:.20}': map_all_to(path) for path in paths}
        | {f'one in {path!r:.20}': map_first_to(path) for path in paths}
        | {f'all in {value!r}': map_all_to(value) for value in types}
        | {f'one in {value!r}': map_first_to(value) for value in types}
        | {f'weight_map {v!r}': lambda index, v=v: {'weight_map': v} for v in (*types[:5], 'x')}
        | {
            'no weight_map': lambda index: {},
            'a list': lambda index: [index],
            'all in the first': map_all_to(SHARDS[0]),
            'all in config.json': map_all_to('config.json'),
            'a shard that is not there': map_first_to('model-00003-of-00002.safetensors'),
            'a name that is nowhere': lambda index: index['weight_map'].update({'x': SHARDS[0]}),
            'a name less': lambda index: index['weight_map'].pop(FIRST) and None,
            '200,000 names more': lambda index: index['weight_map'].update(
                {f'x{i}': SHARDS[0] for i in range(200_000)}
            ),
            '20,000 files': lambda index: index['weight_map'].update(
                {f'x{i}': f'x{i}.safetensors' for i in range(20_000)}
            ),
        }
    )


def indexes() -> Iterator[tuple[str, Kind]]:
    for what, change in weight_maps().items():

        def spoil(folder: Path, change: Any = change) -> None:
            in_shards(folder, 'llama3')
            index = json.loads((folder / INDEX).read_text())
            changed = change(index)
            (folder / INDEX).write_text(json.dumps(index if changed is None else changed))

        words = ('config.json',) if what == 'all in config.json' else (INDEX,)
        yield f'{INDEX}: {what}', Kind('llama3', spoil, words)

    def beside(folder: Path) -> None:
        content = (folder / ONE_FILE).read_bytes()
        in_shards(folder, 'llama3')
        (folder / ONE_FILE).write_bytes(content)
        (folder / SHARDS[0]).unlink()

    yield f'{INDEX}: beside one file, a shard is gone', Kind('llama3', beside, (), imports=True)

    def name_twice(folder: Path) -> None:
        in_shards(folder, 'llama3')
        (folder / SHARDS[1]).write_bytes((folder / SHARDS[0]).read_bytes())

    yield f'{INDEX}: one shard twice', Kind('llama3', name_twice, (SHARDS[1],))


# The tokenizer and its settings


def set_in(name: str, path: str, value: Any) -> Callable[[Path], None]:
    """Sets a value of a JSON file at a path such as 'model/vocab'."""

    def spoil(folder: Path) -> None:
        record = json.loads((folder / name).read_text())
        *above, last = path.split('/')
        place = record
        for part in above:
            place = place[part]
        place[last] = value
        (folder / name).write_text(json.dumps(record))

    return spoil


TOKENIZER_VALUES = {
    'model': (None, [], 'x', {'type': 'x'}, {'type': 'BPE', 'vocab': {}, 'merges': [['a', 'b']]}),
    'model/vocab': (
        None,
        [],
        'x',
        {},
        {'a': -1},
        {'a': 2**32},
        {'a': 2**31},
        {'a': 'x'},
        {'a': 1.5},
        {'<s>': 63, '</s>': 64},
        {'<s>': 10**9},
    ),
    'model/unk_token': (None, 3, [], 'nowhere'),
    'added_tokens': (
        None,
        'x',
        [3],
        [{'id': 10**9, 'content': 'x'}],
        [{'id': -1, 'content': 'x'}],
        [{'id': 1}],
    ),
    'pre_tokenizer': ('x', {'type': 'Split', 'pattern': {'Regex': '('}}, {'type': 'x'}),
    'truncation': ('x', {'max_length': -1}),
    'normalizer': ({'type': 'Replace', 'pattern': {'Regex': '(a+)+$'}, 'content': ''}, 3),
}
SETTINGS = {
    'tokenizer_config.json': {
        'eos_token': (3, [], {}, {'content': 3}, {'content': None}, 'nowhere', '', True),
        'bos_token': (3, [], {'content': []}, 'nowhere'),
        'chat_template': (3, {}, [3], [[]], [{'name': []}], [{'name': 'default', 'template': 3}]),
    },
    'special_tokens_map.json': {'eos_token': (3, [], {}, {'content': 3}), 'x': ([[]],)},
    'generation_config.json': {
        'eos_token_id': ('2', True, -1, 10**9, 1.5, [], [[]], [[2]], ['2'], {}, [True], None),
        'temperature': ('x', [], -1),
    },
}


def tokenizer_files() -> Iterator[tuple[str, Kind]]:
    name = 'tokenizer.json'
    for path, values in TOKENIZER_VALUES.items():
        for value in values:
            kind = Kind('llama3', set_in(name, path, value), (name,), imports=True)
            yield f'{name}: {path}={value!s:.30}', kind
    for file, fields in SETTINGS.items():
        for field, values in fields.items():
            for value in values:
                kind = Kind('llama3', set_in(file, field, value), (file,), imports=True)
                yield f'{file}: {field}={value!r}', kind
    for what, content in {
        'no UTF-8': b'\xff\xfe{{',
        'open': b'{% for',
        'endless': b'{% for i in range(10**9) %}{% endfor %}',
    }.items():
        spoil = bytes_in('chat_template.jinja', content)
        yield f'chat_template.jinja: {what}', Kind('llama3', spoil, ('chat_template.jinja',), True)


def kinds(per_field: int = 3) -> dict[str, Kind]:
    """Returns all kinds by their names. per_field: other values for each field of each family."""
    return dict(
        [
            *strange_files(),
            *refused_fields(),
            *whole_files(),
            *longer_configs(),
            *weights(),
            *indexes(),
            *tokenizer_files(),
            *config_fields(per_field),
        ]
    )
