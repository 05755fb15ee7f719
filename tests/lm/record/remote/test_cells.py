"""Cells of a sweep in a bucket, each with its lease, on machines that share nothing else.

Files of any content stand for the files of runs.
"""

import pytest

from lm.record.remote import mirror
from lm.record.remote.mirror import mirror_cell, mirror_sweep_records, sweep_folder
from lm.storage.buckets import join_url, open_bucket
from lm.storage.files import InUseError, UnreadableFile
from tests.lm.record.remote.test_mirror import names, record_requests, train, write

pytestmark = pytest.mark.xdist_group('buckets')


@pytest.fixture
def move_to(bucket_url, tmp_path, monkeypatch):
    """Returns move_to(name) -> the sweep's folder on that machine, where this process is then."""

    def move(name: str):
        monkeypatch.setenv('EVENKEEL_CACHE', str(tmp_path / name))
        return sweep_folder(bucket_url)

    return move


def train_cell(url, folder, cell, step) -> None:
    with mirror_cell(url, folder / cell, print):
        train(folder / cell, step)
        write(folder / cell, 'tokenizer/words.txt', 'of no interest to others')


def begin_sweep(url: str) -> None:
    with mirror_sweep_records(url, print):
        pass


def assert_refused(kind, message, entering) -> None:
    with pytest.raises(kind, match=message), entering:
        pass


def list_cell_files(folder, cell) -> set[str]:
    return {p.relative_to(folder / cell).as_posix() for p in (folder / cell).rglob('*.*')}


def test_local_folder_is_unchanged(tmp_path):
    assert sweep_folder(tmp_path / 'sweep') == tmp_path / 'sweep'
    with mirror_sweep_records(None, print), mirror_cell(None, tmp_path / 'sweep' / 'one', print):
        pass
    assert not list(tmp_path.iterdir())


def test_machine_has_its_cells_and_all_records(move_to, bucket_url, monkeypatch):
    a = move_to('a')
    with mirror_sweep_records(bucket_url, print):
        write(a, 'sweep.json', '{}')
    train_cell(bucket_url, a, 'one', 4)
    b = move_to('b')
    train_cell(bucket_url, b, 'two', 8)
    assert list_cell_files(b, 'one') == set()
    requests = record_requests(monkeypatch)
    with mirror_sweep_records(bucket_url, print):
        assert list_cell_files(b, 'one') == {'config.json', 'metrics.jsonl'}
        assert not (b / 'one' / 'checkpoints').exists()
        assert (b / 'two' / 'checkpoints' / '8').is_dir() and (b / 'sweep.json').exists()
        write(b, 'cells.parquet', 'of both')
    assert requests == ['+cells.parquet']
    a = move_to('a')
    with mirror_sweep_records(bucket_url, print):
        assert (a / 'cells.parquet').read_text() == 'of both'
        assert list_cell_files(a, 'two') == {'config.json', 'metrics.jsonl'}
    sweep_files = {name for name in names(open_bucket(bucket_url)) if '/' not in name}
    assert sweep_files == {'sweep.json', 'cells.parquet'}


def test_training_cell_is_refused_to_others(move_to, bucket_url, monkeypatch):
    """Another machine resumes it afterwards, from its checkpoint."""
    monkeypatch.setattr(mirror, 'PATIENCE_SEC', 0.1)
    a = move_to('a')
    begin_sweep(bucket_url)
    with mirror_cell(bucket_url, a / 'one', print):
        train(a / 'one', 4)
        on_b = mirror_cell(bucket_url, move_to('b') / 'one', print)
        assert_refused(InUseError, f'another process is training in {bucket_url}/one', on_b)
        train_cell(bucket_url, move_to('b'), 'two', 4)
    b = move_to('b')
    with mirror_cell(bucket_url, b / 'one', print):
        assert (b / 'one' / 'checkpoints' / '4').is_dir()


def test_newer_local_cell_is_kept(move_to, bucket_url):
    """The bucket was unreachable, or the process was killed; another one wrote the other cells."""
    a = move_to('a')
    begin_sweep(bucket_url)
    train_cell(bucket_url, a, 'one', 4)
    train(a / 'one', 8)
    train_cell(bucket_url, move_to('b'), 'two', 4)
    move_to('a')
    with mirror_sweep_records(bucket_url, print):
        assert len((a / 'one' / 'metrics.jsonl').read_text().splitlines()) == 8
    with mirror_cell(bucket_url, a / 'one', print):
        assert (a / 'one' / 'checkpoints' / '8').is_dir()
    assert 'one/checkpoints/8/.whole' in names(open_bucket(bucket_url))


def test_damaged_lease_affects_its_own_cell_alone(move_to, bucket_url):
    a = move_to('a')
    begin_sweep(bucket_url)
    train_cell(bucket_url, a, 'one', 4)
    open_bucket(join_url(bucket_url, 'one')).write('.lease', b'{')
    begin_sweep(bucket_url)
    message = rf'{bucket_url}/one/\.lease cannot be read'
    assert_refused(UnreadableFile, message, mirror_cell(bucket_url, a / 'one', print))
    train_cell(bucket_url, a, 'two', 4)


@pytest.mark.parametrize('content', ['sweep', 'single run'])
def test_sweep_and_run_are_distinguished(content, move_to, bucket_url):
    bucket = open_bucket(bucket_url)
    bucket.write('.lease', b'')
    bucket.write('sweep.json' if content == 'sweep' else 'config.json', b'{}')
    enter = mirror.mirror_workdir if content == 'sweep' else mirror_sweep_records
    message = f'{bucket_url} contains a {content}; use another --workdir'
    assert_refused(ValueError, message, enter(bucket_url, print))
