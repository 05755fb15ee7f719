"""Contract, with MLflow on sqlite: the database has the points of metrics.jsonl, each once."""

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
from tests.eval.sync.fakes import FollowerKilled, begin, end, go_on, on_disk, train, write_run
from tests.eval.sync.programs import TRAIN, finish, kill_when, start

pytestmark = [pytest.mark.full, pytest.mark.xdist_group('mlflow')]


@pytest.fixture(scope='module')
def database(tmp_path_factory):
    """Returns the URI of a database with MLflow's tables, whose creation takes ten seconds."""
    uri = f'sqlite:///{tmp_path_factory.mktemp("mlflow")}/mlflow.db'
    with warnings.catch_warnings():
        warnings.simplefilter('ignore')
        Mlflow(uri, 'first').client.search_experiments()
    return uri


def open_tracker(database, project):
    return Mlflow(database, project)


def read_tracker_mark(folder, tracker):
    return read_mark(folder / file_name('mlflow', tracker.destination))


def read_back(folder, tracker):
    """Returns {(step, tag): value} from MLflow; each point is there once."""
    mark, points = read_tracker_mark(folder, tracker), {}
    session = tracker.open(read_source(Run(folder)), mark.run, mark.began)
    run = tracker.client.get_run(session._id)
    for name in run.data.metrics:
        for step, values in session.read_points(name).items():
            assert len(values) == 1, (name, step, values)
            points[step, name] = repr(values[0])
    return points, run


def assert_has_all(folder, tracker):
    points, run = read_back(folder, tracker)
    assert points == on_disk(folder)
    return run


def test_run_is_sent_unchanged(database, tmp_path):
    """Sends infinities and NaN, config, summary and status; a resumed run has status RUNNING."""
    tracker, run = open_tracker(database, 'one'), tmp_path / 'named'
    write_run(run, 0, 25, 'stopped', device='2-core CPU')
    assert send_all(Follower(run, 'mlflow', tracker, print))
    stored_run = assert_has_all(run, tracker)
    assert stored_run.info.run_name == 'named' and stored_run.info.status == 'KILLED'
    assert stored_run.data.params == {'model.d_model': '8', 'optim.lr': '0.001'}
    assert (
        stored_run.data.tags['device'] == '2-core CPU' and stored_run.data.tags['mesh.data'] == '1'
    )
    history = tracker.client.get_metric_history(stored_run.info.run_id, 'grad_norm')
    assert {point.step: point.value for point in history}[3] == LARGEST, 'as MLflow has infinity'
    begin(run, mesh=8)
    train(run, 26, 40)
    sender = Follower(run, 'mlflow', tracker, print)
    sender.serve_round()
    assert tracker.client.get_run(stored_run.info.run_id).info.status == 'RUNNING'
    end(run)
    assert send_all(sender)
    stored_run = assert_has_all(run, tracker)
    assert stored_run.info.status == 'FINISHED' and stored_run.data.tags['mesh.data'] == '8'


@pytest.mark.parametrize('when', ['before', 'behind'])
@pytest.mark.parametrize('call', [1, 2, 4])
def test_killed_follower_sends_nothing_twice(database, tmp_path, monkeypatch, when, call):
    """Kills it before or after a request: of config, of the first rows, of the next rows."""
    monkeypatch.setattr('eval.sync.to_mlflow.MAX_POINTS', 7)
    tracker = open_tracker(database, f'{when}-{call}')
    write_run(tmp_path, 0, 14, 'stopped')
    log, calls = tracker.client.log_batch, []

    def log_or_kill(*arguments, **entities):
        calls.append(entities)
        if len(calls) == call and when == 'before':
            raise FollowerKilled
        log(*arguments, **entities)
        if len(calls) == call:
            raise FollowerKilled

    tracker.client.log_batch = log_or_kill
    with pytest.raises(FollowerKilled):
        send_all(Follower(tmp_path, 'mlflow', tracker, print))
    tracker = open_tracker(database, f'{when}-{call}')
    mark = read_tracker_mark(tmp_path, tracker)
    mark.began += 1.0  # no point equals another then, of which a database would keep one
    mark.write(tmp_path / file_name('mlflow', tracker.destination))
    go_on(tmp_path, 4, 16)
    assert send_all(Follower(tmp_path, 'mlflow', tracker, print))
    assert_has_all(tmp_path, tracker)
    (experiment,) = [tracker.client.get_experiment_by_name(f'{when}-{call}').experiment_id]
    assert len(tracker.client.search_runs([experiment])) == 1


def test_long_and_changed_params_are_no_error(database, tmp_path):
    tracker = open_tracker(database, 'params')
    begin(tmp_path)
    run = read_source(Run(tmp_path))
    run.config['data.source'] = 'x' * (MAX_PARAM_CHARS + 1)
    session = tracker.open(run, 'a', 0.0)
    run.config['optim.lr'] = 0.5
    tracker.open(run, 'a', 0.0)
    stored_run = tracker.client.get_run(session._id)
    assert stored_run.data.params['data.source'] == 'x' * MAX_PARAM_CHARS
    assert stored_run.data.params['optim.lr'] == '0.001'
    assert stored_run.data.tags['changed.optim.lr'] == '0.5'


def test_sweep_cells_are_runs(database, tmp_path):
    """Sends thirty cells from one process, which holds no more open files than for one cell."""
    tracker = open_tracker(database, 'cells')
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
        run = assert_has_all(folder, tracker)
        assert run.data.tags['evenkeel.sweep'] == tmp_path.name


def test_impossible_database_raises_one_line():
    with pytest.raises(ValueError, match=r'^mlflow at sqlite:////dev/null/x.db cannot be used: '):
        trackers.make_tracker('mlflow', 'sqlite:////dev/null/x.db')


def test_silent_server_is_error_within_seconds(tmp_path, monkeypatch):
    write_run(tmp_path, 0, 3)
    monkeypatch.setenv('MLFLOW_HTTP_REQUEST_MAX_RETRIES', '0')
    messages = []
    tracker = open_tracker('http://127.0.0.1:9', None)
    assert not send_all(
        Follower(tmp_path, 'mlflow', tracker, messages.append), lambda seconds: None
    )
    assert messages and all('\n' not in line and len(line) < 400 for line in messages)
    assert read_tracker_mark(tmp_path, tracker).step == -1


def count_metrics(database):
    """Returns the number of points in the database."""
    with sqlite3.connect(database.removeprefix('sqlite:///'), timeout=60) as connection:
        return connection.execute('select count(*) from metrics').fetchone()[0]


def test_killed_followers_send_everything_once(database, tmp_path):
    """Kills two followers by signal, each with some of its rows sent."""
    write_run(tmp_path, 0, 4000)
    flags = f'--workdir={tmp_path}', '--to=mlflow', f'--uri={database}', '--project=killed'
    n_before = count_metrics(database)
    for n_sent in (1, 2500):
        follower = start('-m', 'eval.sync', *flags)
        kill_when(follower, lambda minimum=n_before + n_sent: count_metrics(database) >= minimum)
    tracker = open_tracker(database, 'killed')
    n_stored, n_total = count_metrics(database) - n_before, len(on_disk(tmp_path))
    assert 2500 <= n_stored < n_total
    assert 'mlflow: 0 steps' not in finish(start('-m', 'eval.sync', *flags))
    assert_has_all(tmp_path, tracker)


def test_killed_and_resumed_run_is_followed(database, tmp_path):
    """Kills training: its follower sends complete steps, and the next run's follower the rest."""
    env = {'MLFLOW_TRACKING_URI': database, 'MLFLOW_EXPERIMENT_NAME': 'trained'}
    command = (*TRAIN, f'--workdir={tmp_path}', '--config.train.steps=60', '--track=mlflow')
    path = tmp_path / 'metrics.jsonl'
    kill_when(start(*command, **env), lambda: len(read_rows(path)) >= 35)
    stdout = finish(start(*command, **env))
    assert 'resuming after step' in stdout and 'done:' in stdout
    tracker = open_tracker(database, 'trained')
    assert send_all(Follower(tmp_path, 'mlflow', tracker, print))
    points, run = read_back(tmp_path, tracker)
    written = on_disk(tmp_path)
    assert points.keys() == written.keys()
    # A step that was done again has the rates of the first time.
    assert {key for key in points if points[key] != written[key]} <= {
        (step, name) for step, name in points if name in TIME_FIELDS
    }
    assert run.info.status == 'FINISHED' and run.data.params['train.steps'] == '60'
    assert 'device' in run.data.tags
