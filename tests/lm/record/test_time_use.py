"""Reference: seconds by part and goodput, with times that were chosen by hand, and of real runs."""

import json
import os
import types
from datetime import datetime

import pytest

from eval.report.tables import time_rows
from lm.launch.invocation import describe_invocation
from lm.record import time_use
from lm.record.checkpoint import read_meta
from lm.record.metrics import Throughput, read_rows
from lm.record.run import Run
from lm.record.time_use import PARTS, append_start, read_starts, start_record, summarize_time
from lm.run.journal import Journal
from lm.storage.files import read_json
from tests.commands import tiny
from tests.sweep_helpers import base, before_step, cell_folders, poison_at
from train import DONE, train, train_sweep

KILLED, STOPPED = None, 'stopped'


def rows_at(*pairs):
    return [{'step': step, 'step_sec': sec} for step, sec in pairs]


def test_a_start_counts_what_a_kill_cost():
    """Rows of every tenth step; killed after step 40, with a checkpoint of step 25."""
    dropped = [*rows_at((30, 0.5), (40, 0.25)), {'step': 40, 'validation_ce': 3.0}]
    start = start_record(1000.0, 25, KILLED, 940.0, dropped)
    assert start['redone_steps'] == 15
    assert start['redone_sec'] == 5 * 0.5 + 10 * 0.25  # of the first row only those since step 25
    assert (start['down_sec'], start['idle_sec']) == (60.0, 0.0)
    assert start['began'] == '1970-01-01T00:16:40+00:00'


@pytest.mark.parametrize(
    ('status', 'last_sign', 'expected'),
    [
        (None, None, (0.0, 0.0)),
        (STOPPED, 400.0, (600.0, 0.0)),
        ('done', 400.0, (0.0, 600.0)),
        (None, 1001.0, (0.0, 0.0)),  # the clock was set back
    ],
    ids=['first start', 'stopped', 'done, now extended', 'clock set back'],
)
def test_gap_is_lost_unless_the_run_was_done(status, last_sign, expected):
    start = start_record(1000.0, 0, status, last_sign, [])
    assert (start['down_sec'], start['idle_sec'], start['redone_sec']) == (*expected, 0.0)


def test_parts_add_up_to_the_time_since_the_first_start():
    """First start at 100, killed at 160, again at 200 (down 40), done at 250; extended at 1250."""
    starts = [
        start_record(100.0, 0, KILLED, None, []),
        start_record(200.0, 10, KILLED, 160.0, rows_at((14, 2.0))),
        start_record(1250.0, 20, 'done', 250.0, []),
    ]
    summary = summarize_time(starts, {'steps': 60.0, 'compile': 30.0, 'data_wait': 5.0}, 1300.0)
    assert summary['elapsed_sec'] == 200.0 and summary['starts'] == 3
    assert summary['goodput'] == 0.3
    seconds = summary['seconds']
    assert (seconds['redone'], seconds['down'], seconds['steps']) == (8.0, 40.0, 60.0)
    assert seconds['uncounted'] == 200.0 - 60 - 30 - 5 - 8 - 40
    assert list(seconds) == list(PARTS) and sum(seconds.values()) == 200.0
    assert summarize_time([], {'steps': 1.0}, 10.0) == {}  # a run of an older version


def test_damaged_line_leaves_others(tmp_path):
    start = start_record(100.0, 0, KILLED, None, [])
    append_start(tmp_path, start)
    path = tmp_path / 'starts.jsonl'
    path.write_text(path.read_text() + '{"began": "2026-11-')  # a power cut
    append_start(tmp_path, start | {'step': 5})
    path.write_text(path.read_text() + '{"step": 7, "began": 3}\n')
    assert [line['step'] for line in read_starts(tmp_path)] == [0, 5]


def test_clock_counts_steps_and_not_pauses(monkeypatch):
    clock_face = types.SimpleNamespace(time=0.0)
    monkeypatch.setattr('lm.record.metrics.time.perf_counter', lambda: clock_face.time)
    clock = Throughput(1.0, lambda rate: rate)

    def wait(sec):
        clock_face.time += sec

    wait(3.0)
    clock.add_wait(1.0)
    clock.steps, clock.tokens = 2, 8
    assert clock.spent() == (3.0, 1.0)
    clock.read()
    wait(2.0)
    clock.pause()
    wait(50.0)
    assert clock.spent() == (5.0, 1.0)
    clock.resume()
    wait(4.0)
    assert clock.spent() == (9.0, 1.0)


def test_preparation_leaves_the_start(monkeypatch):
    times = iter([2.0, 7.0])
    monkeypatch.setattr(time_use.time, 'perf_counter', lambda: next(times))
    preparation = time_use.Preparation(100.0)
    with preparation.time_part('data'):
        pass
    monkeypatch.setattr(time_use.time, 'time', lambda: 112.0)
    assert preparation.measure() == {'data': 5.0, 'start': 7.0}


def test_process_began_before_now():
    """Catches a wrong field of /proc, or a wrong unit."""
    age = time_use.time.time() - time_use.process_start()
    assert 0 <= age < 7 * 86400 and (age > 0.1 or not os.path.exists('/proc/self/stat'))


def train_until_killed(workdir, corpus, monkeypatch):
    """Trains to step 6 of 12 with checkpoints at 4 and 8, and is killed there."""

    class Killed(BaseException):
        pass

    def kill(wave):
        if wave.slots[0].journal.step == 7:
            raise Killed

    with monkeypatch.context() as patch, pytest.raises(Killed):
        before_step(patch, kill)
        train(tiny(corpus, train_checkpoint_steps='0'), workdir)


@pytest.mark.full
def test_killed_run_counts_what_it_does_again(corpus, tmp_path, monkeypatch, programs_once):
    train_until_killed(tmp_path, corpus, monkeypatch)
    rows = read_rows(tmp_path / 'metrics.jsonl')
    lost = [row['step_sec'] for row in rows if 'step_sec' in row and row['step'] > 4]
    assert len(lost) == 2
    unfinished = Run(tmp_path).results()
    assert 0 < unfinished['goodput'] < 1 and 'seconds' not in unfinished
    # Before its first step a run has not spent more time than has passed.
    checkpoint = tmp_path / 'checkpoints' / '0'
    counted = read_meta(checkpoint.parent, 0)['counters']['seconds']
    (began,) = [datetime.fromisoformat(row['began']) for row in read_starts(tmp_path)]
    assert sum(counted.values()) <= checkpoint.stat().st_mtime - began.timestamp()
    assert train(tiny(corpus, train_checkpoint_steps='0'), tmp_path) == DONE
    first, second = read_starts(tmp_path)
    assert (first['step'], second['step'], second['redone_steps']) == (0, 4, 2)
    assert second['redone_sec'] == pytest.approx(sum(lost))
    assert second['sources'] == first['sources'] and second['command'] is None  # of pytest
    summary = read_json(tmp_path / 'summary.json')
    seconds = summary['seconds']
    # Time that two parts counted would exceed the whole.
    assert sum(seconds.values()) == pytest.approx(summary['elapsed_sec'])
    step_secs = [
        row['step_sec'] for row in read_rows(tmp_path / 'metrics.jsonl') if 'step_sec' in row
    ]
    assert seconds['steps'] + seconds['data_wait'] >= sum(step_secs) * (1 - 1e-9)
    assert summary['goodput'] == pytest.approx(seconds['steps'] / summary['elapsed_sec'])
    assert seconds['restoring'] > 0 and seconds['evaluation'] > 0 and seconds['saving'] > 0


def test_undisturbed_run_counts_nothing_twice(whole):
    summary = read_json(whole / 'summary.json')
    assert sum(summary['seconds'].values()) == pytest.approx(summary['elapsed_sec'])
    assert summary['seconds']['redone'] == summary['seconds']['down'] == 0
    assert summary['seconds']['data'] > 0 and summary['starts'] == 1
    compile_sec = summary['seconds']['compile']
    assert compile_sec >= 0 and sum(summary['seconds'].values()) > compile_sec


def test_rollback_restores_the_steps_at_its_checkpoint():
    """Steps took 30 s up to the checkpoint, and 12 s more with 3 s of waiting since."""
    before = {'steps': 42.0, 'data_wait': 8.0}
    reset = {'steps': 41.0, 'data_wait': 8.0}  # the clock was reset
    journal = types.SimpleNamespace(spent=time_use.Seconds(float), seconds=lambda: reset)
    Journal._count_redone(journal, before, {'steps': 30.0, 'data_wait': 5.0})
    assert journal.spent == {'steps': -11.0, 'data_wait': -3.0, 'redone': 15.0}


@pytest.mark.full
def test_rolled_back_run_counts_nothing_twice(corpus, tmp_path, monkeypatch, programs_once):
    before_step(monkeypatch, poison_at(6))
    assert train(tiny(corpus, train_on_divergence='rollback'), tmp_path) == DONE
    summary = read_json(tmp_path / 'summary.json')
    assert sum(summary['seconds'].values()) == pytest.approx(summary['elapsed_sec'])
    assert summary['seconds']['redone'] > 0


@pytest.mark.full
def test_sweep_cells_count_nothing_twice(corpus, tmp_path):
    """Each cell has the seconds of its wave, which it shares with the others."""
    assert train_sweep(base(corpus), {'optim.lr': (0.003, 0.002)}, tmp_path) == DONE
    summaries = [read_json(path / 'summary.json') for path in cell_folders(tmp_path).values()]
    assert [summary['side_by_side'] for summary in summaries] == [2, 2]
    for summary in summaries:
        assert sum(summary['seconds'].values()) == pytest.approx(summary['elapsed_sec'])
        assert summary['seconds']['compile'] > 0 and summary['seconds']['data'] > 0


def test_command_and_question_come_from_train(monkeypatch, tmp_path):
    config = tmp_path / 'wide.py'
    config.write_text('"""Wide layers.\n\nQuestion: do they help?\n"""\n')
    flag = types.SimpleNamespace(config_filename=str(config))
    monkeypatch.setattr('lm.launch.invocation.flags.FLAGS', {'config': flag})
    name = 'lm.launch.invocation.config_flags.get_config_filename'
    monkeypatch.setattr(name, lambda flag: flag.config_filename)
    monkeypatch.setattr('sys.argv', ['/x/train.py', f'--config={config}', '--a=b c'])
    invocation = describe_invocation()
    assert invocation['command'] == f"/x/train.py --config={config} '--a=b c'"
    assert invocation['question'] == 'Wide layers.\n\nQuestion: do they help?'
    monkeypatch.setattr('sys.argv', ['worker.py', '--password=x'])
    assert describe_invocation() == {'command': None, 'question': None}


def test_report_adds_up_runs_and_divides_those_side_by_side():
    single = {'seconds': json.dumps({'steps': 30.0, 'compile': 10.0}), 'side_by_side': 1}
    beside = {'seconds': json.dumps({'steps': 40.0, 'start': 20.0}), 'side_by_side': 2}
    rows = time_rows([single, beside, beside, {'seconds': None, 'side_by_side': None}])
    assert [tuple(row.values()) for row in rows] == [
        ('steps', '70.0', '70.0%'),
        ('start: imports, devices, weights', '20.0', '20.0%'),
        ('compile', '10.0', '10.0%'),
        ('all', '100.0', 'goodput 70.0%'),
    ]
    assert time_rows([{'seconds': None, 'side_by_side': None}]) == []
