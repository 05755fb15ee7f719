"""Contract: whatever happens, a tracker has the points of metrics.jsonl, each of them once."""

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
    Killed,
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


def following(folder, server, said=None):
    return Follower(folder, 'fake', server, [].append if said is None else said.append)


def followed(folder, server, last):
    """The follower of a run that has come to a step, once it has sent what is there."""
    begin(folder)
    train(folder, 1, last)
    sender = following(folder, server)
    sender.serve_round()
    return sender


def send(folder, server):
    """One process that sends what is there."""
    assert send_all(following(folder, server), lambda _: pytest.fail('it did not work at once'))


def name_of(folder):
    return read_mark(folder / MARK).run


def has_all(folder, server):
    assert server.points(name_of(folder)) == on_disk(folder)


@pytest.mark.parametrize('knows', [True, False])
def test_every_point_is_sent_once_and_as_it_was(tmp_path, knows):
    """Sends 25 steps, with infinities and NaN of scalars and of heads; a later process has none."""
    server, run = Server(knows), tmp_path / 'run'
    write_run(run, 0, 25, best=1.5)
    send(run, server)
    has_all(run, server)
    points = server.points(name_of(run))
    assert points[3, 'grad_norm'] == 'inf' and points[12, 'entropy/layer_0/head_0'] == 'nan'
    assert server.ends[name_of(run)] == [
        ('done', {'status': 'done', 'parameters': 12, 'best': 1.5})
    ]
    opened = server.opened['run']
    send(run, server)
    assert server.opened['run'] == opened, 'nothing is new'


def test_a_step_is_sent_when_nothing_more_of_it_can_come(tmp_path):
    """Catches an evaluation that is lost: its step was sent before it was made."""
    server = Server()
    sender = followed(tmp_path, server, 9)
    assert max(step for step, _ in server.points(name_of(tmp_path))) == 8
    train(tmp_path, 10, 11)  # 10 has a row of training and one of validation
    sender.serve_round()
    assert (10, 'validation_ce') in server.points(name_of(tmp_path))
    end(tmp_path, 'failed')  # perhaps in the evaluation of step 11
    sender.serve_round()
    assert max(step for step, _ in server.points(name_of(tmp_path))) == 10
    go_on(tmp_path, 5, 15, 'diverged')
    sender.serve_round()
    has_all(tmp_path, server)


@pytest.mark.parametrize('knows', [True, False])
def test_steps_that_are_done_again_are_not_sent_again(tmp_path, knows):
    """Goes back under one follower, and under another one; the mesh is no other run."""
    server = Server(knows)
    sender = followed(tmp_path, server, 20)
    for mesh, last in ((1, 12), (2, 4)):
        go_back(tmp_path, last)
        begin(tmp_path, mesh=mesh)
        sender.serve_round()
        train(tmp_path, last + 1, 15)
        sender.serve_round()
        train(tmp_path, 16, 18)
    go_on(tmp_path, 18, 33)
    send(tmp_path, server)
    has_all(tmp_path, server)
    assert len(server.runs) == 1


def test_a_run_of_another_config_in_the_same_folder_is_another_run(tmp_path):
    server = Server()
    sender = followed(tmp_path, server, 20)
    first = name_of(tmp_path)
    before = server.points(first)
    (tmp_path / 'metrics.jsonl').unlink()
    write_run(tmp_path, 1, 5, lr=0.5)
    sender.serve_round()
    assert name_of(tmp_path) != first and server.points(first) == before
    has_all(tmp_path, server)


def test_two_runs_of_one_config_are_two(tmp_path):
    server = Server()
    for name in ('a', 'b'):
        write_run(tmp_path / name, 1, 3)
        send(tmp_path / name, server)
        has_all(tmp_path / name, server)
    assert len(server.runs) == 2


KILLS = ('before', 'midway', 'behind', 'at the end')
# A tracker that says its last step takes each step whole.
CASES = [('within', False), *((at, knows) for at in KILLS for knows in (True, False))]


@pytest.mark.parametrize(('at', 'knows'), CASES)
@pytest.mark.parametrize('sent', [0, 10])
@pytest.mark.parametrize('resumes', [False, True])
def test_a_killed_follower_leaves_nothing_twice_and_nothing_out(tmp_path, at, knows, sent, resumes):
    """Kills it with its first rows, or later, and training with it or not."""
    server = Server(knows)
    begin(tmp_path)
    sender = following(tmp_path, server)
    if sent:
        train(tmp_path, 1, sent)
        sender.serve_round()
    train(tmp_path, sent + 1, 24)
    end(tmp_path, 'stopped')
    server.kill = at
    with pytest.raises(Killed):
        send_all(sender)
    server.kill = None
    if resumes:
        go_on(tmp_path, 6, 30)
    send(tmp_path, server)
    has_all(tmp_path, server)
    assert len(server.runs) == 1 and server.ends[name_of(tmp_path)]


@pytest.mark.parametrize('at_once', [300, 1 << 20])
def test_what_a_tracker_has_lost_is_sent_again(tmp_path, monkeypatch, at_once):
    """Catches rows that were lost with the tracker's own process, before it had written them; also
    where they were read before it was asked.
    """
    server = Server()
    begin(tmp_path)
    train(tmp_path, 1, 12)
    following(tmp_path, server).serve_round()
    (points,) = server.runs.values()
    points[:] = [point for point in points if point[0] <= 7]
    monkeypatch.setattr('lm.record.metrics.MAX_READ_BYTES', at_once)
    train(tmp_path, 13, 20)
    end(tmp_path)
    send(tmp_path, server)
    has_all(tmp_path, server)


def test_a_mark_waits_for_the_close_of_a_session_that_keeps_rows_then(tmp_path):
    """Catches rows that a tracker had in memory alone, and that count as sent."""
    server = Server()
    server.certain_after = 'close'
    sender = followed(tmp_path, server, 12)
    assert server.runs and read_mark(tmp_path / MARK).step == -1
    sender.close()
    assert read_mark(tmp_path / MARK).step == 11


@pytest.mark.full
def test_five_hundred_cells_have_their_turns(tmp_path, monkeypatch):
    """Opens four sessions at once, no file between rounds, and serves all in the first round."""
    monkeypatch.setattr('lm.storage.files.sync', lambda path: None)
    server, n = Server(most_open=4), 500
    folders = [tmp_path / f'{i:08x}' for i in range(n)]
    for folder in folders:
        begin(folder, lr=1e-6 * int(folder.name, 16))
        train(folder, 1, 3)
    (tmp_path / 'sweep.json').write_text('{}')
    before = len(os.listdir('/proc/self/fd'))
    sender = following(tmp_path, server)
    sender.serve_round()
    assert len(server.runs) == n and {len(points) for points in server.runs.values()} == {12}
    for folder in folders:
        train(folder, 4, 4)
        end(folder)
    assert send_all(sender)
    for folder in folders:
        has_all(folder, server)
    assert server.most_seen == 4 and server.open_now == 0
    assert len(os.listdir('/proc/self/fd')) == before


def test_a_long_run_does_not_make_the_others_wait(tmp_path, monkeypatch):
    """Catches a first run that is sent to its end before the second one begins."""
    monkeypatch.setattr('lm.record.metrics.MAX_READ_BYTES', 1000)
    server = Server()
    for name, last in (('a', 200), ('b', 5)):
        write_run(tmp_path / name, 1, last, lr=last)
    sender = following(tmp_path, server)
    assert sender.serve_round()
    a, b = (server.points(name_of(tmp_path / name)) for name in 'ab')
    assert 0 < len(a) < 100 and len(b) > 0
    assert send_all(sender)
    has_all(tmp_path / 'a', server)
    has_all(tmp_path / 'b', server)


def test_sessions_that_are_dear_are_not_opened_again_at_once(tmp_path):
    server = Server(most_open=2, reopen_sec=1e6)
    for name in 'abc':
        begin(tmp_path / name, lr=ord(name))
        train(tmp_path / name, 1, 5)
    sender = following(tmp_path, server)
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
        has_all(tmp_path / name, server)


def test_an_error_of_one_run_leaves_the_others(tmp_path):
    server, said = Server(), []
    for name in 'abc':
        write_run(tmp_path / name, 1, 5, lr=ord(name))
    server.bad = ('b',)
    (tmp_path / 'c' / 'config.json').write_text('{')
    sender, waits = following(tmp_path, server, said), []
    assert not send_all(sender, waits.append)
    assert len(waits) == 3 and sender.errors.keys() == {tmp_path / 'b', tmp_path / 'c'}
    assert len(said) == 2, 'each is said once'
    has_all(tmp_path / 'a', server)
    server.bad = ()
    begin(tmp_path / 'c', lr=ord('c'))
    end(tmp_path / 'c')
    send(tmp_path, server)
    for name in 'bc':
        has_all(tmp_path / name, server)


def test_runs_that_fail_do_not_keep_the_next_ones_from_their_turn(tmp_path):
    """Catches rounds that all end at the same three runs."""
    server = Server()
    for name in 'abcdef':
        begin(tmp_path / name, lr=ord(name))
        train(tmp_path / name, 1, 5)
    end(tmp_path / 'f')
    server.bad = tuple('abcde')
    assert not send_all(following(tmp_path, server), [].append)
    has_all(tmp_path / 'f', server)


def test_a_tracker_that_is_down_is_asked_rarely_and_goes_on(tmp_path):
    """A round ends after three runs; the waits grow; all is sent when it answers again."""
    server, said, waits = Server(), [], []
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

    sender = following(tmp_path, server, said)
    assert follow(sender, has_ended)
    assert waits[:7] == [10.0, 20.0, 40.0, 80.0, 120.0, 120.0, 120.0] and waits[8] == 5.0
    assert said == ['fake: 0: no route to the tracker']
    for i in range(20):
        has_all(tmp_path / f'{i}', server)


def test_one_follower_at_a_time(tmp_path, monkeypatch):
    monkeypatch.setattr(follower_of, 'PATIENCE_SEC', 0.0)
    (tmp_path / 'cell').mkdir()
    (tmp_path / 'sweep.json').write_text('{}')
    with hold_follower_lock(tmp_path, 'fake', 'here'):
        for folder in (tmp_path, tmp_path / 'cell'):
            with (
                pytest.raises(InUseError, match='another process sends'),
                hold_follower_lock(folder, 'fake', 'here'),
            ):
                pass
        with hold_follower_lock(tmp_path, 'fake', 'elsewhere'):
            pass


def test_a_damaged_mark_is_said_with_what_to_do(tmp_path):
    server, said = Server(), []
    begin(tmp_path)
    train(tmp_path, 1, 5)
    following(tmp_path, server).serve_round()
    record = json.loads((tmp_path / MARK).read_text())
    (tmp_path / MARK).write_text(json.dumps(record | {'step': 2}))
    with pytest.raises(UnreadableFile, match=r'changed.*Delete'):
        read_mark(tmp_path / MARK)
    assert not send_all(following(tmp_path, server, said), [].append)
    assert len(said) == 1 and 'Delete' in said[0]


def test_a_run_that_trains_is_followed_to_its_end(tmp_path, monkeypatch):
    """The run is over when nobody has held it for a while."""
    clock, held = [0.0], []
    monkeypatch.setattr(follower_of.time, 'monotonic', lambda: clock[0])
    monkeypatch.setattr(follower_of.time, 'sleep', lambda s: clock.__setitem__(0, clock[0] + s))
    begin(tmp_path / 'cell')
    (tmp_path / 'sweep.json').write_text('{}')
    watch = follower_of.Watch(tmp_path)
    for _ in range(100):
        with hold_lock(tmp_path / 'cell' / '.lock'):
            held.append(watch(5.0))
    assert not any(held)
    left = [watch(5.0) for _ in range(14)]
    assert left == [False] * 11 + [True] * 3


def test_lines_are_read_as_they_are_appended(tmp_path):
    """Property: in any pieces, lines come out as they do all at once; damaged ones are left out."""
    begin(tmp_path)
    train(tmp_path, 0, 40)
    path = tmp_path / 'metrics.jsonl'
    lines = path.read_bytes().splitlines(True)
    lines[4:4] = [b'{"step": 1, "lo\n', b'\xff\n', b'[3]\n', b'{"step": "x"}\n', b'\n']
    lines[9:9] = [b'{"step": 3, "not_finite": 3}\n', b'{"step": 3, "not_finite": {"a": []}}\n']
    data = b''.join(lines)
    path.write_bytes(data)
    whole = StepTail(Run(tmp_path))
    expected = whole.read()[0] + whole.read_last()
    assert [step.step for step in expected] == list(range(41))
    assert [step.seconds for step in expected[:3]] == [0.0, 0.5, 1.0]
    draw = random.Random(0)
    for _ in range(5):
        tail, found = StepTail(Run(tmp_path)), []
        cuts = sorted(draw.sample(range(len(data)), 30))
        for cut in [*cuts, len(data)]:
            path.write_bytes(data[:cut])
            found += tail.read()[0]
        assert list(map(repr, found + tail.read_last())) == list(map(repr, expected))
