"""Waves of tuned sweeps follow from the folder alone, whatever interrupts them.

Equivalence: an interrupted tuned sweep equals an uninterrupted one. A formula replaces training
here, and leaves the same files; tests/faults and tests/lm/launch/test_hosts_on_loopback.py train.
"""

import collections
import contextlib
import math
import signal

import pytest

from lm.record.remote.local_copy import fetch_records
from lm.record.remote.mirror import mirror_cell
from lm.record.workdir import record_failure, write_config
from lm.storage.files import read_json, seal_record, write_json
from lm.study.plan.cells import Cell
from lm.study.train import engines
from lm.study.train.groups import Work
from tests.helpers import tiny_raw
from tests.sweep_helpers import table
from train import BAD_INPUT, DONE, SIGNALLED, train_sweep

ARMS = {'optim.b1': (0.9, 0.8)}
TUNE = {'optim.lr': 0.01, 'seeds': 3}
OPTIMA = {0.9: 0.011, 0.8: 0.034, 0.7: 0.004}  # best rate by b1


def final_loss(cell: Cell) -> float:
    """Returns a curve over octaves, with noise from the seed that all arms share in part."""
    lr, b1, seed = (
        cell.recipe.traced_values['optim.lr'],
        cell.recipe.traced_values['optim.b1'],
        read_seed(cell),
    )
    octaves = math.log2(lr / OPTIMA[round(b1, 3)])
    return 2 + b1 / 10 + 0.02 * octaves**2 + 0.001 * math.sin(seed + 7 * b1)


def read_seed(cell: Cell) -> int:
    return cell.recipe.train.seed


class Trainer:
    """Stands for an engine: ends its cells, in the order of `sort`, and counts how often each was
    trained. act(cell) may replace the training of a cell, and returns whether it did.
    """

    def __init__(self, sort=lambda cells: cells, act=lambda cell, work: False):
        self.sort, self.act = sort, act
        self.trained = collections.Counter()

    @contextlib.contextmanager
    def __call__(self):
        yield self.train

    def train(self, work: Work) -> None:
        for cell in self.sort([cell for group in work.groups for cell in group]):
            if work.caught:
                return
            if work.is_final(cell) or self.act(cell, work):
                continue
            self.trained[cell.name] += 1
            with mirror_cell(work.url, work.folder(cell), work.say):
                end(cell, work, 'done', validation_ce=final_loss(cell))


def end(cell: Cell, work: Work, status: str, **values) -> None:
    folder = work.folder(cell)
    folder.mkdir(exist_ok=True)
    write_config(folder, cell.recipe)
    steps = {'step': cell.recipe.train.steps, 'wall_sec': 3.0, 'side_by_side': 2}
    write_json(folder / 'summary.json', seal_record({'status': status, **steps, **values}))


@pytest.fixture
def train_tuned(monkeypatch):
    """Returns a function (workdir, trainer, arms, tune, steps) that trains a sweep and returns its
    exit status.
    """
    no_display = contextlib.nullcontext(lambda: None)
    monkeypatch.setattr('lm.study.train.progress.show_progress', lambda *_: no_display)
    monkeypatch.setattr('lm.study.train.progress.write_summary', lambda workdir: '')
    monkeypatch.setattr('eval.report.page.write_report', lambda workdir, say: '')
    monkeypatch.setattr(engines, 'measure_throughput', lambda groups, work: {})

    def train(workdir, trainer, arms=ARMS, tune=TUNE):
        monkeypatch.setitem(engines.ENGINES, 'local', trainer)
        return train_sweep(tiny_raw(), arms, workdir, tune=tune)

    return train


@pytest.fixture
def whole(train_tuned, tmp_path):
    """Returns the workdir of an uninterrupted tuned sweep, and its Trainer."""
    trainer = Trainer()
    assert train_tuned(tmp_path / 'whole', trainer) == DONE
    return tmp_path / 'whole', trainer


def train_in_pieces(train_tuned, workdir, interval, order):
    """Repeats the command until the sweep has ended, stopping it after `interval` runs.

    Returns (how often each cell was trained, number of commands). order(i): sort key of the i-th
    command.
    """
    trained, status, commands = collections.Counter(), None, 0
    while status != DONE:
        assert status in (None, SIGNALLED + signal.SIGTERM)
        remaining = [interval]

        def stop(cell, work, remaining=remaining):
            if not remaining[0]:
                work.caught.append(signal.SIGTERM)
            remaining[0] -= 1
            return bool(work.caught)

        trainer = Trainer(order(commands), stop)
        status = train_tuned(workdir, trainer)
        trained += trainer.trained
        commands += 1
    return trained, commands


def ledger(workdir):
    """Returns sweep.json, with cells in the order of their names."""
    record = read_json(workdir / 'sweep.json')
    return record | {'cells': sorted(record['cells'], key=lambda cell: cell['cell'])}


def rows(workdir):
    return sorted((row | {'sweep': ''} for row in table(workdir)), key=lambda row: row['cell'])


@pytest.mark.full
def test_arms_get_equal_runs_trained_once(train_tuned, tmp_path, capsys):
    workdir, trainer = tmp_path / 'x', Trainer()
    assert train_tuned(workdir, trainer) == DONE
    cells = ledger(workdir)['cells']
    assert {cell['cell'] for cell in cells} == trainer.trained.keys()
    assert {*trainer.trained.values()} == {1}
    of_arm = collections.Counter(cell['tuned']['arm'] for cell in cells)
    assert of_arm[0] == of_arm[1] >= 5 + 5 + 3
    printed = capsys.readouterr().out
    assert 'wave 1, scan: 5 runs for each of 2 arms; 0 finished' in printed
    assert 'wave 2, ' in printed and ', look 1: 3 runs for each of 2 arms' in printed
    assert (
        f'total for optim.b1=0.8: {of_arm[1]} runs, {of_arm[1] * 20} steps, {of_arm[1] * 1.5:.1f} s'
        in printed
    )


@pytest.mark.full
@pytest.mark.default_rows('11')
@pytest.mark.parametrize('interval', [1, 4, 11])
def test_repeatedly_stopped_sweep_is_unchanged(interval, whole, train_tuned, tmp_path):
    """The sweep is stopped after a number of runs, which train in another order each time. Catches
    a wave that opens before the last has ended, and a wave that depends on the order of ends.
    """
    workdir = tmp_path / 'stopped'

    def rotate(turn):
        return lambda cells: sorted(cells, key=lambda cell: cell.name[turn % 3 :])

    trained, commands = train_in_pieces(train_tuned, workdir, interval, rotate)
    assert commands > len(trained) / interval - 1 and trained == whole[1].trained
    assert ledger(workdir) == ledger(whole[0]) and rows(workdir) == rows(whole[0])


def test_wave_with_failed_cell_is_retried(whole, train_tuned, tmp_path, capsys):
    """The others end and no further wave opens. The same command then resumes."""

    def fail(cell, work):
        if cell.arm_position['arm'] == 1 and cell.arm_position['k'] == [8] and read_seed(cell) == 0:
            record_failure(work.folder(cell), OSError('the disk is full'), work.say)
            return True
        return False

    workdir, trainer = tmp_path / 'failed', Trainer(act=fail)
    assert train_tuned(workdir, trainer) == BAD_INPUT
    printed = capsys.readouterr().out
    assert len(trainer.trained) == 9 and 'wave 2' not in printed
    (failed,) = [cell for cell in ledger(workdir)['cells'] if cell['cell'] not in trainer.trained]
    assert (
        f'{failed["cell"]} did not finish' in printed
        and 'Run the same command to try again.' in printed
    )
    again = Trainer()
    assert train_tuned(workdir, again) == DONE
    assert trainer.trained + again.trained == whole[1].trained
    assert 'wave 1, scan: 1 unfinished run; 9 finished' in capsys.readouterr().out
    assert ledger(workdir) == ledger(whole[0])


@pytest.mark.full
def test_arm_diverging_everywhere_is_reported(train_tuned, tmp_path, capsys):
    def diverge(cell, work):
        if cell.arm_position['arm'] == 2:
            end(cell, work, 'diverged', reason='step 1: loss nan')
            return True
        return False

    trainer = Trainer(act=diverge)
    assert train_tuned(tmp_path / 'x', trainer, {'optim.b1': (0.9, 0.8, 0.7)}) == DONE
    printed = capsys.readouterr().out
    assert '  optim.b1=0.7: diverged at all' in printed and 'diverged everywhere' in printed
    stages = {cell['tuned']['stage'] for cell in ledger(tmp_path / 'x')['cells']}
    assert 'look 1' in stages and len(trainer.trained) > 20


@pytest.mark.full
def test_added_arm_gets_all_waves_trained_once(whole, train_tuned, capsys):
    """Removing it again leaves its runs on record, without an arm."""
    workdir, first = whole
    three, added = {'optim.b1': (0.9, 0.8, 0.7)}, Trainer()
    assert train_tuned(workdir, added, three) == DONE
    assert 'arm optim.b1=0.7 is new' in capsys.readouterr().out
    assert not added.trained.keys() & first.trained.keys()
    assert {cell['cell'] for cell in ledger(workdir)['cells']} >= first.trained.keys()
    of_arm = collections.Counter(cell['tuned']['arm'] for cell in ledger(workdir)['cells']
                                 if 'tuned' in cell)  # fmt: skip
    assert len({*of_arm.values()}) == 1 and len(of_arm) == 3
    nothing = Trainer()
    assert train_tuned(workdir, nothing, {'optim.b1': (0.8, 0.9)}) in (DONE,)
    printed = capsys.readouterr().out
    assert 'arm optim.b1=0.7 was removed; its runs are kept' in printed
    for cell in ledger(workdir)['cells']:
        b1 = cell['changes']['optim.b1']
        assert ('tuned' in cell) == (cell['group'] is not None)
        assert 'tuned' not in cell or cell['tuned']['arm'] == (0.8, 0.9).index(b1)


@pytest.mark.full
def test_changed_tune_settings_are_reported(whole, train_tuned, capsys):
    """Trained runs are taken over."""
    workdir, first = whole
    again = Trainer()
    assert train_tuned(workdir, again, tune=TUNE | {'seeds': 4, 'smallest_effect': 0.5}) == DONE
    printed = capsys.readouterr().out
    assert 'tune.seeds: 3 -> 4' in printed and 'tune.smallest_effect: 0.01 -> 0.5' in printed
    assert again.trained and not again.trained.keys() & first.trained.keys()


def test_tuned_sweep_reuses_untuned_runs(whole, train_tuned, tmp_path, monkeypatch, capsys):
    """Without config.tune the folder of a tuned sweep is refused, since its verdicts would be lost.
    In the other direction its runs count.
    """
    with pytest.raises(ValueError, match=r'contains a sweep with config\.tune.*--config\.tune'):
        train_tuned(whole[0], Trainer(), tune=None)
    plain, later = Trainer(), Trainer()
    assert train_tuned(tmp_path / 'x', plain, ARMS | {'optim.lr': (0.01, 0.02)}, None) == DONE
    assert train_tuned(tmp_path / 'x', later) == DONE
    printed = capsys.readouterr().out
    assert 'had a sweep without config.tune' in printed
    assert later.trained.keys() | plain.trained.keys() == whole[1].trained.keys()
    assert not later.trained.keys() & plain.trained.keys()


@pytest.mark.full
def test_bucket_sweep_resumes_on_empty_disk(whole, train_tuned, bucket_url, tmp_path, monkeypatch):
    """Each command runs on another machine, without any of the files."""

    def on_another(command):
        monkeypatch.setenv('EVENKEEL_CACHE', str(tmp_path / f'machine-{command}'))
        return list

    assert train_in_pieces(train_tuned, bucket_url, 13, on_another) == (whole[1].trained, 3)
    assert ledger(fetch_records(bucket_url)) == ledger(whole[0])
    assert rows(fetch_records(bucket_url)) == rows(whole[0])
