"""Results and records from a stranger: stored evaluations, and the records that eval.sync sends.

An invalid result is computed again. A run that cannot be sent is named, and the others are sent.
Nothing raises another error or blocks.
"""

import contextlib
import json
import math
import os
import signal
import sqlite3

import pytest

from eval.evaluation import kept
from eval.evaluation.page import write_evaluation_page
from eval.evaluation.paired import compute_difference, pair_items
from eval.evaluation.program import summarise_many, summarise_one
from eval.evaluation.suite_flags import SuiteRequest
from eval.evaluation.targets import Evaluation
from eval.suites import SUITES
from eval.suites.base import Suite, SuiteResult, Table
from eval.sync import to_mlflow, to_wandb
from eval.sync.follower import Follower, send_all
from eval.sync.marks import file_name, read_mark
from lm.storage.files import UnreadableFile
from tests.eval.sync.fakes import Server, begin, end, on_disk, train
from tests.faults.test_untrusted import MOST_SEC, ReaderTimeout
from tests.hostile_models import NO_JSON, STRANGE_FILES

META = {'config': {}, 'step': 5}
REQUEST = SuiteRequest('spoiled', 'spoiled', {})
HUGE = 10**400


@pytest.fixture(autouse=True)
def limit_time():
    """Raises ReaderTimeout, which nobody catches, after MOST_SEC."""

    def alarm(*_):
        raise ReaderTimeout

    previous_handler = signal.signal(signal.SIGALRM, alarm)
    signal.alarm(MOST_SEC)
    yield
    signal.alarm(0)
    signal.signal(signal.SIGALRM, previous_handler)


@pytest.fixture
def suite(monkeypatch):
    def measure(checkpoint):
        """Measures nothing."""

    row = Suite(measure, score='nats', weight='bytes')
    monkeypatch.setitem(SUITES, 'spoiled', row)
    return row


def make_result():
    columns = {'item': ['a', 'b', 'c'], 'nats': [1.0, 2.0, math.nan], 'bytes': [3, 4, 5]}
    table = Table({'domain': ['x', 'y'], 'bits': [1.5, math.inf]}, 'domain', 'bits')
    return SuiteResult({'loss': 1.5, 'n': 3}, columns, {'By domain': table})


def make_spoiler(*path):
    """Returns a function that sets a value in a record. The last element of `path` is the value."""
    *above, last, value = path

    def spoil(record):
        place = record
        for name in above:
            place = place[name]
        place[last] = value

    return spoil


TABLE = ('tables', 'By domain')
RESULTS = {
    f'{"/".join(map(str, path))}={value!r:.40}': make_spoiler(*path, value)
    for path, values in {
        ('numbers',): (None, [], 'x', 3, {}),
        ('numbers', 'loss'): (None, 'x', [], {}, True, HUGE, {'float': 'x'}, {'float': []}, [1.5]),
        ('numbers', '\x1b[2J'): (1.0,),
        ('items',): (None, [], 'x', {}, {'item': 3}, {'item': ['a']}),
        ('items', 'item'): (None, 'abc', [1], [[], [], []], [{}, {}, {}], ['a', 'a', 'a'], {}),
        ('items', 'nats'): (None, 'abc', [1.0], ['x', 1, 2], [[], 1, 2], [HUGE, 1, 2], [{}, 1, 2]),
        ('items', 'bytes'): ([0, 0, 0], ['x', 1, 2], [-1, -1, -1], None, [HUGE, 1, 1]),
        ('items', 'more'): (3, [1], [[], [], []]),
        ('tables',): (None, [], 'x', {'a': 3}, {'a': {}}, {'a': {'columns': {}}}),
        (*TABLE, 'columns'): (None, [], 'x', {}, {'domain': 3}, {'domain': ['x'], 'bits': [1, 2]}),
        (*TABLE, 'columns', 'bits'): (None, 'ab', ['x', []], [HUGE, 1], [{}, {}], [[1], [2]], [1]),
        (*TABLE, 'x'): (None, 3, [], 'nowhere'),
        (*TABLE, 'y'): (None, 3, {}, 'nowhere'),
        (*TABLE, 'by'): (None, 3, [], 'nowhere'),
        (*TABLE, 'more'): (3,),
        ('checkpoint',): (None, [], {}),
        ('options',): (None, [], 'x', {'a': 1}),
        ('suite',): (None, [], 'other'),
    }.items()
    for value in values
}


def make_pair(suite_result):
    return [Evaluation(run, 5, {'optim.lr': 0.1}, {'spoiled': suite_result}) for run in 'ab']


def use_result(suite_result, suite):
    """Prints, traces and pairs a result."""
    first, second = make_pair(suite_result)
    summarise_one(first)
    summarise_many([first, second])
    compute_difference(pair_items(suite_result, suite_result, suite), resamples=10)


def write_kept(tmp_path):
    path = kept.result_path(tmp_path, 5, REQUEST)
    kept.write_result(path, REQUEST, META, make_result())
    return path


def read_and_use(path, suite):
    """Reads a stored result and uses it. Returns the error of an invalid result."""
    try:
        stored = kept.read_result(path, REQUEST, META)
    except UnreadableFile as error:
        assert str(path) in str(error) and '\n' not in str(error)
        return str(error)
    if stored is not None:
        use_result(stored, suite)
    return ''


def test_written_result_is_used(tmp_path, suite):
    path = write_kept(tmp_path)
    assert read_and_use(path, suite) == ''
    assert kept.read_result(path, REQUEST, META).numbers == make_result().numbers


def spoiled_result(tmp_path, name):
    """Writes a result with another value and a valid seal, as a stranger could."""
    path = write_kept(tmp_path)
    record = json.loads(path.read_text())
    record.pop('sha256')
    RESULTS[name](record)
    path.write_text(json.dumps(record))
    return path


@pytest.mark.filterwarnings('ignore::RuntimeWarning')  # of a ratio whose weights are 0
@pytest.mark.parametrize('name', RESULTS)
def test_result_with_other_types_is_refused(tmp_path, suite, name):
    """Each value that a reader uses, in turn, has another type or length."""
    read_and_use(spoiled_result(tmp_path, name), suite)


@pytest.mark.full
@pytest.mark.filterwarnings('ignore::RuntimeWarning')
@pytest.mark.parametrize('name', RESULTS)
def test_page_shows_read_results(tmp_path, suite, name):
    path = spoiled_result(tmp_path, name)
    with contextlib.suppress(UnreadableFile):
        if stored := kept.read_result(path, REQUEST, META):
            write_evaluation_page(tmp_path / 'one.html', make_pair(stored)[:1], [REQUEST])
            write_evaluation_page(tmp_path / 'two.html', make_pair(stored), [REQUEST])


@pytest.mark.parametrize('name', [*NO_JSON, *STRANGE_FILES])
def test_invalid_file_is_computed_again(tmp_path, suite, name):
    path = write_kept(tmp_path)
    if name in NO_JSON:
        path.write_bytes(NO_JSON[name])
    else:
        STRANGE_FILES[name](path)
    assert read_like_evaluator(path) is None


def read_like_evaluator(path):
    """Returns the stored result as `Evaluator` reads it."""
    try:
        return kept.read_result(path, REQUEST, META)
    except (UnreadableFile, OSError) as error:
        assert str(path) in str(error)
        return None


MARK = file_name('fake', Server.destination)
GOOD = ('a', 'z')  # before and after the spoiled cell, 'm'


def spoil_line(**fields):
    """Inserts a line before the others in metrics.jsonl."""

    def spoil(cell):
        path = cell / 'metrics.jsonl'
        path.write_text(json.dumps({'step': 1, 'step_sec': 0.5} | fields) + '\n' + path.read_text())

    return spoil


def spoil_file(name, content):
    return lambda cell: (cell / name).write_bytes(content)


def spoil_json(name, **fields):
    """Rewrites a record with other fields, with a valid seal or without a seal."""

    def spoil(cell):
        record = json.loads((cell / name).read_text())
        record.pop('sha256', None)
        (cell / name).write_text(json.dumps(record | fields))

    return spoil


FILES = ('config.json', 'metrics.jsonl', 'summary.json', MARK)
RECORDS = (
    {
        f'{name}: {what}': (lambda cell, name=name, make=make: make(cell / name))
        for name in FILES
        for what, make in STRANGE_FILES.items()
    }
    | {
        f'{name}: {what}': spoil_file(name, content)
        for name in FILES
        for what, content in NO_JSON.items()
    }
    | {
        f'metrics.jsonl: {fields!r:.60}': spoil_line(**fields)
        for fields in (
            {'step': HUGE},
            {'step': 2**64},
            {'step': -5},
            {'step': 1.5},
            {'step': '1'},
            {'step': None},
            {'loss': HUGE},
            {'loss': 'x'},
            {'loss': {}},
            {'loss': math.nan},
            {'loss': True},
            {'loss': [[[[1.0]]]]},
            {'loss': [[], [[1]], 'x']},
            {'step_sec': HUGE},
            {'step_sec': 1e308},
            {'step_sec': -1e308},
            {'step_sec': 'x'},
            {'not_finite': []},
            {'not_finite': {'loss': 'x'}},
            {'not_finite': {'loss': []}},
            {'not_finite': {'loss': 'inf'}},
            {'\x1b[2J': 1.0},
            {'': 1.0},
            {'x' * 10**5: 1.0},
            {'\ud800': 1.0},
            {f'n{i}': i for i in range(5000)},
        )
    }
    | {
        f'summary.json: {fields!r:.60}': spoil_json('summary.json', **fields)
        for fields in (
            {'status': None},
            {'status': []},
            {'status': 3},
            {'status': {}},
            {'status': 'x'},
            {'best': HUGE},
            {'best': math.nan},
            {'best': {'a': {'b': [1]}}},
            {'warnings': 'x'},
            {'\ud800': '\ud800'},
        )
    }
    | {
        f'config.json: {fields!r:.60}': spoil_json('config.json', **fields)
        for fields in ({'optim': 3}, {'model': {'d_model': HUGE}}, {'x': {'\ud800': [math.nan]}})
    }
    | {
        f'mark: {fields!r:.60}': spoil_json(MARK, **fields)
        for fields in (
            {'step': 'x'},
            {'step': None},
            {'step': 1.5},
            {'step': True},
            {'step': HUGE},
            {'run': 3},
            {'run': "' or 1=1"},
            {'run': '../../x'},
            {'run': ''},
            {'began': 'x'},
            {'began': math.nan},
            {'began': HUGE},
            {'summary': []},
            {'config': 3},
            {'more': 1},
        )
    }
)


class Strict(Server):
    """A tracker with the limits of MLflow and W&B: only numbers that fit float64 and int64."""

    def open(self, run, name, began):
        session = super().open(run, name, began)
        send = session.send

        def strict(steps):
            for step in steps:
                assert 0 <= step.step < 2**63 and math.isfinite(step.seconds)
                assert all(isinstance(value, float) for value in step.values.values())
            send(steps)

        session.send = strict
        return session


@pytest.mark.parametrize('name', RECORDS)
def test_unsendable_run_leaves_others(tmp_path, name):
    """Its error names the file, or else everything readable is sent."""
    server, messages = Strict(), []
    for cell in (*GOOD, 'm'):
        begin(tmp_path / cell)
        train(tmp_path / cell, 1, 12)
        end(tmp_path / cell)
    assert send_all(Follower(tmp_path, 'fake', server, messages.append), lambda _: None)
    for cell in (*GOOD, 'm'):
        train(tmp_path / cell, 13, 16)
        end(tmp_path / cell, best=1.0)
    RECORDS[name](tmp_path / 'm')
    follower = Follower(tmp_path, 'fake', server, messages.append)
    send_all(follower, lambda _: None)
    for cell in GOOD:
        mark = read_mark(tmp_path / cell / MARK)
        assert server.points(mark.run) == on_disk(tmp_path / cell)
    assert not {tmp_path / cell for cell in GOOD} & follower.errors.keys()
    for text in follower.errors.values():
        assert str(tmp_path / 'm') in text and '\n' not in text, text


def test_unreadable_cells_do_not_block_others(tmp_path):
    """Three failures in a row mean that a tracker does not respond; an unreadable run does not
    count.
    """
    for i in range(15):
        begin(tmp_path / f'{i:02d}')
        (tmp_path / f'{i:02d}' / 'config.json').write_text('[')
    begin(tmp_path / 'z')
    train(tmp_path / 'z', 1, 5)
    end(tmp_path / 'z')
    server = Server()
    follower = Follower(tmp_path, 'fake', server, [].append)
    assert not send_all(follower, lambda _: None)
    assert server.points(read_mark(tmp_path / 'z' / MARK).run) == on_disk(tmp_path / 'z')
    assert len(follower.errors) == 15


OFFLINE = {
    'empty': b'',
    'a header': b':W&B\xdc\x01\x00',
    'zeros': bytes(100_000),
    'noise': bytes(range(256)) * 400,
    'a record that is none': b':W&B\xdc\x01\x00' + b'\0\0\0\0\x08\0\x01' + b'\xff' * 8,
    'a length beyond': b':W&B\xdc\x01\x00' + b'\0\0\0\0\xff\xff\x01' + b'x' * 8,
}


def offline_file(tmp_path):
    folder = tmp_path / 'wandb' / 'offline-run-20260101_000000-x'
    folder.mkdir(parents=True)
    return folder / 'run-x.wandb'


@pytest.mark.parametrize('name', [*OFFLINE, *STRANGE_FILES])
def test_invalid_wandb_files_hold_no_step(tmp_path, name):
    """Or an error names the file. A modification time in the future does not block."""
    path = offline_file(tmp_path)
    path.write_bytes(OFFLINE.get(name, b''))
    os.utime(path, (2**32, 2**32))
    if name in STRANGE_FILES:
        STRANGE_FILES[name](path)
    try:
        assert to_wandb._read_last_step(tmp_path, 'x') == -1
    except (ValueError, OSError) as error:
        assert str(path) in str(error)


def foreign(path):
    with contextlib.closing(sqlite3.connect(path)) as database:
        database.execute('create table experiments (x int)')


DATABASES = {
    'noise': lambda path: path.write_bytes(bytes(range(256)) * 40),
    'text': lambda path: path.write_text('not a database\n' * 99),
    'cut': lambda path: path.write_bytes(b'SQLite format 3\0' + bytes(50)),
    'of another program': foreign,
} | {name: make for name, make in STRANGE_FILES.items() if name != 'a device'}


@pytest.mark.parametrize('name', DATABASES)
def test_invalid_mlflow_database_is_refused_at_once(tmp_path, name):
    """MLflow itself retries ten times, for a hundred seconds."""
    path = tmp_path / 'mlflow.db'
    DATABASES[name](path)
    with pytest.raises((ValueError, OSError), match=r'mlflow\.db'):
        to_mlflow.check_database(f'sqlite:///{path}')


def test_locked_database_is_named_after_waiting(tmp_path, monkeypatch):
    path = tmp_path / 'mlflow.db'
    to_mlflow.check_database(f'sqlite:///{path}')  # it is not there yet
    with contextlib.closing(sqlite3.connect(path, isolation_level=None)) as database:
        database.execute('create table alembic_version (x int)')
        to_mlflow.check_database(f'sqlite:///{path}')
        database.execute('begin exclusive')
        monkeypatch.setattr(to_mlflow, 'LOCKED_SEC', 0.0)
        with pytest.raises(ValueError, match=r'mlflow\.db cannot be read .*database is locked'):
            to_mlflow.check_database(f'sqlite:///{path}')
