"""Contract, with MLflow on sqlite: points read back are those of metrics.jsonl, each once."""

import os
import sqlite3
import warnings

import pytest

from eval.sync import trackers
from eval.sync.follower import Follower, send_all
from eval.sync.marks import file_name, read_mark
from eval.sync.records import read_source
from eval.sync.to_mlflow import LARGEST, MAX_PARAM_CHARS, Mlflow
from lm.record.metrics import TIME_FIELDS, read_rows
from lm.record.run import Run
from tests.eval.sync.fakes import Killed, begin, end, go_on, on_disk, train, write_run
from tests.eval.sync.programs import TRAIN, finish, kill_when, start

pytestmark = [pytest.mark.full, pytest.mark.xdist_group('mlflow')]


@pytest.fixture(scope='module')
def database(tmp_path_factory):
    """A database with MLflow's tables, which take it ten seconds: made once."""
    uri = f'sqlite:///{tmp_path_factory.mktemp("mlflow")}/mlflow.db'
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        Mlflow(uri, 'first').client.search_experiments()
    return uri


def place(database, project):
    return Mlflow(database, project)


def mark_of(folder, tracker):
    return read_mark(folder / file_name('mlflow', tracker.where))


def read_back(folder, tracker):
    """{(step, tag): value} as MLflow gives it back, each of them once."""
    mark, found = mark_of(folder, tracker), {}
    session = tracker.open(read_source(Run(folder)), mark.run, mark.began)
    run = tracker.client.get_run(session._id)
    for name in run.data.metrics:
        for step, values in session.points(name).items():
            assert len(values) == 1, (name, step, values)
            found[step, name] = repr(values[0])
    return found, run


def has_all(folder, tracker):
    found, run = read_back(folder, tracker)
    assert found == on_disk(folder)
    return run


def test_a_run_is_sent_as_it_is(database, tmp_path):
    """Sends infinities and NaN, config, summary and status; a run that goes on is running."""
    tracker, run = place(database, 'one'), tmp_path / 'named'
    write_run(run, 0, 25, 'stopped', device='2-core CPU')
    assert send_all(Follower(run, 'mlflow', tracker, print))
    there = has_all(run, tracker)
    assert there.info.run_name == 'named' and there.info.status == 'KILLED'
    assert there.data.params == {'model.d_model': '8', 'optim.lr': '0.001'}
    assert there.data.tags['device'] == '2-core CPU' and there.data.tags['mesh.data'] == '1'
    history = tracker.client.get_metric_history(there.info.run_id, 'grad_norm')
    assert {one.step: one.value for one in history}[3] == LARGEST, 'as MLflow has infinity'
    begin(run, mesh=8)
    train(run, 26, 40)
    sender = Follower(run, 'mlflow', tracker, print)
    sender.serve_round()
    assert tracker.client.get_run(there.info.run_id).info.status == 'RUNNING'
    end(run)
    assert send_all(sender)
    there = has_all(run, tracker)
    assert there.info.status == 'FINISHED' and there.data.tags['mesh.data'] == '8'


@pytest.mark.parametrize('when', ['before', 'behind'])
@pytest.mark.parametrize('call', [1, 2, 4])
def test_a_killed_follower_leaves_nothing_twice(database, tmp_path, monkeypatch, when, call):
    """Kills it at a request, before it or behind it: of config, of some rows, of the next rows."""
    monkeypatch.setattr('eval.sync.to_mlflow.MAX_POINTS', 7)
    tracker = place(database, f'{when}-{call}')
    write_run(tmp_path, 0, 14, 'stopped')
    log, calls = tracker.client.log_batch, []

    def killed(*arguments, **what):
        calls.append(what)
        if len(calls) == call and when == 'before':
            raise Killed
        log(*arguments, **what)
        if len(calls) == call:
            raise Killed

    tracker.client.log_batch = killed
    with pytest.raises(Killed):
        send_all(Follower(tmp_path, 'mlflow', tracker, print))
    tracker = place(database, f'{when}-{call}')
    mark = mark_of(tmp_path, tracker)
    mark.began += 1.0  # no point equals another then, of which a database would keep one
    mark.write(tmp_path / file_name('mlflow', tracker.where))
    go_on(tmp_path, 4, 16)
    assert send_all(Follower(tmp_path, 'mlflow', tracker, print))
    has_all(tmp_path, tracker)
    (experiment,) = [tracker.client.get_experiment_by_name(f'{when}-{call}').experiment_id]
    assert len(tracker.client.search_runs([experiment])) == 1


def test_long_and_changed_params_are_no_error(database, tmp_path):
    tracker = place(database, 'params')
    begin(tmp_path)
    run = read_source(Run(tmp_path))
    run.config['data.source'] = 'x' * (MAX_PARAM_CHARS + 1)
    session = tracker.open(run, 'a', 0.0)
    run.config['optim.lr'] = 0.5
    tracker.open(run, 'a', 0.0)
    there = tracker.client.get_run(session._id)
    assert there.data.params['data.source'] == 'x' * MAX_PARAM_CHARS
    assert there.data.params['optim.lr'] == '0.001'
    assert there.data.tags['changed.optim.lr'] == '0.5'


def test_the_cells_of_a_sweep_are_runs(database, tmp_path):
    """Sends thirty cells from one process, which holds no more files open than for one."""
    tracker = place(database, 'cells')
    (tmp_path / 'sweep.json').write_text('{}')
    folders = [tmp_path / f'{i:02}' for i in range(30)]
    sender, files = Follower(tmp_path, 'mlflow', tracker, print), set()
    for last in (3, 6):
        for folder in folders:
            begin(folder, lr=int(folder.name))
            train(folder, last - 2, last)
            sender.serve_round()
            files.add(len(os.listdir('/proc/self/fd')))
    for folder in folders:
        end(folder)
    assert send_all(sender) and len(files) <= 3
    for folder in folders:
        run = has_all(folder, tracker)
        assert run.data.tags['evenkeel.sweep'] == tmp_path.name


def test_a_database_that_cannot_be_is_one_line():
    with pytest.raises(ValueError, match=r'^mlflow at sqlite:////dev/null/x.db cannot be used: '):
        trackers.make_tracker('mlflow', 'sqlite:////dev/null/x.db')


def test_a_server_that_does_not_answer_is_an_error_of_some_seconds(tmp_path, monkeypatch):
    write_run(tmp_path, 0, 3)
    monkeypatch.setenv('MLFLOW_HTTP_REQUEST_MAX_RETRIES', '0')
    said = []
    tracker = place('http://127.0.0.1:9', None)
    assert not send_all(Follower(tmp_path, 'mlflow', tracker, said.append), lambda seconds: None)
    assert said and all('\n' not in line and len(line) < 400 for line in said)
    assert mark_of(tmp_path, tracker).step == -1


def metrics_in(database):
    """How many points of one run the database has."""
    with sqlite3.connect(database.removeprefix('sqlite:///'), timeout=60) as connection:
        return connection.execute('select count(*) from metrics').fetchone()[0]


def test_processes_that_are_killed_while_they_send(database, tmp_path):
    """Kills two followers by signal, each with some of its rows sent."""
    write_run(tmp_path, 0, 4000)
    flags = f'--workdir={tmp_path}', '--to=mlflow', f'--uri={database}', '--project=killed'
    at = metrics_in(database)
    for more in (1, 2500):
        follower = start('-m', 'eval.sync', *flags)
        kill_when(follower, lambda least=at + more: metrics_in(database) >= least)
    tracker = place(database, 'killed')
    left, whole = metrics_in(database) - at, len(on_disk(tmp_path))
    assert 2500 <= left < whole
    assert 'mlflow: 0 steps' not in finish(start('-m', 'eval.sync', *flags))
    has_all(tmp_path, tracker)


def test_a_run_that_is_killed_and_goes_on_is_followed(database, tmp_path):
    """Kills training; its follower sends what is complete, and the next run's the rest."""
    env = {'MLFLOW_TRACKING_URI': database, 'MLFLOW_EXPERIMENT_NAME': 'trained'}
    command = (*TRAIN, f'--workdir={tmp_path}', '--config.train.steps=60', '--track=mlflow')
    path = tmp_path / 'metrics.jsonl'
    kill_when(start(*command, **env), lambda: len(read_rows(path)) >= 35)
    said = finish(start(*command, **env))
    assert 'resuming after step' in said and 'done:' in said
    tracker = place(database, 'trained')
    assert send_all(Follower(tmp_path, 'mlflow', tracker, print))
    found, run = read_back(tmp_path, tracker)
    written = on_disk(tmp_path)
    assert found.keys() == written.keys()
    # A step that was done again has the rates of the first time.
    assert {key for key in found if found[key] != written[key]} <= {
        (step, name) for step, name in found if name in TIME_FIELDS
    }
    assert run.info.status == 'FINISHED' and run.data.params['train.steps'] == '60'
    assert 'device' in run.data.tags
