"""Waves of tuned sweeps: they follow from the folder alone, whatever comes between.

Equivalence: a tuned sweep that was interrupted = one that was not. Runs are made by a formula here,
which leaves what training leaves; tests/faults and tests/lm/launch/test_hosts_on_loopback.py train.
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


def loss_of(cell: Cell) -> float:
    """A curve over octaves, with noise that the seed decides and all arms share in part."""
    lr, b1, seed = (
        cell.recipe.traced_values['optim.lr'],
        cell.recipe.traced_values['optim.b1'],
        seed_of(cell),
    )
    octaves = math.log2(lr / OPTIMA[round(b1, 3)])
    return 2 + b1 / 10 + 0.02 * octaves**2 + 0.001 * math.sin(seed + 7 * b1)


def seed_of(cell: Cell) -> int:
    return cell.recipe.train.seed


class Trainer:
    """Stands for an engine: ends the cells that it is given, in the order of `sort`, and counts how
    often each was trained. act(cell) may do something else with one, and returns whether it did.
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
                end(cell, work, 'done', validation_ce=loss_of(cell))


def end(cell: Cell, work: Work, status: str, **values) -> None:
    folder = work.folder(cell)
    folder.mkdir(exist_ok=True)
    write_config(folder, cell.recipe)
    steps = {'step': cell.recipe.train.steps, 'wall_sec': 3.0, 'side_by_side': 2}
    write_json(folder / 'summary.json', seal_record({'status': status, **steps, **values}))


@pytest.fixture
def tuned(monkeypatch):
    """tuned(workdir, trainer, arms, tune, steps): the exit status of a sweep."""
    shown = contextlib.nullcontext(lambda: None)
    monkeypatch.setattr('lm.study.train.progress.show_progress', lambda *_: shown)
    monkeypatch.setattr('lm.study.train.progress.write_summary', lambda workdir: '')
    monkeypatch.setattr('eval.report.page.write_report', lambda workdir, say: '')
    monkeypatch.setattr(engines, 'measure_throughput', lambda groups, work: {})

    def train(workdir, trainer, arms=ARMS, tune=TUNE):
        monkeypatch.setitem(engines.ENGINES, 'local', trainer)
        return train_sweep(tiny_raw(), arms, workdir, tune=tune)

    return train


@pytest.fixture
def whole(tuned, tmp_path):
    """The workdir of a tuned sweep that nothing disturbed, and who trained it."""
    trainer = Trainer()
    assert tuned(tmp_path / 'whole', trainer) == DONE
    return tmp_path / 'whole', trainer


def finished(tuned, workdir, every, order):
    """Gives the command until the sweep has ended, each time stopped after so many runs; returns
    (how often each was trained, how many commands it took). order(i): how the i-th sorts cells.
    """
    trained, status, commands = collections.Counter(), None, 0
    while status != DONE:
        assert status in (None, SIGNALLED + signal.SIGTERM)
        left = [every]

        def stop(cell, work, left=left):
            if not left[0]:
                work.caught.append(signal.SIGTERM)
            left[0] -= 1
            return bool(work.caught)

        trainer = Trainer(order(commands), stop)
        status = tuned(workdir, trainer)
        trained += trainer.trained
        commands += 1
    return trained, commands


def ledger(workdir):
    """What sweep.json says, with cells in the order of their names."""
    record = read_json(workdir / 'sweep.json')
    return record | {'cells': sorted(record['cells'], key=lambda cell: cell['cell'])}


def rows(workdir):
    return sorted((row | {'sweep': ''} for row in table(workdir)), key=lambda row: row['cell'])


@pytest.mark.full
def test_arms_have_equally_many_runs_and_none_is_trained_twice(tuned, tmp_path, capsys):
    workdir, trainer = tmp_path / 'x', Trainer()
    assert tuned(workdir, trainer) == DONE
    cells = ledger(workdir)['cells']
    assert {cell['cell'] for cell in cells} == trainer.trained.keys()
    assert {*trainer.trained.values()} == {1}
    of_arm = collections.Counter(cell['tuned']['arm'] for cell in cells)
    assert of_arm[0] == of_arm[1] >= 5 + 5 + 3
    said = capsys.readouterr().out
    assert 'wave 1, scan: 5 runs of each of 2 arms; 0 have ended' in said
    assert 'wave 2, ' in said and ', look 1: 3 runs of each of 2 arms' in said
    assert (
        f'  optim.b1=0.8: {of_arm[1]} runs, {of_arm[1] * 20} steps, {of_arm[1] * 1.5:.1f} s' in said
    )


@pytest.mark.default_rows('11')
@pytest.mark.parametrize('every', [1, 4, 11])
def test_a_sweep_that_is_stopped_again_and_again_is_the_same(every, whole, tuned, tmp_path):
    """It is stopped after so many runs, whose order is another each time. Catches a wave that opens
    before the last has ended, and one that follows from the order of ends.
    """
    workdir = tmp_path / 'stopped'

    def turned(turn):
        return lambda cells: sorted(cells, key=lambda cell: cell.name[turn % 3 :])

    trained, commands = finished(tuned, workdir, every, turned)
    assert commands > len(trained) / every - 1 and trained == whole[1].trained
    assert ledger(workdir) == ledger(whole[0]) and rows(workdir) == rows(whole[0])


def test_a_wave_in_which_a_cell_failed_is_tried_again(whole, tuned, tmp_path, capsys):
    """The others end; no further wave opens. The same command then goes on."""

    def fail(cell, work):
        if cell.arm_position['arm'] == 1 and cell.arm_position['k'] == [8] and seed_of(cell) == 0:
            record_failure(work.folder(cell), OSError('the disk is full'), work.say)
            return True
        return False

    workdir, trainer = tmp_path / 'failed', Trainer(act=fail)
    assert tuned(workdir, trainer) == BAD_INPUT
    said = capsys.readouterr().out
    assert len(trainer.trained) == 9 and 'wave 2' not in said
    (failed,) = [one for one in ledger(workdir)['cells'] if one['cell'] not in trainer.trained]
    assert f'{failed["cell"]} did not end' in said and 'the same command tries them again' in said
    again = Trainer()
    assert tuned(workdir, again) == DONE
    assert trainer.trained + again.trained == whole[1].trained
    assert 'wave 1, scan: 1 run that has not ended; 9 have ended' in capsys.readouterr().out
    assert ledger(workdir) == ledger(whole[0])


@pytest.mark.full
def test_an_arm_that_diverges_everywhere_is_said_and_the_others_go_on(tuned, tmp_path, capsys):
    def diverge(cell, work):
        if cell.arm_position['arm'] == 2:
            end(cell, work, 'diverged', reason='step 1: loss nan')
            return True
        return False

    trainer = Trainer(act=diverge)
    assert tuned(tmp_path / 'x', trainer, {'optim.b1': (0.9, 0.8, 0.7)}) == DONE
    said = capsys.readouterr().out
    assert '  optim.b1=0.7: diverged at all' in said and 'diverged everywhere' in said
    stages = {one['tuned']['stage'] for one in ledger(tmp_path / 'x')['cells']}
    assert 'look 1' in stages and len(trainer.trained) > 20


@pytest.mark.full
def test_an_arm_that_is_added_has_all_its_waves_and_none_is_trained_twice(whole, tuned, capsys):
    """To take it away again leaves its runs on record, in no arm."""
    workdir, first = whole
    three, added = {'optim.b1': (0.9, 0.8, 0.7)}, Trainer()
    assert tuned(workdir, added, three) == DONE
    assert 'arm optim.b1=0.7 is new' in capsys.readouterr().out
    assert not added.trained.keys() & first.trained.keys()
    assert {one['cell'] for one in ledger(workdir)['cells']} >= first.trained.keys()
    of_arm = collections.Counter(one['tuned']['arm'] for one in ledger(workdir)['cells']
                                 if 'tuned' in one)  # fmt: skip
    assert len({*of_arm.values()}) == 1 and len(of_arm) == 3
    nothing = Trainer()
    assert tuned(workdir, nothing, {'optim.b1': (0.8, 0.9)}) in (DONE,)
    said = capsys.readouterr().out
    assert 'arm optim.b1=0.7 is left out' in said
    for one in ledger(workdir)['cells']:
        b1 = one['changes']['optim.b1']
        assert ('tuned' in one) == (one['group'] is not None)
        assert 'tuned' not in one or one['tuned']['arm'] == (0.8, 0.9).index(b1)


@pytest.mark.full
def test_settings_of_tune_may_change_and_are_said(whole, tuned, capsys):
    """Runs that were trained are taken over."""
    workdir, first = whole
    again = Trainer()
    assert tuned(workdir, again, tune=TUNE | {'seeds': 4, 'smallest_effect': 0.5}) == DONE
    said = capsys.readouterr().out
    assert 'tune.seeds: 3 -> 4' in said and 'tune.smallest_effect: 0.01 -> 0.5' in said
    assert again.trained and not again.trained.keys() & first.trained.keys()


def test_a_tuned_sweep_and_one_that_is_not(whole, tuned, tmp_path, monkeypatch, capsys):
    """Without config.tune the folder of a tuned sweep is refused: its verdicts would be lost. The
    other way round its runs count.
    """
    with pytest.raises(ValueError, match=r'holds a sweep with config\.tune.*--config\.tune'):
        tuned(whole[0], Trainer(), tune=None)
    plain, then = Trainer(), Trainer()
    assert tuned(tmp_path / 'x', plain, ARMS | {'optim.lr': (0.01, 0.02)}, None) == DONE
    assert tuned(tmp_path / 'x', then) == DONE
    said = capsys.readouterr().out
    assert 'held a sweep without config.tune' in said
    assert then.trained.keys() | plain.trained.keys() == whole[1].trained.keys()
    assert not then.trained.keys() & plain.trained.keys()


@pytest.mark.full
def test_a_sweep_in_a_bucket_goes_on_where_nothing_is(
    whole, tuned, bucket_url, tmp_path, monkeypatch
):
    """Each command is given on another machine, which has none of the files."""

    def on_another(command):
        monkeypatch.setenv('EVENKEEL_CACHE', str(tmp_path / f'machine-{command}'))
        return list

    assert finished(tuned, bucket_url, 13, on_another) == (whole[1].trained, 3)
    assert ledger(fetch_records(bucket_url)) == ledger(whole[0])
    assert rows(fetch_records(bucket_url)) == rows(whole[0])
