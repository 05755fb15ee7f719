"""Seconds of an SQL query over the runs of a large sweep, when some or all of its runs are new.

    uv run python -m tests.bench.table [--cells=2000] [--times=5]

A process reads the records of a run again only if its files have changed. Three queries are
compared in one process: after all runs have changed, after one has, and after none has.
"""

from lm.launch.before_jax import prepare_process

if __name__ == '__main__':
    prepare_process()

import argparse
import os
import statistics
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

from eval import runs
from lm.record.names import SUMMARY
from lm.study.plan.cells import expand_sweep
from tests.bench.growth_sweeps import many_rates, train_cell, write_sweep

SQL = 'select status, count(*) as n from runs group by status'


def touch(paths: Sequence[Path]) -> None:
    for path in paths:
        os.utime(path)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split('\n')[0])
    parser.add_argument('--cells', type=int, default=2000)
    parser.add_argument('--times', type=int, default=5)
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        tree, template = train_cell(Path(folder))
        cells = expand_sweep(tree, many_rates(arguments.cells))
        workdir = Path(folder) / 'sweep'
        write_sweep(workdir, cells, template, tree)
        summaries = [workdir / cell.name / SUMMARY for cell in cells]
        runs.query(SQL, workdir)  # imports
        for name, changed in {'all': summaries, 'one': summaries[:1], 'none': []}.items():
            seconds = []
            for _ in range(arguments.times):
                touch(changed)
                start = time.perf_counter()
                table = runs.query(SQL, workdir)
                seconds.append(time.perf_counter() - start)
                assert sum(table['n'].to_pylist()) == len(cells)
            median = statistics.median(seconds)
            print(f'{name} changed: {median:.2f} s ({min(seconds):.2f} to {max(seconds):.2f})')


if __name__ == '__main__':
    main()
