"""Reference tests of the progress display on a sweep with known numbers."""

import io
import json

import pytest
from rich.console import Console

from eval.runs import gather
from lm.config.resolve import resolve
from lm.record.run import Run
from lm.storage.files import read_json
from lm.study.plan.cells import Cell, group_by_program, program_key
from lm.study.train import progress
from lm.study.train.progress import SweepProgress, show_progress
from tests.eval import sweep_fixture as fixture


@pytest.fixture
def sweep(tmp_path):
    """Returns (folder, groups); the cells of each norm share a program."""
    cells = fixture.write_sweep(tmp_path / 'sweep')
    configs = [
        resolve(fixture.update_config(fixture.base_config(), cell['changes'])) for cell in cells
    ]
    listed = [
        Cell(c['cell'], c['changes'], config) for c, config in zip(cells, configs, strict=True)
    ]
    return tmp_path / 'sweep', group_by_program(listed)


def make_progress(sweep, terminal: bool = False, compiled=dict) -> SweepProgress:
    folder, grouped = sweep
    console = Console(file=io.StringIO(), force_terminal=terminal, width=200)
    return SweepProgress(folder, grouped, console, compiled)


def test_progress_has_a_line_per_group_and_sweep(sweep):
    folder, grouped = sweep
    first, second, last = make_progress(sweep).format_lines()
    assert first.startswith('group 1 of 2  model.norm=rmsnorm  11 of 12 done, 1 failed  best ')
    assert second.startswith(
        'group 2 of 2  model.norm=layernorm  9 of 12 done, 1 diverged  step 120 of 200  best '
    )
    names = {record['cell']: record for record in gather(folder)}
    best = min(
        (r for r in names.values() if r['norm'] == 'rmsnorm' and r['ce']), key=lambda r: r['ce']
    )
    assert (best['lr'], best['train_seed']) == (0.003, 2)
    assert first.endswith(f'best {best["ce"]:.4f} (optim.lr=0.003, train.seed=2, {best["cell"]})')
    assert last == 'sweep 20 of 24 done, 1 diverged, 1 failed  time left unknown'
    assert [len(group) for group in grouped] == [12, 12]


def test_notes_precede_progress_once(sweep, monkeypatch):
    folder, grouped = sweep
    monkeypatch.setattr(progress, 'describe_ignored', lambda cells: ['a [word]'])
    console, printed = Console(file=io.StringIO(), width=200), set()
    for _ in range(2):  # two waves of a tuned sweep
        with show_progress(folder, grouped, console, printed):
            assert console.file.getvalue().splitlines()[0] == 'NOTE: a [word]'
    assert console.file.getvalue().count('NOTE: ') == 1


def test_unreadable_cell_is_counted(sweep):
    folder, grouped = sweep
    (folder / grouped[0][0].name / 'summary.json').write_text('{"status": "do')
    assert (
        make_progress(sweep)
        .format_lines()[-1]
        .startswith('sweep 19 of 24 done, 1 diverged, 1 failed, 1 unreadable  ')
    )


def test_missing_runs_are_named(sweep):
    """Another command has written sweep.json since; it lists none of the first group."""
    folder, grouped = sweep
    display = make_progress(sweep)
    record, names = read_json(folder / 'sweep.json'), {cell.name for cell in grouped[0]}
    record['cells'] = [cell for cell in record['cells'] if cell['cell'] not in names]
    (folder / 'sweep.json').write_text(json.dumps(record))
    group, last, note = display.format_lines()
    assert group.startswith('group 2 of 2  ') and last.startswith('sweep 9 of 12 done, 1 diverged')
    assert note.startswith(f'NOTE: {folder}/sweep.json no longer lists 12 of these runs, because ')


def test_waiting_group_has_no_line(sweep):
    folder, grouped = sweep
    for cell in grouped[1]:
        if (folder / cell.name).exists():
            (folder / cell.name).rename(folder.parent / cell.name)
    assert [line.split('  ')[0] for line in make_progress(sweep).format_lines()] == [
        'group 1 of 2',
        'sweep 11 of 24 done, 1 failed',
    ]


def test_time_left_follows_current_rate(sweep, monkeypatch):
    """200 steps took 60 s, with 80 and 200 left in the two unfinished runs."""
    folder, grouped = sweep
    times = iter([100.0, 160.0])
    done = grouped[0][0]
    (folder / done.name).rename(folder.parent / done.name)
    monkeypatch.setattr(progress.time, 'monotonic', lambda: next(times))
    view = make_progress(sweep)
    (folder.parent / done.name).rename(folder / done.name)
    assert view.format_lines()[-1].endswith('1.4 min left')


def test_time_left_includes_programs_to_compile(sweep, monkeypatch):
    """Of 60 s 24 were compilation, so that 200 steps took 36 s; 280 are left. The second program
    takes 24 s, too.
    """
    folder, grouped = sweep
    times = iter([100.0, 160.0])
    done, compiled = grouped[0][0], {}
    (folder / done.name).rename(folder.parent / done.name)
    monkeypatch.setattr(progress.time, 'monotonic', lambda: next(times))
    view = make_progress(sweep, compiled=lambda: dict(compiled))
    (folder.parent / done.name).rename(folder / done.name)
    compiled[program_key(done)] = 24.0
    assert view.format_lines()[-1].endswith(f'{(280 * 36 / 200 + 24) / 60:.1f} min left')
    assert f'{(280 * 36 / 200 + 24) / 60:.1f}' == '1.2'


def test_earlier_waves_do_not_count(sweep, monkeypatch):
    """Catches a rate that is negative, as the steps of other waves were subtracted."""
    folder, grouped = sweep
    times = iter([100.0, 160.0])
    monkeypatch.setattr(progress.time, 'monotonic', lambda: next(times))
    wave = [[cell for cell in grouped[1] if Run(folder / cell.name).status is None]]
    (unfinished,) = [cell for cell in wave[0] if (folder / cell.name).exists()]
    (folder / unfinished.name).rename(folder.parent / unfinished.name)
    view = make_progress((folder, wave))
    (folder.parent / unfinished.name).rename(folder / unfinished.name)
    assert view.format_lines()[-1].endswith('2.3 min left')  # 120 steps took 60 s, 280 are left


@pytest.mark.parametrize(('terminal', 'interval'), [(True, 1.0), (False, 30.0)])
def test_reading_interval_grows_with_reading_time(sweep, monkeypatch, terminal, interval):
    clock = [0.0]
    monkeypatch.setattr(progress.time, 'monotonic', lambda: clock[0])
    view, updates = make_progress(sweep, terminal), []
    took = 0.0

    def lines():
        updates.append(clock[0])
        clock[0] += took
        return []

    view.format_lines = lines
    for _ in range(3):
        view.tick()
    assert updates == [0.0]
    clock[0] = interval - 0.1
    view.tick()
    assert updates == [0.0]
    clock[0] = interval
    took = 2.0
    view.tick()
    clock[0] = interval + took + took / progress.READING_SHARE - 0.1
    view.tick()
    assert updates == [0.0, interval]
    clock[0] += 0.1
    view.tick()
    assert len(updates) == 3
    view.tick(force=True)
    assert len(updates) == 4
