"""Data sets of the hub.

Reference: the files that a name means. Equivalence: fetched files are prepared like the same files
by text:GLOB. Contract: one line for each missing thing or malformed card.
"""

import hashlib
import http.server
import io
import json
import os
import re
import subprocess
import sys

import pyarrow
import pyarrow.parquet
import pytest

from lm.data import hub as lm_hub
from lm.data.hub import open_shards, select_files
from tests import ROOT
from tests.commands import PATIENCE_SEC
from tests.object_store import serving

FILES = [
    'data/CC-2013/000_00000.parquet',
    'data/CC-2014/000_00000.parquet',
    'sample/10BT/000.parquet',
    'sample/10BT/001.parquet',
]
SPLITS = ['plain/test-0.parquet', 'plain/train-0.parquet', 'plain/train-1.parquet']
CARD = {  # the form of FineWeb-Edu's
    'configs': [
        {'config_name': 'default', 'data_files': [{'split': 'train', 'path': 'data/*/*'}]},
        {
            'config_name': 'sample-10BT',
            'data_files': [
                {'split': 'train', 'path': ['sample/10BT/*']},
                {'split': 'test', 'path': 'data/**'},
            ],
        },
        {'config_name': 'any', 'data_files': 'data/CC-{2014,2015}/**.parquet'},
    ]
}


@pytest.mark.parametrize(
    ('subset', 'paths', 'card', 'expected'),
    [
        ('', FILES, CARD, FILES[:2]),
        ('sample-10BT', FILES, CARD, FILES[2:]),
        ('any', FILES, CARD, FILES[1:2]),
        ('', FILES, {}, FILES),
        ('sample', FILES, {}, FILES[2:]),
        ('', SPLITS, {}, SPLITS[1:]),
        ('', SPLITS[:1] + FILES, {'configs': None}, FILES),
        ('', FILES, {'configs': CARD['configs'][1:2]}, FILES[2:]),
    ],
)
def test_select_training_files(subset, paths, card, expected):
    assert select_files('a/b', subset, paths, card) == expected


TWO_SPLITS = {
    'configs': [
        {
            'config_name': 'v1',
            'data_files': [
                {'split': 'train', 'path': 'plain/train-*'},
                {'split': 'test', 'path': 'plain/test-*'},
            ],
        }
    ]
}
HOSTILE_SPLITS = {  # a name that clears a terminal
    'configs': [
        {
            'config_name': 'v1',
            'data_files': [
                {'split': 'train', 'path': 'v1/train-*'},
                {'split': '\x1b[2J', 'path': 'v1/test-*'},
            ],
        }
    ]
}
NAMED = ['v1/dev-0.parquet', 'v1/train-0.parquet', 'v1/eval-0.parquet', 'v1/extra-0.parquet']


@pytest.mark.parametrize(
    ('subset', 'split', 'paths', 'card', 'expected'),
    [
        ('v1', 'test', SPLITS, TWO_SPLITS, SPLITS[:1]),
        ('', 'train', SPLITS, TWO_SPLITS, SPLITS[1:]),
        ('', 'test', SPLITS, {}, SPLITS[:1]),
        ('v1', 'validation', NAMED, {}, NAMED[:1]),
        ('v1', 'test', NAMED, {}, NAMED[2:3]),
        ('v1', 'extra', NAMED, {}, NAMED[3:]),
    ],
)
def test_select_split_files(subset, split, paths, card, expected):
    assert select_files('a/b', subset, paths, card, split) == expected


@pytest.mark.parametrize(
    ('paths', 'card', 'message'),
    [
        (SPLITS, TWO_SPLITS, "hub:a/b:v1 has no split 'validation'. Its splits are train, test."),
        (NAMED[1:], {}, "has no split 'validation'."),
        (SPLITS, HOSTILE_SPLITS, r'Its splits are train, \x1b[2J.'),
    ],
)
def test_missing_split_lists_the_splits(paths, card, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        select_files('a/b', 'v1', paths, card, 'validation')


@pytest.mark.parametrize(
    ('subset', 'paths', 'card', 'message'),
    [
        ('sample-10B', FILES, CARD, "Did you mean 'sample-10BT'"),
        (
            'simple',
            FILES,
            {},
            "no subset 'simple'; its subsets are data, sample. Use hub:a/b:SUBSET",
        ),
        (
            '',
            FILES,
            {'configs': CARD['configs'][1:]},
            'several subsets, and no default; its',
        ),
        ('', [], {}, 'has no parquet files. If the Hub has converted it, use hub:a/b@refs/convert'),
        ('', SPLITS[:1], {}, "hub:a/b has no split 'train'"),
    ],
)
def test_errors_list_available_subsets(subset, paths, card, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        select_files('a/b', subset, paths, card)


LONG_PATHS = [*SPLITS, 'a/' * 60 + 'x.parquet']


@pytest.mark.parametrize(
    'globs',
    [
        '**/' * 30 + 'y',
        '*a' * 400,
        '**' * 40 + 'z',
        '{' * 900,
        '{a,' * 300,
        '[' * 900,
        '{*a,b}' * 99,
    ],
)
def test_globs_take_linear_time(globs):
    """As regular expressions, the first and third take years, and the braces are errors."""
    card = {'configs': [{'config_name': 'a', 'data_files': globs}]}
    with pytest.raises(ValueError, match="has no split 'train'"):
        select_files('a/b', '', LONG_PATHS, card)


def make_card(data_files, **fields):
    return {'configs': [{'config_name': 'default', 'data_files': data_files, **fields}]}


@pytest.mark.parametrize(
    ('card', 'message'),
    [
        (['a'], 'the head of its card must be fields; got list'),
        ('abc', "the head of its card must be fields; got 'abc'"),
        ({'configs': 'abc'}, "configs of its card must be a list; got 'abc'"),
        ({'configs': {'a': 1}}, 'configs of its card must be a list; got dict'),
        ({'configs': [1]}, 'configs[0] of its card must be fields; got int'),
        (
            {'configs': [{'data_files': 'x'}]},
            'configs[0].config_name of its card must be a name; g',
        ),
        (make_card('x', config_name=['a']), 'config_name of its card must be a name; got list'),
        (
            make_card(5),
            'configs[0].data_files of its card must be a path or a list of paths; got int',
        ),
        (
            make_card([{'split': 'train'}]),
            'data_files[0].path of its card must be a path or a list',
        ),
        (
            make_card([{'split': 'train', 'path': {}}]),
            'data_files[0].path of its card must be a pa',
        ),
        (
            make_card({'train': ['*', 5]}),
            'data_files.train of its card must be a path or a list of',
        ),
        (
            make_card([{'split': 5, 'path': '*'}]),
            'the path of a named split, like the others; got in',
        ),
        (
            make_card(['*', {'split': 'test', 'path': '*'}]),
            'data_files[0] of its card must be the p',
        ),
        (make_card('../../*'), "must be a path within the data set; got '../../*'"),
        (make_card('/etc/*'), "must be a path within the data set; got '/etc/*'"),
        (make_card('hf://datasets/c/d/*'), 'must be a path within the data set'),
        (make_card('{' + 'ab,' * 9999 + '}'), 'must be at most 1000 characters long; got'),
    ],
)
def test_errors_malformed_card(card, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        select_files('a/b', '', FILES, card)


def test_errors_too_many_globs(monkeypatch):
    monkeypatch.setattr(lm_hub, 'MAX_WORK', 3 * len(FILES) * len('*t') + len('data/CC-2014/**'))
    card = make_card(['*t', '*t', '*t', 'data/CC-2014/**'])
    assert select_files('a/b', '', FILES, card) == FILES[1:2]
    with pytest.raises(ValueError, match='must be fewer globs for 4 files'):
        select_files('a/b', '', FILES, make_card(['*t'] * 6))


@pytest.mark.parametrize(
    ('card', 'expected'),
    [
        (make_card({'train': 'plain/train-[1-9]*', 'test': 'plain/test*'}), SPLITS[2:]),
        (make_card({'split': 'train', 'path': SPLITS[1]}), SPLITS[1:2]),
        (make_card([['plain/*']]), SPLITS[1:]),
        (make_card(None), SPLITS[1:]),
        ({'configs': [{'config_name': False, 'data_files': SPLITS[2]}]}, SPLITS[2:]),
    ],
)
def test_card_forms_are_parsed(card, expected):
    assert select_files('a/b', '', SPLITS, card) == expected


def test_hidden_paths_need_their_spelling():
    paths = ['.a/train.parquet', '__b__/train.parquet', 'c/train.parquet']
    assert select_files('a/b', '', paths, make_card('**')) == paths[2:]
    assert select_files('a/b', '', paths, make_card(['.*/*', '__b__/*'])) == paths[:2]


def test_errors_missing_library(monkeypatch):
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    with pytest.raises(ValueError, match='uv sync --extra hub'):
        open_shards('a/b')


def test_error_for_address_suggests_name():
    with pytest.raises(ValueError, match=r'set data\.source=hub:someone/some\.'):
        open_shards('https://hub.example/datasets/someone/some/tree/main')


COMMIT = 'c' * 40
CONFIGS = """---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/*
  - split: validation
    path: large/*
- config_name: large
  data_files: large/*
---
# A data set
"""


def parquet(*texts):
    file = io.BytesIO()
    pyarrow.parquet.write_table(pyarrow.table({'id': [*range(len(texts))], 'text': texts}), file)
    return file.getvalue()


HELD = {
    'README.md': CONFIGS.encode(),
    'small/0.parquet': parquet('the first text', 'and a second'),
    'small/1.parquet': parquet('and a third one, which is longer'),
    'large/0.parquet': parquet('not asked for'),
}


@pytest.fixture
def hub():
    """(address, requested paths) of a server with the interface of the hub: someone/some."""
    requested_paths = []

    class Answers(http.server.BaseHTTPRequestHandler):
        protocol_version = 'HTTP/1.1'

        def answer(self, status, content=b'', **headers):
            self.send_response(status)
            for name, value in (headers | {'Content-Length': len(content)}).items():
                self.send_header(name.replace('_', '-'), str(value))
            self.end_headers()
            self.wfile.write(b'' if self.command == 'HEAD' else content)

        def do_GET(self):
            path = self.path.partition('?')[0]
            requested_paths.append(path)
            ids = {name: hashlib.sha1(content).hexdigest() for name, content in HELD.items()}
            file = path.removeprefix(f'/datasets/someone/some/resolve/{COMMIT}/')
            if path == '/api/datasets/someone/some/revision/main':
                self.answer(200, json.dumps({'id': 'someone/some', 'sha': COMMIT}).encode())
            elif path == f'/api/datasets/someone/some/tree/{COMMIT}':
                tree = [
                    {'type': 'file', 'path': name, 'size': len(HELD[name]), 'oid': ids[name]}
                    for name in HELD
                ]
                self.answer(200, json.dumps(tree).encode(), Content_Type='application/json')
            elif file in HELD:
                self.answer(200, HELD[file], ETag=f'"{ids[file]}"', X_Repo_Commit=COMMIT)
            elif '/someone/some/revision/' in path:
                self.answer(404, X_Error_Code='RevisionNotFound')
            else:
                self.answer(404, X_Error_Code='RepoNotFound')

        do_HEAD = do_GET

        def log_message(self, *_):
            pass

    with serving(Answers) as address:
        yield address, requested_paths


OPENS = """
import dataclasses, json, sys
from configs import default
from lm.config.resolve import resolve
from lm.data import open_dataset

cache_dir, *sources = sys.argv[1:]
for source in sources:
    cfg = resolve(default.get_config()).data
    cfg = dataclasses.replace(
        cfg, source=source, tokenizer='byte', cache_dir=cache_dir, seq_len=8, batch_size=1,
        validation_fraction=0.3,
    )
    try:
        found = open_dataset(cfg, say=lambda line: None)
        rows = [row.tolist() for row in (found.train[i]['tokens'] for i in range(len(found.train)))]
        print(json.dumps([found.digest, found.report.get('origin'), rows]))
    except ValueError as error:
        print(json.dumps(str(error)))
"""


def run_opening(cache, home, endpoint, *sources, **environment):
    """Returns the output of `OPENS` in a process with that environment."""
    inherited = {name: value for name, value in os.environ.items() if not name.startswith('HF_')}
    hub_variables = {'HF_ENDPOINT': endpoint, 'HF_HOME': str(home), 'NO_PROXY': '127.0.0.1'}
    command = [sys.executable, '-c', OPENS, str(cache), *sources]
    env = (
        inherited | hub_variables | {'no_proxy': '127.0.0.1', 'PYTHONPATH': str(ROOT)} | environment
    )
    process = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SEC
    )
    assert process.returncode == 0, process.stderr
    return [json.loads(line) for line in process.stdout.splitlines()]


@pytest.mark.full
def test_subset_is_fetched_once(hub, tmp_path):
    """Fetches the subset and nothing else; then reads the cache alone, by commit too.

    Catches another order of files, a request without network, and files that are fetched although
    their data are prepared.
    """
    address, requested_paths = hub
    for name in ('small/0.parquet', 'small/1.parquet'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(HELD[name])
    source, offline = 'hub:someone/some:small', {'HF_HUB_OFFLINE': '1'}
    pinned = f'hub:someone/some@{COMMIT}:small'
    home, cache = tmp_path / 'home', tmp_path / 'cache'
    unavailable = ('hub:someone/none', 'hub:someone/some:middle', 'hub:someone/some@v2:small')
    first, none, middle, v2 = run_opening(cache, home, address, source, *unavailable)
    (files,) = run_opening(cache, home, address, f'text:{tmp_path}/small/*.parquet')
    assert first[1] == pinned and first[2] == files[2]
    assert any('small/1' in path for path in requested_paths) and not any(
        'large' in path for path in requested_paths
    )
    assert f'no data set someone/none at {address}' in none
    assert "no subset 'middle'; its subsets are small, large" in middle and 'no such revision' in v2
    apart, missing = run_opening(cache, home, address, f'{source}:validation', f'{source}:test')
    assert apart[0] != first[0] and apart[1] == f'{pinned}:validation' != first[1]
    assert "has no split 'test'. Its splits are train, validation" in missing
    requested_paths.clear()
    assert run_opening(cache, home, address, source, pinned, **offline) == [first, first]
    (anew,) = run_opening(tmp_path / 'other', home, address, source, **offline)
    (uncached,) = run_opening(cache, tmp_path / 'empty', address, source, **offline)
    assert anew == first and requested_paths == []
    assert 'is not in the cache' in uncached and 'HF_HUB_OFFLINE=1 disables' in uncached
    assert '\n' not in uncached
