"""The training program with a workdir in object storage: resuming, and refusals.

Equivalence: a run in a bucket writes the numbers of a run on a disk, wherever it was killed, and on
whatever machine it resumes.
"""

import contextlib
import signal
import subprocess
import sys
import time

import pytest

from eval.generate import generate
from eval.load import load
from eval.report.page import write_report
from eval.runs import gather
from lm.record.digests import hash_arrays
from lm.record.remote.local_copy import fetch_records
from lm.record.remote.mirror import mirror_workdir
from lm.run.start import check_init_from, list_candidates
from lm.storage import complete_folders
from lm.storage.buckets import PreconditionFailed, open_bucket
from lm.storage.files import InUseError
from lm.storage.lease import LEASE, Lease
from tests.commands import PATIENCE_SEC, ROOT, start_run, tiny, wait_for_command
from tests.object_store import Line
from tests.sweep_helpers import TIMES, base, before_step, curves, table, terminate_at, timeless
from train import DONE, SIGNALLED, train, train_sweep

pytestmark = [pytest.mark.xdist_group('buckets'), pytest.mark.usefixtures('programs_once')]


def list_checkpoints(url: str) -> set[int]:
    """Returns the steps of the complete checkpoints."""
    bucket = open_bucket(url)
    return {
        int(n.split('/')[-1]) for n in complete_folders.list_complete_folders(bucket, bucket.list())
    }


def train_there(config, url: str) -> int:
    with mirror_workdir(url) as workdir:
        return train(config, workdir)


@pytest.fixture
def elsewhere(monkeypatch, tmp_path):
    """elsewhere() puts this process on a machine with an empty disk."""
    machines = iter(range(100))

    def move():
        monkeypatch.setenv('EVENKEEL_CACHE', str(tmp_path / f'machine-{next(machines)}'))

    return move


@pytest.mark.full
def test_bucket_run_equals_disk_run(
    whole, corpus, bucket_url, s3_port, elsewhere, monkeypatch, capsys
):
    """Equal after a short outage; its readers agree too: suites, generation, tables, a page."""
    line, output = Line(s3_port), ['']

    def cut_line(wave):
        if wave.slots[0].journal.step == 6:
            line.cut()
            while 'retrying for up to 60 s' not in output[-1]:
                time.sleep(0.1)
                output.append(output[-1] + capsys.readouterr().out)
            line.mend()

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{line.port}')
        patch.setenv('EVENKEEL_BUCKET_RETRY_SEC', '60')
        before_step(patch, cut_line)
        assert train_there(tiny(corpus), bucket_url) == DONE
    line.cut()
    assert f'{bucket_url} is complete' in capsys.readouterr().out
    elsewhere()
    with mirror_workdir(bucket_url) as workdir:
        assert timeless(workdir) == timeless(whole)
        assert train(tiny(corpus), workdir) == DONE
    assert 'nothing left to do' in capsys.readouterr().out
    on_disk, in_bucket = load(whole), load(bucket_url)
    assert on_disk.step == in_bucket.step == 12
    assert hash_arrays(on_disk.weights) == hash_arrays(in_bucket.weights)
    assert generate(on_disk, ['norm'], 4) == generate(in_bucket, ['norm'], 4)
    older = f'{bucket_url}/checkpoints/8'
    assert load(older).step == 8 and list_candidates(older) == [older]
    check_init_from(tiny(corpus, train_init_from=bucket_url))
    with pytest.raises(ValueError, match=r'train\.init_from=.*/nothing has no checkpoint'):
        check_init_from(tiny(corpus, train_init_from=f'{bucket_url}/nothing'))
    left_out = {*TIMES, 'cell', 'git_commit'}
    (a,), (b,) = gather(whole), gather(bucket_url)
    assert {k: v for k, v in a.items() if k not in left_out} == {
        k: v for k, v in b.items() if k not in left_out
    }
    page = write_report([bucket_url])
    assert page.exists() and whole not in page.parents
    elsewhere()
    bucket = open_bucket(bucket_url)
    bucket.write('checkpoints/12/meta/metadata', b'x' * bucket.list()[METADATA].size)
    output = []
    assert (
        load(bucket_url, output.append).step == 8 and 'trying the previous checkpoint' in output[0]
    )


METADATA = 'checkpoints/12/meta/metadata'


@pytest.mark.full
def test_killed_run_resumes_on_another_machine(whole, corpus, bucket_url, elsewhere):
    """The run was killed with all of checkpoint 8 written except its mark, so the one before
    counts.
    """
    data_paths = [corpus['data.source'], corpus['data.cache_dir']]
    command = [sys.executable, '-m', 'tests.victims', bucket_url, *data_paths]
    killed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_SEC)
    assert killed.returncode == -signal.SIGKILL, killed.stderr
    assert 'checkpoints/8/meta/metadata' in open_bucket(bucket_url).list()
    assert list_checkpoints(bucket_url) == {4}
    elsewhere()
    lines = []
    with mirror_workdir(bucket_url, lines.append) as workdir:
        assert 'waiting for it to end' in lines[0]  # until the lease has run out
        assert [path.name for path in (workdir / 'checkpoints').iterdir()] == ['4']
        assert train(tiny(corpus), workdir) == DONE
        assert timeless(workdir) == timeless(whole)
    assert list_checkpoints(bucket_url) == {8, 12}


@pytest.mark.full
def test_command_with_bucket_and_refusal(whole, corpus, bucket_url, monkeypatch, elsewhere):
    """SIGTERM stops the first, and the same command resumes at once."""
    monkeypatch.setattr('lm.record.remote.mirror.PATIENCE_SEC', 0.5)
    process = start_run(bucket_url, corpus, train_steps=50_000, train_checkpoint_every=25_000)
    deadline = time.monotonic() + PATIENCE_SEC
    while 'metrics.jsonl' not in open_bucket(bucket_url).list():
        assert process.poll() is None and time.monotonic() < deadline, wait_for_command(process)
        time.sleep(0.1)
    with (
        pytest.raises(InUseError, match=f'another process is training in {bucket_url}'),
        mirror_workdir(bucket_url),
    ):
        pass
    elsewhere()
    with (
        pytest.raises(InUseError, match=rf'another process is training in {bucket_url} \(process '),
        mirror_workdir(bucket_url),
    ):
        pass
    process.terminate()
    code, stdout = wait_for_command(process)
    assert code == SIGNALLED + signal.SIGTERM
    complete, last = stdout.splitlines()[-2:]
    assert complete == f'{bucket_url} is complete' and last.startswith('SIGTERM: saved step ')
    (step,) = list_checkpoints(bucket_url)
    with mirror_workdir(bucket_url) as workdir:
        assert timeless(workdir)[-1]['step'] == step


@pytest.mark.full
def test_sweep_resumes_on_another_machine(corpus, bucket_url, elsewhere, tmp_path):
    sweep = {'optim.lr': (0.003, 0.01)}
    assert train_sweep(base(corpus), sweep, tmp_path / 'disk') == DONE
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, terminate_at(6))
        assert train_sweep(base(corpus), sweep, bucket_url) == SIGNALLED + signal.SIGTERM
    assert len(list_cell_checkpoints(bucket_url)) == 2
    elsewhere()
    assert train_sweep(base(corpus), sweep, bucket_url) == DONE
    assert curves(fetch_records(bucket_url)) == curves(tmp_path / 'disk')
    elsewhere()
    # The run that was stopped keeps the checkpoint of its last step in place of an older one.
    in_bucket, on_disk = (
        [{k: v for k, v in row.items() if k != 'checkpoints'} for row in table(workdir)]
        for workdir in (bucket_url, tmp_path / 'disk')
    )
    assert in_bucket == on_disk
    assert {'report.html', 'cells.parquet', 'sweep.json'} <= set(open_bucket(bucket_url).list())
    with pytest.raises(ValueError, match=f'{bucket_url} is a sweep. Give the workdir of one of'):
        load(bucket_url)
    with pytest.raises(ValueError, match=f'{bucket_url} contains a sweep; use another --workdir'):
        train_there(tiny(corpus), bucket_url)
    (cell, *_) = {name.split('/')[0] for name in list_cell_checkpoints(bucket_url)}
    assert load(f'{bucket_url}/{cell}').step == 8


def list_cell_checkpoints(url: str) -> list[str]:
    """Returns the newest checkpoint of each cell."""
    bucket = open_bucket(url)
    folders = sorted(complete_folders.list_complete_folders(bucket, bucket.list()))
    return list({name.split('/')[0]: name for name in folders}.values())


def until_stopped(from_step: int):
    """Lets the run wait at that step until it receives a signal, for `before_step`."""

    def act(wave):
        deadline = time.monotonic() + 60
        while wave.slots[0].journal.step >= from_step and not wave._stopping.should_stop:
            assert time.monotonic() < deadline
            time.sleep(0.02)

    return act


@pytest.mark.full
def test_lost_bucket_stops_the_run_without_loss(
    whole, corpus, bucket_url, s3_port, monkeypatch, capsys
):
    line = Line(s3_port)
    monkeypatch.setenv('AWS_ENDPOINT_URL', f'http://127.0.0.1:{line.port}')
    wait = until_stopped(6)

    def cut_line(wave):
        if wave.slots[0].journal.step == 6:
            line.cut()
        wait(wave)

    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, cut_line)
        with pytest.raises(OSError) as error:
            train_there(tiny(corpus), bucket_url)
    printed = capsys.readouterr().out
    assert 'retrying for up to 2.5 s' in printed and 'stopping the run' in printed
    text = str(error.value)
    assert f'{bucket_url} could not be written' in text and 'the same command' in text
    assert 'up to the checkpoint of step 7 is in ' in text or 'step 6 is in ' in text
    with pytest.raises(OSError, match='cannot be reached'):
        train_there(tiny(corpus), bucket_url)
    line.mend()
    with mirror_workdir(bucket_url) as workdir:
        assert train(tiny(corpus), workdir) == DONE
        assert timeless(workdir) == timeless(whole)
    assert 'resuming after step ' in capsys.readouterr().out
    assert list_checkpoints(bucket_url) == {8, 12}
    line.cut()


@pytest.mark.full
def test_lost_lease_ends_the_process(corpus, bucket_url, monkeypatch, tmp_path, capsys):
    bucket, replaced, after = open_bucket(bucket_url), {}, {}
    wait = until_stopped(6)

    def steal(wave):
        if wave.slots[0].journal.step == 6:
            other_lease = Lease(bucket, 'of another machine', 1000.0)
            other_lease.written_by = other_lease.folder
            while LEASE not in replaced:
                with contextlib.suppress(PreconditionFailed):  # renewed between the two
                    stored = bucket.list()[LEASE]
                    replaced[LEASE] = bucket.replace(LEASE, other_lease._encode(), stored)
            while after != (listing := bucket.list()):  # what was on its way comes
                after.clear()
                after.update(listing)
                time.sleep(1.5)
        wait(wave)

    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, steal)
        with pytest.raises(OSError, match=r'now belongs to process .* no longer writes there'):
            train_there(tiny(corpus), bucket_url)
    assert bucket.list() == after


@pytest.mark.parametrize('kind', ['bucket', 'scheme', 'store'])
def test_impossible_bucket_is_refused_before_compiling(
    kind, corpus, bucket_url, monkeypatch, nothing_is_traced
):
    url, words = {
        'bucket': ('s3://no-such-bucket/run', 'there is no bucket no-such-bucket'),
        'scheme': ('az://a/run', 'gs://BUCKET/PATH or s3://BUCKET/PATH'),
        'store': (bucket_url, 'cannot be reached'),
    }[kind]
    if kind == 'store':
        monkeypatch.setenv('AWS_ENDPOINT_URL', 'http://127.0.0.1:1')
    with pytest.raises((ValueError, OSError), match=words):
        train_there(tiny(corpus), url)
