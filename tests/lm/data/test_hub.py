"""Data sets of a hub. Reference: which files a name means. Equivalence: what is fetched is prepared
as the same files by text:GLOB. Contract: one line for each thing that is not there, or no card.
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
    ('subset', 'paths', 'card', 'wanted'),
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
def test_a_name_means_the_training_files_of_a_subset(subset, paths, card, wanted):
    assert select_files('a/b', subset, paths, card) == wanted


@pytest.mark.parametrize(
    ('subset', 'paths', 'card', 'said'),
    [
        ('sample-10B', FILES, CARD, "Did you mean 'sample-10BT'"),
        ('simple', FILES, {}, "no subset 'simple'; there are data, sample. Write hub:a/b:SUBSET"),
        (
            '',
            FILES,
            {'configs': CARD['configs'][1:]},
            'several subsets, and none by default; there',
        ),
        ('', [], {}, 'has no parquet files. Where the hub has converted it, hub:a/b@refs/convert'),
        ('', SPLITS[:1], {}, "hub:a/b has no split 'train'"),
    ],
)
def test_what_is_not_there_is_said_with_what_there_is(subset, paths, card, said):
    with pytest.raises(ValueError, match=re.escape(said)):
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
def test_a_glob_of_a_card_takes_no_time_that_grows_by_powers(globs):
    """As a regular expression the first and third of them take years, and the braces are errors."""
    card = {'configs': [{'config_name': 'a', 'data_files': globs}]}
    with pytest.raises(ValueError, match="has no split 'train'"):
        select_files('a/b', '', LONG_PATHS, card)


def of_files(data_files, **fields):
    return {'configs': [{'config_name': 'default', 'data_files': data_files, **fields}]}


@pytest.mark.parametrize(
    ('card', 'says'),
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
        (of_files('x', config_name=['a']), 'config_name of its card must be a name; got list'),
        (
            of_files(5),
            'configs[0].data_files of its card must be a path or a list of paths; got int',
        ),
        (of_files([{'split': 'train'}]), 'data_files[0].path of its card must be a path or a list'),
        (of_files([{'split': 'train', 'path': {}}]), 'data_files[0].path of its card must be a pa'),
        (of_files({'train': ['*', 5]}), 'data_files.train of its card must be a path or a list of'),
        (of_files([{'split': 5, 'path': '*'}]), 'the path of a named split, as others are; got in'),
        (
            of_files(['*', {'split': 'test', 'path': '*'}]),
            'data_files[0] of its card must be the p',
        ),
        (of_files('../../*'), "must be a path within the data set; got '../../*'"),
        (of_files('/etc/*'), "must be a path within the data set; got '/etc/*'"),
        (of_files('hf://datasets/c/d/*'), 'must be a path within the data set'),
        (of_files('{' + 'ab,' * 9999 + '}'), 'must be at most 1000 characters long; got'),
    ],
)
def test_a_card_of_another_form_is_refused_by_its_field(card, says):
    with pytest.raises(ValueError, match=re.escape(says)):
        select_files('a/b', '', FILES, card)


def test_a_card_of_more_globs_than_can_be_tried_is_refused(monkeypatch):
    monkeypatch.setattr(lm_hub, 'MAX_WORK', 3 * len(FILES) * len('*t') + len('data/CC-2014/**'))
    card = of_files(['*t', '*t', '*t', 'data/CC-2014/**'])
    assert select_files('a/b', '', FILES, card) == FILES[1:2]
    with pytest.raises(ValueError, match='must be fewer globs for 4 files'):
        select_files('a/b', '', FILES, of_files(['*t'] * 6))


@pytest.mark.parametrize(
    ('card', 'wanted'),
    [
        (of_files({'train': 'plain/train-[1-9]*', 'test': 'plain/test*'}), SPLITS[2:]),
        (of_files({'split': 'train', 'path': SPLITS[1]}), SPLITS[1:2]),
        (of_files([['plain/*']]), SPLITS[1:]),
        (of_files(None), SPLITS[1:]),
        ({'configs': [{'config_name': False, 'data_files': SPLITS[2]}]}, SPLITS[2:]),
    ],
)
def test_a_card_may_be_of_each_form_that_the_hub_has(card, wanted):
    assert select_files('a/b', '', SPLITS, card) == wanted


def test_what_is_hidden_is_named():
    paths = ['.a/train.parquet', '__b__/train.parquet', 'c/train.parquet']
    assert select_files('a/b', '', paths, of_files('**')) == paths[2:]
    assert select_files('a/b', '', paths, of_files(['.*/*', '__b__/*'])) == paths[:2]


def test_without_the_library_it_is_said_how_to_get_it(monkeypatch):
    monkeypatch.setitem(sys.modules, 'huggingface_hub', None)
    with pytest.raises(ValueError, match='uv sync --extra hub'):
        open_shards('a/b')


def test_an_address_is_answered_with_the_name_in_it():
    with pytest.raises(ValueError, match='Write the name in it: hub:someone/some'):
        open_shards('https://hub.example/datasets/someone/some/tree/main')


COMMIT = 'c' * 40
CONFIGS = """---
configs:
- config_name: small
  data_files:
  - split: train
    path: small/*
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
    """(address, paths asked for) of a server with the interface of the hub: someone/some."""
    asked = []

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
            asked.append(path)
            ids = {name: hashlib.sha1(held).hexdigest() for name, held in HELD.items()}
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
        yield address, asked


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


def opened(cache, home, endpoint, *sources, **environment):
    """What `OPENS` finds or says, in a process with that environment."""
    usual = {name: value for name, value in os.environ.items() if not name.startswith('HF_')}
    ours = {'HF_ENDPOINT': endpoint, 'HF_HOME': str(home), 'NO_PROXY': '127.0.0.1'}
    command = [sys.executable, '-c', OPENS, str(cache), *sources]
    env = usual | ours | {'no_proxy': '127.0.0.1', 'PYTHONPATH': str(ROOT)} | environment
    done = subprocess.run(
        command, env=env, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SEC
    )
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


@pytest.mark.full
def test_a_subset_is_fetched_once_and_read_as_its_files(hub, tmp_path):
    """What is asked for and no more; then from the cache alone, by the commit too. Catches another
    order of files, a list that is asked for without a network, and files that are fetched though
    their data are prepared.
    """
    address, asked = hub
    for name in ('small/0.parquet', 'small/1.parquet'):
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_bytes(HELD[name])
    source, offline = 'hub:someone/some:small', {'HF_HUB_OFFLINE': '1'}
    pinned = f'hub:someone/some@{COMMIT}:small'
    home, cache = tmp_path / 'home', tmp_path / 'cache'
    missing = ('hub:someone/none', 'hub:someone/some:middle', 'hub:someone/some@v2:small')
    first, none, middle, v2 = opened(cache, home, address, source, *missing)
    (files,) = opened(cache, home, address, f'text:{tmp_path}/small/*.parquet')
    assert first[1] == pinned and first[2] == files[2]
    assert any('small/1' in path for path in asked) and not any('large' in path for path in asked)
    assert f'no data set someone/none at {address}' in none
    assert "no subset 'middle'; there are small, large" in middle and 'no such revision' in v2
    asked.clear()
    assert opened(cache, home, address, source, pinned, **offline) == [first, first]
    (anew,) = opened(tmp_path / 'other', home, address, source, **offline)
    (lacking,) = opened(cache, tmp_path / 'empty', address, source, **offline)
    assert anew == first and asked == []
    assert 'is not in the cache' in lacking and 'HF_HUB_OFFLINE=1 keeps it' in lacking
    assert '\n' not in lacking
