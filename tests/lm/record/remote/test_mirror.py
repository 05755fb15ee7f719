"""A folder and the workdir in a bucket that it is kept the same as: what is written when, what is
taken for whole, and which of the two is right. Files of any content stand for those of a run.
"""

import itertools
import json
import os
import shutil
import time
from pathlib import Path

import pytest

from lm.record.metrics import read_rows
from lm.record.remote.local_copy import (
    LocalCopy,
    fetch_checkpoints,
    fetch_records,
    split_checkpoint_url,
)
from lm.record.remote.mirror import KIND, Mirror, PushLoop, check_is_workdir
from lm.record.run import Run
from lm.storage import complete_folders
from lm.storage.buckets import Bucket, BucketError, RequestRefused, Times, open_bucket
from lm.storage.files import seal_record, write_json
from lm.storage.lease import LEASE, Lease
from tests.lm.record import test_checkpoints as checkpoints

pytestmark = pytest.mark.xdist_group('buckets')


@pytest.fixture
def machine(bucket_url, tmp_path, monkeypatch):
    """machine(name) -> a Mirror of a process that begins there, and has brought its folder up to
    date.
    """
    said = []

    def begin(name: str, url: str = bucket_url) -> Mirror:
        monkeypatch.setenv('EVENKEEL_CACHE', str(tmp_path / name))
        bucket = open_bucket(url)
        check_is_workdir(bucket)
        copy = LocalCopy(bucket, KIND)
        copy.open()
        lease = Lease(bucket, copy.id, 60.0)
        lease.acquire(said.append, 0.0, is_only=True)
        mirror = Mirror(copy, lease, Times(), said.append)
        mirror.pull()
        said.append(mirror.describe())
        mirror.said = said
        return mirror

    return begin


def end(mirror: Mirror) -> None:
    """As a process does that ends by itself."""
    mirror.lease._write(is_held=False)


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def train(folder: Path, step: int, of: str = 'a') -> None:
    """What a run leaves that has come to a checkpoint."""
    write(folder, 'config.json', '{}')
    write(folder, 'metrics.jsonl', ''.join(f'{i} of {of}\n' for i in range(1, step + 1)))
    for item in ('meta/metadata', 'weights/d/0'):
        write(folder, f'checkpoints/{step}/{item}', f'{item} {step} of {of}')


def train_and_push(mirror: Mirror, step: int, of: str = 'a') -> Mirror:
    train(mirror.copy.folder, step, of)
    mirror.push()
    return mirror


def left(mirror: Mirror, step: int, of: str = 'a') -> Mirror:
    """What a process leaves that trains to `step`, and ends by itself."""
    end(train_and_push(mirror, step, of))
    return mirror


def complete(bucket: Bucket) -> set[str]:
    return set(complete_folders.list_complete_folders(bucket, bucket.list()))


def files(folder: Path) -> dict[str, str]:
    return {n: (folder / n).read_text() for n in complete_folders.list_files(folder)}


def names(bucket: Bucket) -> set[str]:
    return set(bucket.list()) - {LEASE}


def watched(monkeypatch) -> list[str]:
    """What is written and deleted from now on, as '+name' and '-name'."""
    done, write, delete = [], Bucket.write, Bucket.delete

    def noting_write(bucket, name, content):
        done.append(f'+{name}')
        return write(bucket, name, content)

    def noting_delete(bucket, names):
        names = list(names)
        done.extend(f'-{name}' for name in names)
        delete(bucket, names)

    monkeypatch.setattr(Bucket, 'write', noting_write)
    monkeypatch.setattr(Bucket, 'delete', noting_delete)
    return done


@pytest.mark.parametrize('kind', ['bucket_url', 'gs_url'])
def test_another_machine_gets_what_the_first_left(kind, machine, request):
    url = request.getfixturevalue(kind)
    first = machine('a', url)
    train(first.copy.folder, 4)
    train(first.copy.folder, 8)
    write(first.copy.folder, 'summary.json', '{"status": "stopped"}')
    first.push()
    end(first)
    second = machine('b', url)
    assert files(second.copy.folder) == files(first.copy.folder)
    assert second.said[-1].endswith(f'checkpoints up to step 8; trained in {second.copy.folder}')


def test_rows_come_before_a_checkpoint_its_mark_behind_it_and_the_summary_last(
    machine, monkeypatch
):
    mirror = machine('a')
    train(mirror.copy.folder, 4)
    train(mirror.copy.folder, 8)
    write(mirror.copy.folder, 'summary.json', '{"status": "done"}')
    done = watched(monkeypatch)
    mirror.push()
    at = {name: i for i, name in enumerate(done)}
    assert done[0] == '+config.json' and done[-1] == '+summary.json'
    of_8 = [at['+checkpoints/8/meta/metadata'], at['+checkpoints/8/weights/d/0']]
    assert at['+metrics.jsonl'] < min(of_8) and max(of_8) < at['+checkpoints/8/.whole']
    assert at['+checkpoints/8/.whole'] < at['+checkpoints/4/meta/metadata']  # the newest first
    done.clear()
    mirror.push()
    assert not done
    shutil.rmtree(mirror.copy.folder / 'checkpoints' / '4')
    train_and_push(mirror, 12)
    assert done.index('+checkpoints/12/.whole') < done.index('-checkpoints/4/.whole')
    assert done.index('-checkpoints/4/.whole') < done.index('-checkpoints/4/meta/metadata')
    assert not [name for name in names(mirror.bucket) if name.startswith('checkpoints/4/')]


def test_what_is_of_this_machine_alone_stays_here(machine):
    mirror = machine('a')
    for name in (
        '.lock',
        '.job',
        'metrics.jsonl.host.7.tmp',
        'checkpoints/4.orbax-checkpoint-tmp/meta/metadata',
        'checkpoints/note',
    ):
        write(mirror.copy.folder, name, 'x')
    write(mirror.copy.folder, 'cell/.lock', 'x')
    mirror.push()
    assert not names(mirror.bucket)


def test_a_file_that_is_gone_goes_there_too(machine):
    mirror = machine('a')
    train(mirror.copy.folder, 4)
    write(mirror.copy.folder, 'summary.json', '{}')
    mirror.push()
    (mirror.copy.folder / 'summary.json').unlink()
    mirror.push()
    assert 'summary.json' not in names(mirror.bucket) and 'config.json' in names(mirror.bucket)


def test_a_checkpoint_that_the_run_removes_meanwhile_is_there_whole(machine, monkeypatch):
    """A slow bucket would else never hold one: each is removed before it is written."""
    mirror, write = machine('a'), Bucket.write
    folder = mirror.copy.folder
    train(folder, 4)

    def slow(bucket, name, content):
        if name == 'checkpoints/4/meta/metadata':
            shutil.rmtree(folder / 'checkpoints' / '4')
            train(folder, 8)
        return write(bucket, name, content)

    monkeypatch.setattr(Bucket, 'write', slow)
    mirror.push()
    assert complete(mirror.bucket) == {'checkpoints/4'}
    mirror.push()
    assert complete(mirror.bucket) == {'checkpoints/8'}


class Killed(Exception):
    """As kill -9, before a request is made."""


def killed_at(monkeypatch, n: int) -> None:
    """The n-th request that changes something is not made, and none after it."""
    count = itertools.count()

    def before(method):
        def act(bucket, *arguments, **more):
            if next(count) >= n:
                raise Killed
            return method(bucket, *arguments, **more)

        return act

    monkeypatch.setattr(Bucket, '_put', before(Bucket._put))
    monkeypatch.setattr(Bucket, 'delete', before(Bucket.delete))


@pytest.mark.full
def test_wherever_it_is_cut_off_what_is_whole_there_is_right(machine, bucket_url, monkeypatch):
    """Property: at every request of a push that writes, replaces and deletes. Each whole checkpoint
    is one that was trained, with rows up to its step; a done summary has the last one; and the next
    process, on another machine, has exactly these. At least one is there all along.
    """
    first = machine('a')
    folder = first.copy.folder
    train(folder, 4)
    train(folder, 8)
    first.push()
    n_points = 0
    for n in itertools.count():
        shutil.rmtree(folder / 'checkpoints' / '4', ignore_errors=True)
        train(folder, 8, 'b')  # made anew
        train(folder, 12)
        write(folder, 'summary.json', '{"status": "done"}')
        with pytest.MonkeyPatch.context() as patch:
            killed_at(patch, n)
            try:
                first.push()
                break
            except Killed:
                n_points += 1
        bucket = open_bucket(bucket_url)
        found = complete_folders.list_complete_folders(bucket, bucket.list())
        steps = {int(name.split('/')[-1]) for name in found}
        rows = bucket.read('metrics.jsonl')[0].decode().splitlines()
        assert steps and max(steps) <= len(rows)
        for step in steps:
            marked = found[f'checkpoints/{step}'].files
            words = [bucket.read(f'checkpoints/{step}/{one}')[0] for one in marked]
            assert len({text.split()[-1] for text in words}) == 1, 'of two trainings'
        assert 12 in steps or 'summary.json' not in bucket.list()
        monkeypatch.setenv('EVENKEEL_CACHE', str(folder.parents[3] / f'other-{n}'))
        copies = {step: path / str(step) for path, step in fetch_checkpoints(bucket_url)}
        assert copies.keys() == steps
        first = machine('a')  # the same folder again: it is further on, and goes on
    assert n_points > 12
    assert complete(first.bucket) == {'checkpoints/8', 'checkpoints/12'}
    end(first)
    assert files(machine('b').copy.folder) == files(folder)


class Outage:
    """Requests that change something fail from now on, until `over`; `n_tries` counts them."""

    def __init__(self, monkeypatch, mirror: Mirror, kind: type = BucketError):
        self.over, self.n_tries, put = False, 0, Bucket._put

        def failing(bucket, name, content, **how):
            if name == LEASE or self.over:
                return put(bucket, name, content, **how)
            self.n_tries += 1
            raise kind(f'{name} cannot be reached')

        monkeypatch.setattr(Bucket, '_put', failing)
        monkeypatch.setattr('lm.record.remote.mirror.FIRST_WAIT_SEC', 0.02)
        mirror.said.clear()


def until(happened) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_an_outage_is_said_once_and_made_up_for(machine, monkeypatch):
    mirror = machine('a')
    outage = Outage(monkeypatch, mirror)
    mirror.times = Times(pace=0.02, retry=60.0)
    with PushLoop(mirror).run_in_background():
        train(mirror.copy.folder, 4)
        until(lambda: outage.n_tries > 3)
        outage.over = True
        until(lambda: 'checkpoints/4/.whole' in names(mirror.bucket))
        until(lambda: len(mirror.said) == 2)
    assert 'cannot be reached; tried again for 60 s' in mirror.said[0]
    assert mirror.said[1:] == [f'{mirror.bucket.url} has all that is new again']


def test_a_run_that_ends_in_an_outage_does_not_begin_to_wait_anew(machine, monkeypatch):
    """Cells of a sweep end one after the other."""
    mirror = machine('a')
    Outage(monkeypatch, mirror)
    mirror.times = Times(pace=0.02, retry=1.0)
    with pytest.raises(OSError, match='could not be written'), PushLoop(mirror).run_in_background():
        train(mirror.copy.folder, 4)
        until(lambda: mirror.said)
    assert len(mirror.said) == 1


@pytest.mark.parametrize(('kind', 'retry'), [(BucketError, 0.1), (RequestRefused, 3.0)])
def test_an_outage_without_end_ends_the_run_and_the_same_command_goes_on(
    kind, retry, machine, monkeypatch
):
    """Credentials that are refused are so the next time too."""
    mirror = machine('a')
    outage = Outage(monkeypatch, mirror, kind)
    mirror.times = Times(pace=0.02, retry=retry)
    pushes = PushLoop(mirror)
    with pytest.raises(OSError, match='cannot be reached') as told, pushes.run_in_background():
        train(mirror.copy.folder, 4)
        until(lambda: pushes.failure)
    assert (outage.n_tries == 1) == (kind is RequestRefused)
    text = str(told.value)
    assert text.startswith(f'{mirror.bucket.url} could not be written') and '\n' not in text
    assert f'up to the checkpoint of step 4 is in {mirror.copy.folder}: when the' in text
    outage.over = True
    again = machine('a')
    again.push()
    end(again)
    assert files(machine('b').copy.folder) == files(mirror.copy.folder)


def flip(bucket: Bucket, name: str) -> None:
    """One bit of an object, in its middle."""
    held = bytearray(bucket.read(name)[0])
    held[len(held) // 2] ^= 1
    bucket.write(name, bytes(held))


def test_a_flipped_bit_of_an_array_is_said_and_the_checkpoint_before_is_taken(machine):
    """It is kept there, as a damaged one. A bit of each file of arrays, as a file may have places
    that nothing reads.
    """
    first = machine('a')
    checkpoints.write(first.copy.folder, {1: None, 2: None}).close()
    first.push()
    end(first)
    for name in (name for name in first.bucket.list('checkpoints/2') if '/d/' in name):
        flip(first.bucket, name)
    second = machine('b')
    said = []
    again = checkpoints.write(second.copy.folder, {}, said=said.append)
    checkpoints.assert_is(again.restore(checkpoints.shapes()), 1)
    assert again.damaged_steps() == [2] and 'cannot be read' in said[0]
    again.close()
    second.push()
    assert complete(second.bucket) == {'checkpoints/1', 'checkpoints_damaged/2'}


@pytest.mark.parametrize('name', ['summary.json', 'metrics.jsonl'])
def test_a_flipped_bit_of_a_record_costs_that_record(name, machine):
    """The run goes on; of rows the others are there, and the line says which is not."""
    first = machine('a')
    write_json(first.copy.folder / 'summary.json', seal_record({'status': 'done', 'x': 'y' * 50}))
    rows = [{'step': step, 'loss': 1.0} for step in (1, 2, 3)]
    write(first.copy.folder, 'metrics.jsonl', ''.join(f'{json.dumps(row)}\n' for row in rows))
    first.push()
    end(first)
    content = first.bucket.read(name)[0]
    at = (
        content.index(b'y')
        if name == 'summary.json'
        else content.index(b'"loss": 1.0}\n{"step": 3')
    )
    first.bucket.write(name, content[:at] + bytes([content[at] ^ 1]) + content[at + 1 :])
    there = machine('b').copy.folder
    assert Run(there).status == (None if name == 'summary.json' else 'done')
    n_rows = 3 if name == 'summary.json' else 2
    assert len(read_rows(there / 'metrics.jsonl')) == n_rows


@pytest.mark.parametrize('lost', ['.whole', 'weights/d/0'])
def test_half_a_checkpoint_is_ignored_and_deleted(lost, machine, bucket_url):
    first = machine('a')
    train(first.copy.folder, 4)
    left(first, 8)
    first.bucket.delete([f'checkpoints/8/{lost}'])
    assert next(fetch_checkpoints(bucket_url))[1] == 4
    second = machine('b')
    assert not (second.copy.folder / 'checkpoints' / '8').exists()
    assert f'NOTE: {bucket_url} lacks parts of checkpoints/8: they are not read' in second.said
    second.push()
    assert not [name for name in names(second.bucket) if name.startswith('checkpoints/8/')]


def test_a_file_of_another_size_than_marked_is_not_whole(machine, bucket_url):
    first = train_and_push(machine('a'), 4)
    first.bucket.write('checkpoints/4/weights/d/0', b'cut')
    assert next(fetch_checkpoints(bucket_url), None) is None


def test_a_folder_that_is_further_on_is_written_not_thrown_away(machine):
    """The bucket was out of reach when it was trained, or the process was killed."""
    first = train_and_push(machine('a'), 4)
    train(first.copy.folder, 8)
    again = machine('a')
    assert (again.copy.folder / 'checkpoints' / '8').is_dir()
    again.push()
    end(again)
    assert files(machine('b').copy.folder) == files(first.copy.folder)


def test_what_another_machine_wrote_since_is_right_and_what_was_here_is_set_aside(machine):
    first = train_and_push(machine('a'), 4)
    train(first.copy.folder, 8)  # not written
    end(first)
    second = left(machine('b'), 8, 'b')
    again = machine('a')
    assert files(again.copy.folder) == files(second.copy.folder)
    (said,) = [line for line in again.said if line.startswith('NOTE')]
    assert 'checkpoints/8' in said and 'another process has written to since' in said
    aside = again.copy.root / f'{again.copy.folder.name}.aside-1'
    assert str(aside) in said and (aside / 'checkpoints' / '8').is_dir()


def test_a_start_that_was_cut_off_leaves_no_folder_that_seems_further_on(machine):
    """What is here is from before another machine trained, until all of that is here."""
    left(machine('a'), 4)
    second = left(machine('b'), 8, 'b')
    with pytest.MonkeyPatch.context() as patch, pytest.raises(Killed):
        patch.setattr(Bucket, 'fetch', killed)
        machine('a')
    again = machine('a')
    assert files(again.copy.folder) == files(second.copy.folder)
    again.push()
    end(again)
    assert files(machine('c').copy.folder) == files(second.copy.folder)


def killed(*_):
    raise Killed


def test_what_is_the_same_here_is_not_fetched_again(machine, monkeypatch):
    left(machine('a'), 4)
    left(machine('b'), 8, 'b')
    fetched, fetch = [], Bucket.fetch

    def noting(bucket, name, path):
        fetched.append(name)
        return fetch(bucket, name, path)

    monkeypatch.setattr(Bucket, 'fetch', noting)
    again = machine('a')
    assert sorted(fetched) == [
        'checkpoints/8/meta/metadata',
        'checkpoints/8/weights/d/0',
        'metrics.jsonl',  # and not config.json, which is written anew, and is the same
    ]
    assert not [line for line in again.said if line.startswith('NOTE')]


@pytest.mark.parametrize('how', ['emptied', 'truncated'])
def test_a_checkpoint_that_was_damaged_here_is_fetched_again(how, machine):
    """Not taken for a newer one, and written over the good one."""
    first = train_and_push(machine('a'), 4)
    before = files(first.copy.folder)
    damaged = first.copy.folder / 'checkpoints' / '4' / 'weights' / 'd' / '0'
    damaged.unlink() if how == 'emptied' else os.truncate(damaged, 1)
    again = machine('a')
    again.push()
    assert files(again.copy.folder) == before


def test_a_path_that_holds_other_things_is_refused(machine, bucket_url):
    open_bucket(bucket_url).write('notes/plan.txt', b'mine')
    with pytest.raises(ValueError, match=r'holds 1 objects, such as notes/plan\.txt, and is no w'):
        machine('a')


def test_a_folder_without_a_manifest_is_set_aside(machine):
    first = machine('a')
    train(first.copy.folder, 4)
    end(first)
    (first.copy.root / 'manifest.json').write_text('{')
    again = machine('a')
    assert not files(again.copy.folder)
    aside = again.copy.root / f'{again.copy.folder.name}.aside-1'
    assert (aside / 'metrics.jsonl').exists()


def test_a_large_file_is_not_written_at_every_look(machine, monkeypatch):
    monkeypatch.setattr('lm.record.remote.mirror.LARGE_BYTES', 10)
    mirror = train_and_push(machine('a'), 4)
    done = watched(monkeypatch)
    write(mirror.copy.folder, 'metrics.jsonl', 'more than ten bytes')
    mirror.push()
    assert not done
    mirror.push(is_last=True)
    assert done == ['+metrics.jsonl']


def test_reading_takes_records_and_the_newest_checkpoint_alone(
    machine, bucket_url, monkeypatch, tmp_path
):
    first = machine('a')
    for step in (4, 8):
        train(first.copy.folder, step)
    write(first.copy.folder, 'tokenizer/words', 'x')
    write(first.copy.folder, 'tensorboard/events', 'x')
    first.push()
    monkeypatch.setenv('EVENKEEL_CACHE', str(tmp_path / 'reader'))
    before = first.bucket.list()
    records = fetch_records(bucket_url)
    assert set(complete_folders.list_files(records)) == {'config.json', 'metrics.jsonl'}
    folder, step = next(fetch_checkpoints(bucket_url))
    assert (step, folder) == (8, records / 'checkpoints')
    assert (folder / '8' / 'weights' / 'd' / '0').exists() and not (folder / '4').exists()
    assert (records / 'tokenizer' / 'words').exists() and first.bucket.list() == before
    assert next(fetch_checkpoints(f'{bucket_url}/checkpoints/4')) == (folder, 4)
    assert next(fetch_checkpoints(f'{bucket_url}/checkpoints/5'), None) is None
    train(first.copy.folder, 12)
    shutil.rmtree(first.copy.folder / 'checkpoints' / '4')
    first.push()
    assert [step for _, step in fetch_checkpoints(bucket_url)] == [12, 8]
    assert not (folder / '4').exists()


def test_urls_of_checkpoints():
    assert split_checkpoint_url('s3://b/r/checkpoints/12') == ('s3://b/r', 12)
    assert split_checkpoint_url('s3://b/r/checkpoints/12/') == ('s3://b/r', 12)
    assert split_checkpoint_url('s3://b/checkpoints/r') == ('s3://b/checkpoints/r', None)


def test_the_manifest_is_json_that_says_what_it_is_of(machine, bucket_url):
    first = train_and_push(machine('a'), 4)
    record = json.loads((first.copy.root / 'manifest.json').read_text())
    assert record['url'] == bucket_url and record['folders'].keys() == {'checkpoints/4'}
