"""Contract: whatever happens, a tracker has each point of metrics.jsonl once."""

import json
import os
import random

import pytest

from eval.sync import follower as follower_of
from eval.sync.follower import Follower, follow, hold_follower_lock, send_all
from eval.sync.marks import file_name, read_mark
from eval.sync.records import StepTail
from lm.record.run import Run
from lm.storage.files import InUseError, UnreadableFile, hold_lock
from tests.eval.sync.fakes import (
    FollowerKilled,
    Server,
    begin,
    end,
    go_back,
    go_on,
    on_disk,
    train,
    write_run,
)

MARK = file_name('fake', Server.destination)


def make_follower(folder, server, messages=None):
    return Follower(folder, 'fake', server, [].append if messages is None else messages.append)


def send_steps(folder, server, last):
    """Returns the follower of a run that has reached a step, after it has sent all rows."""
    begin(folder)
    train(folder, 1, last)
    sender = make_follower(folder, server)
    sender.serve_round()
    return sender


def send(folder, server):
    """Runs one process that sends all rows."""
    assert send_all(make_follower(folder, server), lambda _: pytest.fail('it did not work at once'))


def read_name(folder):
    return read_mark(folder / MARK).run


def assert_has_all(folder, server):
    assert server.points(read_name(folder)) == on_disk(folder)


@pytest.mark.parametrize('knows', [True, False])
def test_every_point_is_sent_once(tmp_path, knows):
    """Sends 25 steps, with infinities and NaN of scalars and of heads; a later process sends
    nothing.
    """
    server, run = Server(knows), tmp_path / 'run'
    write_run(run, 0, 25, best=1.5)
    send(run, server)
    assert_has_all(run, server)
    points = server.points(read_name(run))
    assert points[3, 'grad_norm'] == 'inf' and points[12, 'entropy/layer_0/head_0'] == 'nan'
    assert server.ends[read_name(run)] == [
        ('done', {'status': 'done', 'parameters': 12, 'best': 1.5})
    ]
    opened = server.opened['run']
    send(run, server)
    assert server.opened['run'] == opened, 'nothing is new'


def test_step_is_sent_once_it_is_complete(tmp_path):
    """Catches a lost evaluation: its step was sent before it was made."""
    server = Server()
    sender = send_steps(tmp_path, server, 9)
    assert max(step for step, _ in server.points(read_name(tmp_path))) == 8
    train(tmp_path, 10, 11)  # 10 has a row of training and one of validation
    sender.serve_round()
    assert (10, 'validation_ce') in server.points(read_name(tmp_path))
    end(tmp_path, 'failed')  # perhaps in the evaluation of step 11
    sender.serve_round()
    assert max(step for step, _ in server.points(read_name(tmp_path))) == 10
    go_on(tmp_path, 5, 15, 'diverged')
    sender.serve_round()
    assert_has_all(tmp_path, server)


@pytest.mark.parametrize('knows', [True, False])
def test_repeated_steps_are_not_sent_again(tmp_path, knows):
    """Goes back under one follower, and under another; another mesh is no other run."""
    server = Server(knows)
    sender = send_steps(tmp_path, server, 20)
    for mesh, last in ((1, 12), (2, 4)):
        go_back(tmp_path, last)
        begin(tmp_path, mesh=mesh)
        sender.serve_round()
        train(tmp_path, last + 1, 15)
        sender.serve_round()
        train(tmp_path, 16, 18)
    go_on(tmp_path, 18, 33)
    send(tmp_path, server)
    assert_has_all(tmp_path, server)
    assert len(server.runs) == 1


def test_other_config_in_same_folder_is_other_run(tmp_path):
    server = Server()
    sender = send_steps(tmp_path, server, 20)
    first = read_name(tmp_path)
    before = server.points(first)
    (tmp_path / 'metrics.jsonl').unlink()
    write_run(tmp_path, 1, 5, lr=0.5)
    sender.serve_round()
    assert read_name(tmp_path) != first and server.points(first) == before
    assert_has_all(tmp_path, server)


def test_equal_configs_are_two_runs(tmp_path):
    server = Server()
    for name in ('a', 'b'):
        write_run(tmp_path / name, 1, 3)
        send(tmp_path / name, server)
        assert_has_all(tmp_path / name, server)
    assert len(server.runs) == 2


KILLS = ('before', 'midway', 'behind', 'at the end')
# A tracker that reports its last step stores each step whole.
CASES = [('within', False), *((at, knows) for at in KILLS for knows in (True, False))]


@pytest.mark.parametrize(('at', 'knows'), CASES)
@pytest.mark.parametrize('sent', [0, 10])
@pytest.mark.parametrize('resumes', [False, True])
def test_killed_follower_sends_every_point_once(tmp_path, at, knows, sent, resumes):
    """Kills it at its first rows, or later; training resumes or not."""
    server = Server(knows)
    begin(tmp_path)
    sender = make_follower(tmp_path, server)
    if sent:
        train(tmp_path, 1, sent)
        sender.serve_round()
    train(tmp_path, sent + 1, 24)
    end(tmp_path, 'stopped')
    server.kill = at
    with pytest.raises(FollowerKilled):
        send_all(sender)
    server.kill = None
    if resumes:
        go_on(tmp_path, 6, 30)
    send(tmp_path, server)
    assert_has_all(tmp_path, server)
    assert len(server.runs) == 1 and server.ends[read_name(tmp_path)]


@pytest.mark.parametrize('at_once', [300, 1 << 20])
def test_lost_points_are_sent_again(tmp_path, monkeypatch, at_once):
    """Catches rows that were lost with the tracker's own process, before it had written them; also
    if they were read before the tracker was asked.
    """
    server = Server()
    begin(tmp_path)
    train(tmp_path, 1, 12)
    make_follower(tmp_path, server).serve_round()
    (points,) = server.runs.values()
    points[:] = [point for point in points if point[0] <= 7]
    monkeypatch.setattr('lm.record.metrics.MAX_READ_BYTES', at_once)
    train(tmp_path, 13, 20)
    end(tmp_path)
    send(tmp_path, server)
    assert_has_all(tmp_path, server)


def test_mark_waits_for_closed_session(tmp_path):
    """Catches rows that a tracker had only in memory, and that count as sent."""
    server = Server()
    server.certain_after = 'close'
    sender = send_steps(tmp_path, server, 12)
    assert server.runs and read_mark(tmp_path / MARK).step == -1
    sender.close()
    assert read_mark(tmp_path / MARK).step == 11


@pytest.mark.full
def test_five_hundred_cells_take_turns(tmp_path, monkeypatch):
    """Opens four sessions at once and no file between rounds, and serves all cells in the first
    round.
    """
    monkeypatch.setattr('lm.storage.files.sync', lambda path: None)
    server, n = Server(most_open=4), 500
    folders = [tmp_path / f'{i:08x}' for i in range(n)]
    for folder in folders:
        begin(folder, lr=1e-6 * int(folder.name, 16))
        train(folder, 1, 3)
    (tmp_path / 'sweep.json').write_text('{}')
    before = len(os.listdir('/proc/self/fd'))
    sender = make_follower(tmp_path, server)
    sender.serve_round()
    assert len(server.runs) == n and {len(points) for points in server.runs.values()} == {12}
    for folder in folders:
        train(folder, 4, 4)
        end(folder)
    assert send_all(sender)
    for folder in folders:
        assert_has_all(folder, server)
    assert server.most_seen == 4 and server.open_now == 0
    assert len(os.listdir('/proc/self/fd')) == before


def test_long_run_does_not_delay_others(tmp_path, monkeypatch):
    """Catches a first run that is sent to its end before the second one begins."""
    monkeypatch.setattr('lm.record.metrics.MAX_READ_BYTES', 1000)
    server = Server()
    for name, last in (('a', 200), ('b', 5)):
        write_run(tmp_path / name, 1, last, lr=last)
    sender = make_follower(tmp_path, server)
    assert sender.serve_round()
    a, b = (server.points(read_name(tmp_path / name)) for name in 'ab')
    assert 0 < len(a) < 100 and len(b) > 0
    assert send_all(sender)
    assert_has_all(tmp_path / 'a', server)
    assert_has_all(tmp_path / 'b', server)


def test_expensive_sessions_are_not_reopened_early(tmp_path):
    server = Server(most_open=2, reopen_sec=1e6)
    for name in 'abc':
        begin(tmp_path / name, lr=ord(name))
        train(tmp_path / name, 1, 5)
    sender = make_follower(tmp_path, server)
    for last in (6, 7):
        sender.serve_round()
        for name in 'abc':
            train(tmp_path / name, last, last)
    sender.serve_round()
    assert server.opened == {'a': 1, 'b': 1, 'c': 1}
    for name in 'abc':
        end(tmp_path / name)
    assert send_all(sender)
    for name in 'abc':
        assert_has_all(tmp_path / name, server)


def test_run_error_does_not_affect_other_runs(tmp_path):
    server, messages = Server(), []
    for name in 'abc':
        write_run(tmp_path / name, 1, 5, lr=ord(name))
    server.bad = ('b',)
    (tmp_path / 'c' / 'config.json').write_text('{')
    sender, waits = make_follower(tmp_path, server, messages), []
    assert not send_all(sender, waits.append)
    assert len(waits) == 3 and sender.errors.keys() == {tmp_path / 'b', tmp_path / 'c'}
    assert len(messages) == 2, 'each is said once'
    assert_has_all(tmp_path / 'a', server)
    server.bad = ()
    begin(tmp_path / 'c', lr=ord('c'))
    end(tmp_path / 'c')
    send(tmp_path, server)
    for name in 'bc':
        assert_has_all(tmp_path / name, server)


def test_failing_runs_do_not_block_next_runs(tmp_path):
    """Catches rounds that all end at the same three runs."""
    server = Server()
    for name in 'abcdef':
        begin(tmp_path / name, lr=ord(name))
        train(tmp_path / name, 1, 5)
    end(tmp_path / 'f')
    server.bad = tuple('abcde')
    assert not send_all(make_follower(tmp_path, server), [].append)
    assert_has_all(tmp_path / 'f', server)


def test_unreachable_tracker_is_retried_rarely(tmp_path):
    """A round ends after three runs; the waits grow; everything is sent when the tracker answers
    again.
    """
    server, messages, waits = Server(), [], []
    for i in range(20):
        begin(tmp_path / f'{i}', lr=i)
        train(tmp_path / f'{i}', 1, 5)
    server.down = True

    def has_ended(seconds):
        assert server.asked == 3 * len(waits) + 3 or not server.down
        waits.append(seconds)
        if len(waits) == 7:
            server.down = False
            for i in range(20):
                end(tmp_path / f'{i}')
        return len(waits) == 9

    sender = make_follower(tmp_path, server, messages)
    assert follow(sender, has_ended)
    assert waits[:7] == [10.0, 20.0, 40.0, 80.0, 120.0, 120.0, 120.0] and waits[8] == 5.0
    assert messages == ['fake: 0: no route to the tracker']
    for i in range(20):
        assert_has_all(tmp_path / f'{i}', server)


def test_second_follower_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(follower_of, 'PATIENCE_SEC', 0.0)
    (tmp_path / 'cell').mkdir()
    (tmp_path / 'sweep.json').write_text('{}')
    with hold_follower_lock(tmp_path, 'fake', 'here'):
        for folder in (tmp_path, tmp_path / 'cell'):
            with (
                pytest.raises(InUseError, match='another process is sending'),
                hold_follower_lock(folder, 'fake', 'here'),
            ):
                pass
        with hold_follower_lock(tmp_path, 'fake', 'elsewhere'):
            pass


def test_damaged_mark_is_reported_with_advice(tmp_path):
    server, messages = Server(), []
    begin(tmp_path)
    train(tmp_path, 1, 5)
    make_follower(tmp_path, server).serve_round()
    record = json.loads((tmp_path / MARK).read_text())
    (tmp_path / MARK).write_text(json.dumps(record | {'step': 2}))
    with pytest.raises(UnreadableFile, match=r'changed.*Delete'):
        read_mark(tmp_path / MARK)
    assert not send_all(make_follower(tmp_path, server, messages), [].append)
    assert len(messages) == 1 and 'Delete' in messages[0]


def test_training_run_is_followed_to_its_end(tmp_path, monkeypatch):
    """The run is over when no process has held it for a while."""
    clock, while_training = [0.0], []
    monkeypatch.setattr(follower_of.time, 'monotonic', lambda: clock[0])
    monkeypatch.setattr(follower_of.time, 'sleep', lambda s: clock.__setitem__(0, clock[0] + s))
    begin(tmp_path / 'cell')
    (tmp_path / 'sweep.json').write_text('{}')
    watch = follower_of.Watch(tmp_path)
    for _ in range(100):
        with hold_lock(tmp_path / 'cell' / '.lock'):
            while_training.append(watch(5.0))
    assert not any(while_training)
    afterwards = [watch(5.0) for _ in range(14)]
    assert afterwards == [False] * 11 + [True] * 3


def test_tail_reads_appended_lines(tmp_path):
    """Property: lines read in any pieces equal lines read at once; damaged lines are left out."""
    begin(tmp_path)
    train(tmp_path, 0, 40)
    path = tmp_path / 'metrics.jsonl'
    lines = path.read_bytes().splitlines(True)
    lines[4:4] = [b'{"step": 1, "lo\n', b'\xff\n', b'[3]\n', b'{"step": "x"}\n', b'\n']
    lines[9:9] = [b'{"step": 3, "not_finite": 3}\n', b'{"step": 3, "not_finite": {"a": []}}\n']
    content = b''.join(lines)
    path.write_bytes(content)
    whole = StepTail(Run(tmp_path))
    expected = whole.read()[0] + whole.read_last()
    assert [step.step for step in expected] == list(range(41))
    assert [step.seconds for step in expected[:3]] == [0.0, 0.5, 1.0]
    rng = random.Random(0)
    for _ in range(5):
        tail, steps = StepTail(Run(tmp_path)), []
        cuts = sorted(rng.sample(range(len(content)), 30))
        for cut in [*cuts, len(content)]:
            path.write_bytes(content[:cut])
            steps += tail.read()[0]
        assert list(map(repr, steps + tail.read_last())) == list(map(repr, expected))
