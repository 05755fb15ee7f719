"""A local folder and its workdir in a bucket: order of writes, completeness, and precedence.

Files of any content stand for the files of runs.
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
    """Returns machine(name) -> the Mirror of a process that starts there, after its pull."""
    messages = []

    def begin(name: str, url: str = bucket_url) -> Mirror:
        monkeypatch.setenv('EVENKEEL_CACHE', str(tmp_path / name))
        bucket = open_bucket(url)
        check_is_workdir(bucket)
        copy = LocalCopy(bucket, KIND)
        copy.open()
        lease = Lease(bucket, copy.id, 60.0)
        lease.acquire(messages.append, 0.0, is_only=True)
        mirror = Mirror(copy, lease, Times(), messages.append)
        mirror.pull()
        messages.append(mirror.describe())
        mirror.messages = messages
        return mirror

    return begin


def end(mirror: Mirror) -> None:
    """Ends a process as if it ended by itself."""
    mirror.lease._write(is_held=False)


def write(folder: Path, name: str, text: str) -> None:
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(text)


def train(folder: Path, step: int, author: str = 'a') -> None:
    """Writes the files of a run that has reached a checkpoint."""
    write(folder, 'config.json', '{}')
    write(folder, 'metrics.jsonl', ''.join(f'{i} of {author}\n' for i in range(1, step + 1)))
    for file in ('meta/metadata', 'weights/d/0'):
        write(folder, f'checkpoints/{step}/{file}', f'{file} {step} of {author}')


def train_and_push(mirror: Mirror, step: int, author: str = 'a') -> Mirror:
    train(mirror.copy.folder, step, author)
    mirror.push()
    return mirror


def train_and_end(mirror: Mirror, step: int, author: str = 'a') -> Mirror:
    """Returns the mirror of a process that has trained to `step`, and has ended by itself."""
    end(train_and_push(mirror, step, author))
    return mirror


def list_complete(bucket: Bucket) -> set[str]:
    return set(complete_folders.list_complete_folders(bucket, bucket.list()))


def files(folder: Path) -> dict[str, str]:
    return {n: (folder / n).read_text() for n in complete_folders.list_files(folder)}


def names(bucket: Bucket) -> set[str]:
    return set(bucket.list()) - {LEASE}


def record_requests(monkeypatch) -> list[str]:
    """Records writes and deletions from now on, as '+name' and '-name'."""
    requests, write, delete = [], Bucket.write, Bucket.delete

    def record_write(bucket, name, content):
        requests.append(f'+{name}')
        return write(bucket, name, content)

    def record_delete(bucket, names):
        names = list(names)
        requests.extend(f'-{name}' for name in names)
        delete(bucket, names)

    monkeypatch.setattr(Bucket, 'write', record_write)
    monkeypatch.setattr(Bucket, 'delete', record_delete)
    return requests


@pytest.mark.parametrize('kind', ['bucket_url', 'gs_url'])
def test_second_machine_gets_files_from_first(kind, machine, request):
    url = request.getfixturevalue(kind)
    first = machine('a', url)
    train(first.copy.folder, 4)
    train(first.copy.folder, 8)
    write(first.copy.folder, 'summary.json', '{"status": "stopped"}')
    first.push()
    end(first)
    second = machine('b', url)
    assert files(second.copy.folder) == files(first.copy.folder)
    assert second.messages[-1].endswith(
        f'checkpoints up to step 8; training in {second.copy.folder}'
    )


def test_push_writes_in_order(machine, monkeypatch):
    mirror = machine('a')
    train(mirror.copy.folder, 4)
    train(mirror.copy.folder, 8)
    write(mirror.copy.folder, 'summary.json', '{"status": "done"}')
    requests = record_requests(monkeypatch)
    mirror.push()
    position = {name: i for i, name in enumerate(requests)}
    assert requests[0] == '+config.json' and requests[-1] == '+summary.json'
    files_8 = [position['+checkpoints/8/meta/metadata'], position['+checkpoints/8/weights/d/0']]
    assert (
        position['+metrics.jsonl'] < min(files_8)
        and max(files_8) < position['+checkpoints/8/.whole']
    )
    assert (
        position['+checkpoints/8/.whole'] < position['+checkpoints/4/meta/metadata']
    )  # the newest first
    requests.clear()
    mirror.push()
    assert not requests
    shutil.rmtree(mirror.copy.folder / 'checkpoints' / '4')
    train_and_push(mirror, 12)
    assert requests.index('+checkpoints/12/.whole') < requests.index('-checkpoints/4/.whole')
    assert requests.index('-checkpoints/4/.whole') < requests.index('-checkpoints/4/meta/metadata')
    assert not [name for name in names(mirror.bucket) if name.startswith('checkpoints/4/')]


def test_local_files_are_not_pushed(machine):
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


def test_removed_file_is_deleted_in_bucket(machine):
    mirror = machine('a')
    train(mirror.copy.folder, 4)
    write(mirror.copy.folder, 'summary.json', '{}')
    mirror.push()
    (mirror.copy.folder / 'summary.json').unlink()
    mirror.push()
    assert 'summary.json' not in names(mirror.bucket) and 'config.json' in names(mirror.bucket)


def test_checkpoint_removed_during_push_is_complete(machine, monkeypatch):
    """With a slow bucket every checkpoint is removed before it is written; without links the bucket
    would never hold one.
    """
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
    assert list_complete(mirror.bucket) == {'checkpoints/4'}
    mirror.push()
    assert list_complete(mirror.bucket) == {'checkpoints/8'}


class PushKilled(Exception):
    """Raised before a request is made, in place of kill -9."""


def kill_at(monkeypatch, n: int) -> None:
    """Makes the n-th request that changes something fail, and all requests after it."""
    count = itertools.count()

    def before(method):
        def act(bucket, *arguments, **options):
            if next(count) >= n:
                raise PushKilled
            return method(bucket, *arguments, **options)

        return act

    monkeypatch.setattr(Bucket, '_put', before(Bucket._put))
    monkeypatch.setattr(Bucket, 'delete', before(Bucket.delete))


@pytest.mark.full
def test_interrupted_push_leaves_consistent_bucket(machine, bucket_url, monkeypatch):
    """Property: a push that writes, replaces and deletes is cut off at every request.

    Each complete checkpoint is one that was trained, with rows up to its step; a done summary comes
    with the last one; and the next process, on another machine, has exactly these. At least one
    checkpoint is complete at any time.
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
            kill_at(patch, n)
            try:
                first.push()
                break
            except PushKilled:
                n_points += 1
        bucket = open_bucket(bucket_url)
        marks = complete_folders.list_complete_folders(bucket, bucket.list())
        steps = {int(name.split('/')[-1]) for name in marks}
        rows = bucket.read('metrics.jsonl')[0].decode().splitlines()
        assert steps and max(steps) <= len(rows)
        for step in steps:
            sizes = marks[f'checkpoints/{step}'].files
            texts = [bucket.read(f'checkpoints/{step}/{file}')[0] for file in sizes]
            assert len({text.split()[-1] for text in texts}) == 1, 'of two trainings'
        assert 12 in steps or 'summary.json' not in bucket.list()
        monkeypatch.setenv('EVENKEEL_CACHE', str(folder.parents[3] / f'other-{n}'))
        copies = {step: path / str(step) for path, step in fetch_checkpoints(bucket_url)}
        assert copies.keys() == steps
        first = machine('a')  # the same folder again: it is further on, and goes on
    assert n_points > 12
    assert list_complete(first.bucket) == {'checkpoints/8', 'checkpoints/12'}
    end(first)
    assert files(machine('b').copy.folder) == files(folder)


class Outage:
    """Makes requests that change something fail until `over`; `n_tries` counts them."""

    def __init__(self, monkeypatch, mirror: Mirror, kind: type = BucketError):
        self.over, self.n_tries, put = False, 0, Bucket._put

        def failing(bucket, name, content, **options):
            if name == LEASE or self.over:
                return put(bucket, name, content, **options)
            self.n_tries += 1
            raise kind(f'{name} cannot be reached')

        monkeypatch.setattr(Bucket, '_put', failing)
        monkeypatch.setattr('lm.record.remote.mirror.FIRST_WAIT_SEC', 0.02)
        mirror.messages.clear()


def wait_until(happened) -> None:
    deadline = time.monotonic() + 30
    while not happened():
        assert time.monotonic() < deadline
        time.sleep(0.01)


def test_outage_is_noted_once_and_recovered_from(machine, monkeypatch):
    mirror = machine('a')
    outage = Outage(monkeypatch, mirror)
    mirror.times = Times(pace=0.02, retry=60.0)
    with PushLoop(mirror).run_in_background():
        train(mirror.copy.folder, 4)
        wait_until(lambda: outage.n_tries > 3)
        outage.over = True
        wait_until(lambda: 'checkpoints/4/.whole' in names(mirror.bucket))
        wait_until(lambda: len(mirror.messages) == 2)
    assert 'cannot be reached; retrying for up to 60 s' in mirror.messages[0]
    assert mirror.messages[1:] == [f'{mirror.bucket.url} is up to date again']


def test_run_ending_in_outage_does_not_wait_again(machine, monkeypatch):
    """Cells of a sweep end one after another."""
    mirror = machine('a')
    Outage(monkeypatch, mirror)
    mirror.times = Times(pace=0.02, retry=1.0)
    with pytest.raises(OSError, match='could not be written'), PushLoop(mirror).run_in_background():
        train(mirror.copy.folder, 4)
        wait_until(lambda: mirror.messages)
    assert len(mirror.messages) == 1


@pytest.mark.parametrize(('kind', 'retry'), [(BucketError, 0.1), (RequestRefused, 3.0)])
def test_endless_outage_ends_run_which_can_resume(kind, retry, machine, monkeypatch):
    """Refused credentials will be refused the next time too."""
    mirror = machine('a')
    outage = Outage(monkeypatch, mirror, kind)
    mirror.times = Times(pace=0.02, retry=retry)
    pushes = PushLoop(mirror)
    with pytest.raises(OSError, match='cannot be reached') as raised, pushes.run_in_background():
        train(mirror.copy.folder, 4)
        wait_until(lambda: pushes.failure)
    assert (outage.n_tries == 1) == (kind is RequestRefused)
    text = str(raised.value)
    assert text.startswith(f'{mirror.bucket.url} could not be written') and '\n' not in text
    assert f'up to the checkpoint of step 4 is in {mirror.copy.folder}. When the' in text
    outage.over = True
    resumed = machine('a')
    resumed.push()
    end(resumed)
    assert files(machine('b').copy.folder) == files(mirror.copy.folder)


def flip(bucket: Bucket, name: str) -> None:
    """Flips a bit in the middle of an object."""
    content = bytearray(bucket.read(name)[0])
    content[len(content) // 2] ^= 1
    bucket.write(name, bytes(content))


def test_flipped_array_bit_restores_previous_checkpoint(machine):
    """The damaged checkpoint is kept there. A bit of each file of arrays is flipped, as a file may
    have bytes that nothing reads.
    """
    first = machine('a')
    checkpoints.write(first.copy.folder, {1: None, 2: None}).close()
    first.push()
    end(first)
    for name in (name for name in first.bucket.list('checkpoints/2') if '/d/' in name):
        flip(first.bucket, name)
    second = machine('b')
    messages = []
    restored = checkpoints.write(second.copy.folder, {}, say=messages.append)
    checkpoints.assert_is(restored.restore(checkpoints.shapes()), 1)
    assert restored.damaged_steps() == [2] and 'cannot be read' in messages[0]
    restored.close()
    second.push()
    assert list_complete(second.bucket) == {'checkpoints/1', 'checkpoints_damaged/2'}


@pytest.mark.parametrize('name', ['summary.json', 'metrics.jsonl'])
def test_flipped_record_bit_affects_that_record_alone(name, machine):
    """The run resumes; the other rows are intact, and a note names the damaged one."""
    first = machine('a')
    write_json(first.copy.folder / 'summary.json', seal_record({'status': 'done', 'x': 'y' * 50}))
    rows = [{'step': step, 'loss': 1.0} for step in (1, 2, 3)]
    write(first.copy.folder, 'metrics.jsonl', ''.join(f'{json.dumps(row)}\n' for row in rows))
    first.push()
    end(first)
    content = first.bucket.read(name)[0]
    position = (
        content.index(b'y')
        if name == 'summary.json'
        else content.index(b'"loss": 1.0}\n{"step": 3')
    )
    first.bucket.write(
        name, content[:position] + bytes([content[position] ^ 1]) + content[position + 1 :]
    )
    folder = machine('b').copy.folder
    assert Run(folder).status == (None if name == 'summary.json' else 'done')
    n_rows = 3 if name == 'summary.json' else 2
    assert len(read_rows(folder / 'metrics.jsonl')) == n_rows


@pytest.mark.parametrize('lost', ['.whole', 'weights/d/0'])
def test_incomplete_checkpoint_is_ignored_and_deleted(lost, machine, bucket_url):
    first = machine('a')
    train(first.copy.folder, 4)
    train_and_end(first, 8)
    first.bucket.delete([f'checkpoints/8/{lost}'])
    assert next(fetch_checkpoints(bucket_url))[1] == 4
    second = machine('b')
    assert not (second.copy.folder / 'checkpoints' / '8').exists()
    assert f'NOTE: {bucket_url} lacks parts of checkpoints/8, which are ignored' in second.messages
    second.push()
    assert not [name for name in names(second.bucket) if name.startswith('checkpoints/8/')]


def test_other_file_size_makes_checkpoint_incomplete(machine, bucket_url):
    first = train_and_push(machine('a'), 4)
    first.bucket.write('checkpoints/4/weights/d/0', b'cut')
    assert next(fetch_checkpoints(bucket_url), None) is None


def test_newer_local_folder_is_kept_and_pushed(machine):
    """The bucket was unreachable during training, or the process was killed."""
    first = train_and_push(machine('a'), 4)
    train(first.copy.folder, 8)
    resumed = machine('a')
    assert (resumed.copy.folder / 'checkpoints' / '8').is_dir()
    resumed.push()
    end(resumed)
    assert files(machine('b').copy.folder) == files(first.copy.folder)


def test_local_folder_is_set_aside_for_newer_bucket(machine):
    first = train_and_push(machine('a'), 4)
    train(first.copy.folder, 8)  # not written
    end(first)
    second = train_and_end(machine('b'), 8, 'b')
    resumed = machine('a')
    assert files(resumed.copy.folder) == files(second.copy.folder)
    (note,) = [line for line in resumed.messages if line.startswith('NOTE')]
    assert 'checkpoints/8' in note and 'another process has written there since' in note
    aside = resumed.copy.root / f'{resumed.copy.folder.name}.aside-1'
    assert str(aside) in note and (aside / 'checkpoints' / '8').is_dir()


def test_interrupted_start_leaves_no_newer_folder(machine):
    """The local content predates the training on another machine, until all of that is fetched."""
    train_and_end(machine('a'), 4)
    second = train_and_end(machine('b'), 8, 'b')
    with pytest.MonkeyPatch.context() as patch, pytest.raises(PushKilled):
        patch.setattr(Bucket, 'fetch', raise_killed)
        machine('a')
    resumed = machine('a')
    assert files(resumed.copy.folder) == files(second.copy.folder)
    resumed.push()
    end(resumed)
    assert files(machine('c').copy.folder) == files(second.copy.folder)


def raise_killed(*_):
    raise PushKilled


def test_unchanged_files_are_not_fetched_again(machine, monkeypatch):
    train_and_end(machine('a'), 4)
    train_and_end(machine('b'), 8, 'b')
    fetched, fetch = [], Bucket.fetch

    def record_fetch(bucket, name, path):
        fetched.append(name)
        return fetch(bucket, name, path)

    monkeypatch.setattr(Bucket, 'fetch', record_fetch)
    resumed = machine('a')
    assert sorted(fetched) == [
        'checkpoints/8/meta/metadata',
        'checkpoints/8/weights/d/0',
        'metrics.jsonl',  # and not config.json, which is written anew, and is the same
    ]
    assert not [line for line in resumed.messages if line.startswith('NOTE')]


@pytest.mark.parametrize('damage', ['emptied', 'truncated'])
def test_damaged_local_checkpoint_is_fetched_again(damage, machine):
    """The checkpoint is not taken for a newer checkpoint, and does not replace the good one."""
    first = train_and_push(machine('a'), 4)
    before = files(first.copy.folder)
    damaged = first.copy.folder / 'checkpoints' / '4' / 'weights' / 'd' / '0'
    damaged.unlink() if damage == 'emptied' else os.truncate(damaged, 1)
    resumed = machine('a')
    resumed.push()
    assert files(resumed.copy.folder) == before


def test_path_with_other_content_is_refused(machine, bucket_url):
    open_bucket(bucket_url).write('notes/plan.txt', b'mine')
    with pytest.raises(
        ValueError, match=r'contains 1 objects, such as notes/plan\.txt, but is not a w'
    ):
        machine('a')


def test_folder_without_manifest_is_set_aside(machine):
    first = machine('a')
    train(first.copy.folder, 4)
    end(first)
    (first.copy.root / 'manifest.json').write_text('{')
    resumed = machine('a')
    assert not files(resumed.copy.folder)
    aside = resumed.copy.root / f'{resumed.copy.folder.name}.aside-1'
    assert (aside / 'metrics.jsonl').exists()


def test_large_file_is_not_written_at_every_push(machine, monkeypatch):
    monkeypatch.setattr('lm.record.remote.mirror.LARGE_BYTES', 10)
    mirror = train_and_push(machine('a'), 4)
    requests = record_requests(monkeypatch)
    write(mirror.copy.folder, 'metrics.jsonl', 'more than ten bytes')
    mirror.push()
    assert not requests
    mirror.push(is_last=True)
    assert requests == ['+metrics.jsonl']


def test_reading_fetches_records_and_newest_checkpoint_alone(
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


def test_checkpoint_urls():
    assert split_checkpoint_url('s3://b/r/checkpoints/12') == ('s3://b/r', 12)
    assert split_checkpoint_url('s3://b/r/checkpoints/12/') == ('s3://b/r', 12)
    assert split_checkpoint_url('s3://b/checkpoints/r') == ('s3://b/checkpoints/r', None)


def test_manifest_names_url_and_checkpoints(machine, bucket_url):
    first = train_and_push(machine('a'), 4)
    record = json.loads((first.copy.root / 'manifest.json').read_text())
    assert record['url'] == bucket_url and record['folders'].keys() == {'checkpoints/4'}
