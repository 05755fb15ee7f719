"""Property: sweeps of twice as many cells need at most about twice as many operations.

Operations are counted and not timed: calls of functions, files that are opened, and comparisons of
values (`Counted`), which a search in a list makes without a call.
"""

import collections
import cProfile
import functools
import math
import os
import pstats
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest

from eval.report import figures, series
from eval.report.page import write_report
from eval.runs import overview, query
from lm.config.resolve import resolve
from lm.storage import files
from lm.study.plan.cells import expand_sweep, group_by_program
from lm.study.tables import comparison, results, variants
from lm.study.train import ledger, progress
from tests.eval import sweep_fixture
from tests.helpers import tiny_raw

MOST = 1.15  # exponent of the operations; 2 for a search of a list for each of its entries
SIZES = 32, 64  # variants of two runs each


class Counted(float):
    """A number that counts how often it is compared."""

    comparisons = 0

    def __eq__(self, value: object) -> bool:
        Counted.comparisons += 1
        return float(self) == value

    __hash__ = float.__hash__


def exponent(counts: Mapping[int, int]) -> float:
    """Returns the exponent of counts by size, for two sizes."""
    (small, few), (large, many) = counts.items()
    return math.log(many / few) / math.log(large / small)


def count_calls(act: Callable[[], Any]) -> int:
    profile = cProfile.Profile()
    profile.runcall(act)
    return pstats.Stats(profile).total_calls  # ty: ignore[unresolved-attribute]


def count_comparisons(act: Callable[[], Any]) -> int:
    Counted.comparisons = 0
    act()
    return Counted.comparisons


def touch_configs(folder: Path) -> None:
    """Has the runs of a sweep read again, as if each had changed."""
    for path in folder.glob('*/config.json'):
        os.utime(path)


def make_axes(n: int) -> dict[str, Any]:
    return {'model.d_ff': tuple(range(64, 64 + n)), 'optim.lr': (1e-3, 3e-3)}


@pytest.fixture(scope='module')
def folders(tmp_path_factory) -> dict[int, Path]:
    """Returns sweeps of SIZES, of which the last three quarters of the cells have not begun."""
    parent, by_size = tmp_path_factory.mktemp('sweeps'), {}
    for n in SIZES:
        waiting = {
            (width, lr): 'waiting'
            for width in make_axes(n)['model.d_ff'][n // 4 :]
            for lr in make_axes(n)['optim.lr']
        }
        by_size[n] = parent / str(n)
        sweep_fixture.write_sweep(by_size[n], make_axes(n), waiting)
    return by_size


@pytest.fixture
def open_counts(monkeypatch) -> collections.Counter:
    """Returns the names of files that were opened, with counts."""
    counts, original = collections.Counter(), files.open_regular

    def counting_open(path):
        counts[Path(path).name] += 1
        return original(path)

    modules = (files, variants)
    for module in modules:
        monkeypatch.setattr(module, 'open_regular', counting_open)
    return counts


def test_plan_grows_with_the_cells(tmp_path):
    base, calls, to_open = tiny_raw(), {}, {}
    for n in SIZES:
        cells = expand_sweep(base, make_axes(n))
        calls[n] = count_calls(lambda n=n: group_by_program(expand_sweep(base, make_axes(n))))
        groups, folder = group_by_program(cells), tmp_path / str(n)
        for _ in range(2):  # a new folder, and one that an earlier command has opened
            act = functools.partial(ledger.open_sweep, folder, resolve(base), groups, False)
            to_open[n] = to_open.get(n, 0) + count_calls(act)
    assert exponent(calls) < MOST, calls
    assert exponent(to_open) < MOST, to_open


@pytest.mark.parametrize(
    'reader',
    [
        results.gather,
        progress.write_summary,
        lambda folder: overview(results.gather(folder)),
        lambda folder: query('select max(runs.ce) from runs join metrics using (cell)', folder),
        sweep_fixture.compare_sweep,
        pytest.param(write_report, marks=pytest.mark.full),
    ],
    ids=['gather', 'summary', 'overview', 'query', 'compare', 'report'],
)
def test_readers_grow_with_the_cells(folders, reader):
    for folder in folders.values():
        reader(folder)  # fills caches, and imports
        touch_configs(folder)
    calls = {n: count_calls(functools.partial(reader, folder)) for n, folder in folders.items()}
    assert exponent(calls) < MOST, calls


def test_comparison_reads_each_run_at_most_twice(folders, open_counts):
    """Once for its variant, once for the variants of which no run has begun."""
    for n, folder in folders.items():
        records, sweep = results.gather(folder), results.read_sweep(folder)
        open_counts.clear()
        comparison.compare(records, sweep)
        assert 0 < open_counts['metrics.jsonl'] <= 2 * len(records) == 4 * n


def test_variants_without_a_run_start_from_the_mean_over_the_sweep(folders):
    records, sweep = results.gather(folders[32]), results.read_sweep(folders[32])
    initials = [c.initial for c in comparison.compare(records, sweep)]
    assert initials == [pytest.approx(sweep_fixture.INITIAL_CE)] * 32


def test_summary_reads_each_record_once(folders, open_counts):
    folder = folders[32]
    touch_configs(folder)
    progress.write_summary(folder)
    n_begun = len(list(folder.glob('*/config.json')))
    assert open_counts['config.json'] == open_counts['summary.json'] == n_begun
    assert open_counts['sweep.json'] == 1
    assert results.pq.read_table(folder / results.TABLE).num_rows == 64


def rate_variant(n: int) -> variants.Variant:
    records = [
        {'lr': Counted(1 + i // 2), 'workdir': f'{i // 2} {i % 2}', 'cell': '', 'train_seed': i % 2}
        for i in range(2 * n)
    ]
    return variants.Variant('all', {}, records, True)


def test_rates_are_searched_once():
    counts = {}
    for n in SIZES:
        variant = rate_variant(n)

        def look_up(variant=variant, n=n):
            assert variant.rates == [*map(float, range(1, n + 1))]
            for lr in variant.rates:
                records = variant.records_at(lr)
                assert [r['workdir'] for r in records] == [f'{lr - 1:.0f} 0', f'{lr - 1:.0f} 1']
            assert variant.records_at(0.5) == variant.records_at(None) == []

        counts[n] = count_comparisons(look_up)
    assert exponent(counts) < MOST, counts


def test_runs_at_the_best_rate_are_searched_once(monkeypatch):
    """As in a sweep of many seeds at one learning rate."""
    lookups = collections.Counter()
    original = comparison.Comparison.display_workdirs.fget

    def counting(self):
        lookups[self.variant.name] += 1
        return original(self)

    monkeypatch.setattr(comparison.Comparison, 'display_workdirs', property(counting))
    records = [
        dict.fromkeys(('lr', 'data_seed'), 1.0) | {'workdir': str(i), 'cell': '', 'train_seed': i}
        for i in range(8)
    ]
    variant = variants.Variant('all', {}, records, True)
    nothing = comparison.t_interval([])
    compared = comparison.Comparison(
        variant, {}, 1.0, 1.0, nothing, nothing, 1.0, 1.0, nothing, 0, []
    )
    runs = figures.collect_runs([compared], {record['workdir']: None for record in records})
    assert [run.is_best for run in runs] == [True] * 8
    assert lookups['all'] == 1


def test_means_over_seeds_search_no_step():
    counts = {}
    for n in SIZES:
        maps = [([Counted(i) for i in range(n)], [[1.0]] * n) for _ in range(3)]
        counts[n] = count_comparisons(lambda maps=maps: series.mean_map(maps))
    assert exponent(counts) < MOST, counts


def test_axes_search_no_value():
    counts = {}
    for n in SIZES:
        values = [Counted(i % n) for i in range(2 * n)]
        cells = [{'changes': {'optim.lr': value, 'model.pattern': ['a', 'b']}} for value in values]

        def collect(cells=cells, n=n):
            axes = ledger._collect_axes(cells)
            assert axes == {'optim.lr': [*range(n)], 'model.pattern': [['a', 'b']]}

        counts[n] = count_comparisons(collect)
    assert exponent(counts) < MOST, counts
