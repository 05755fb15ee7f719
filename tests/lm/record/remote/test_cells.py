"""Cells of a sweep in a bucket, each with its lease, on several machines that hold nothing of each
other. Files of any content stand for those of runs.
"""

import pytest

from lm.record.remote import mirror
from lm.record.remote.mirror import mirror_cell, mirror_sweep_records, sweep_folder
from lm.storage.buckets import join_url, open_bucket
from lm.storage.files import InUseError, UnreadableFile
from tests.lm.record.remote.test_mirror import names, train, watched, write

pytestmark = pytest.mark.xdist_group('buckets')


@pytest.fixture
def on(bucket_url, tmp_path, monkeypatch):
    """on(name) -> the folder of the sweep on that machine, where this process is from now on."""

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


def assert_refused(kind, says, entering) -> None:
    with pytest.raises(kind, match=says), entering:
        pass


def of_cell(folder, cell) -> set[str]:
    return {p.relative_to(folder / cell).as_posix() for p in (folder / cell).rglob('*.*')}


def test_a_folder_on_a_disk_is_left_as_it_is(tmp_path):
    assert sweep_folder(tmp_path / 'sweep') == tmp_path / 'sweep'
    with mirror_sweep_records(None, print), mirror_cell(None, tmp_path / 'sweep' / 'one', print):
        pass
    assert not list(tmp_path.iterdir())


def test_each_machine_has_its_own_cells_and_the_records_of_all(on, bucket_url, monkeypatch):
    a = on('a')
    with mirror_sweep_records(bucket_url, print):
        write(a, 'sweep.json', '{}')
    train_cell(bucket_url, a, 'one', 4)
    b = on('b')
    train_cell(bucket_url, b, 'two', 8)
    assert of_cell(b, 'one') == set()
    done = watched(monkeypatch)
    with mirror_sweep_records(bucket_url, print):
        assert of_cell(b, 'one') == {'config.json', 'metrics.jsonl'}
        assert not (b / 'one' / 'checkpoints').exists()
        assert (b / 'two' / 'checkpoints' / '8').is_dir() and (b / 'sweep.json').exists()
        write(b, 'cells.parquet', 'of both')
    assert done == ['+cells.parquet']
    a = on('a')
    with mirror_sweep_records(bucket_url, print):
        assert (a / 'cells.parquet').read_text() == 'of both'
        assert of_cell(a, 'two') == {'config.json', 'metrics.jsonl'}
    own = {name for name in names(open_bucket(bucket_url)) if '/' not in name}
    assert own == {'sweep.json', 'cells.parquet'}


def test_a_cell_that_one_process_trains_is_refused_to_others(on, bucket_url, monkeypatch):
    """And goes on on another machine afterwards, from its checkpoint."""
    monkeypatch.setattr(mirror, 'PATIENCE_SEC', 0.1)
    a = on('a')
    begin_sweep(bucket_url)
    with mirror_cell(bucket_url, a / 'one', print):
        train(a / 'one', 4)
        there = mirror_cell(bucket_url, on('b') / 'one', print)
        assert_refused(InUseError, f'another process trains in {bucket_url}/one', there)
        train_cell(bucket_url, on('b'), 'two', 4)
    b = on('b')
    with mirror_cell(bucket_url, b / 'one', print):
        assert (b / 'one' / 'checkpoints' / '4').is_dir()


def test_a_cell_that_is_further_on_here_is_kept(on, bucket_url):
    """The bucket was out of reach, or the process was killed; another wrote the other cells."""
    a = on('a')
    begin_sweep(bucket_url)
    train_cell(bucket_url, a, 'one', 4)
    train(a / 'one', 8)
    train_cell(bucket_url, on('b'), 'two', 4)
    on('a')
    with mirror_sweep_records(bucket_url, print):
        assert len((a / 'one' / 'metrics.jsonl').read_text().splitlines()) == 8
    with mirror_cell(bucket_url, a / 'one', print):
        assert (a / 'one' / 'checkpoints' / '8').is_dir()
    assert 'one/checkpoints/8/.whole' in names(open_bucket(bucket_url))


def test_a_damaged_lease_costs_its_own_cell(on, bucket_url):
    a = on('a')
    begin_sweep(bucket_url)
    train_cell(bucket_url, a, 'one', 4)
    open_bucket(join_url(bucket_url, 'one')).write('.lease', b'{')
    begin_sweep(bucket_url)
    says = rf'{bucket_url}/one/\.lease cannot be read'
    assert_refused(UnreadableFile, says, mirror_cell(bucket_url, a / 'one', print))
    train_cell(bucket_url, a, 'two', 4)


@pytest.mark.parametrize('there', ['sweep', 'single run'])
def test_a_sweep_is_no_run_and_a_run_no_sweep(there, on, bucket_url):
    bucket = open_bucket(bucket_url)
    bucket.write('.lease', b'')
    bucket.write('sweep.json' if there == 'sweep' else 'config.json', b'{}')
    act = mirror.mirror_workdir if there == 'sweep' else mirror_sweep_records
    says = f'{bucket_url} holds a {there}; give another --workdir'
    assert_refused(ValueError, says, act(bucket_url, print))
