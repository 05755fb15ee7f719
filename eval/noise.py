"""Tells which difference of losses a number of seeds can detect.

    python -m eval.noise RUN [RUN ...] [--tests=N] [--metric=ce|bits_per_byte] [--json]

A RUN is a run, a sweep, or a folder of them. Runs that differ only in
train.seed and data.seed are one setting; the spread of their final losses is
pooled over all settings. If no setting has two seeds, the spread is that of the
recorded setting that differs in the fewest fields, from --among: by default,
all runs beside the first RUN.
"""

from lm.launch.before_jax import prepare_streams

if __name__ == '__main__':
    prepare_streams()  # before any file is opened

import dataclasses
import math
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from absl import flags

from eval.console.json_line import define_json, print_json
from eval.evaluation.traces import NEUTRAL_FIELDS
from lm.config.fields import is_passive
from lm.launch.command import run_program
from lm.launch.path_flags import define_path
from lm.record.names import CONFIG, SWEEP
from lm.record.run import METRICS
from lm.storage.files import expand_home
from lm.study.plan.settings import SEEDS
from lm.study.statistics import (
    CONFIDENCE,
    MAX_SEEDS,
    POWER,
    detectable_difference,
    deviation_interval,
)
from lm.study.tables.columns import Record, columns
from lm.study.tables.results import gather_all
from lm.study.tables.text import format_number

SEED_COUNTS = (2, 3, 5, 10, 20)  # rows of the table
UNITS = {'ce': 'nats per token', 'bits_per_byte': 'bits per byte'}
MOST_FIELDS = 6  # that a note lists
# How often a run reports and saves; with `NEUTRAL_FIELDS` and section `eval`, this does not change
# its loss.
INTERVALS = (
    *('train.checkpoint_every', 'train.keep_last', 'train.keep_best', 'train.log_every'),
    *('train.eval_every', 'train.diagnose_every'),
)


@dataclasses.dataclass(frozen=True)
class Setting:
    """The runs that differ only in their seeds.

    Attributes:
      fields: the config by column, as far as the loss depends on it, without seeds.
      losses: final loss by seeds.
      sweep: the sweep of the runs, or their folder.
    """

    fields: dict[str, Any]
    losses: dict[tuple, float]
    sweep: str


@dataclasses.dataclass(frozen=True)
class SeedSpread:
    """Standard deviation of final losses over seeds, pooled over settings.

    Attributes:
      deviation: of one run; nan if no setting has two seeds.
      freedom: its degrees of freedom.
      paired: of the difference of two settings with the same seeds. Without such pairs it is
        sqrt(2) times `deviation`, as if seeds had no effect in common.
      paired_freedom: its degrees of freedom; 0 without pairs.
      mean: mean final loss.
    """

    deviation: float
    freedom: int
    paired: float
    paired_freedom: int
    mean: float


def list_settings(records: Iterable[Record], metric: str = 'ce') -> list[Setting]:
    """Returns the settings of runs that ended with a finite loss.

    Args:
      records: as `eval.runs.gather` returns them.
      metric: column of the loss.
    """
    names = columns()
    seed_names = [names[path] for path in SEEDS]
    left_out = (*SEEDS, *INTERVALS, *NEUTRAL_FIELDS, 'eval.')
    field_names = [
        name
        for path, name in names.items()
        if not path.startswith(left_out) and not is_passive(path)
    ]
    settings: dict[tuple, Setting] = {}
    for record in records:
        loss = record[metric]
        if record['status'] != 'done' or loss is None or not math.isfinite(loss):
            continue
        fields = {name: record[name] for name in field_names}
        sweep = str(Path(record['workdir']).parent) if record['sweep'] else ''
        key = sweep, *map(repr, fields.values())
        setting = settings.setdefault(key, Setting(fields, {}, sweep))
        setting.losses[tuple(record[name] for name in seed_names)] = loss
    return list(settings.values())


def measure_spread(settings: Sequence[Setting]) -> SeedSpread:
    """Returns the spread over seeds: s^2 = sum (n_i - 1) s_i^2 / sum (n_i - 1).

    Differences are paired by seed, between each setting and the first of its sweep that has as many
    seeds as any.
    """
    squares, freedom = _pool(setting.losses.values() for setting in settings)
    paired_squares, paired_freedom = _pool(_paired_differences(settings))
    deviation = math.sqrt(squares / freedom) if freedom else math.nan
    paired = math.sqrt(paired_squares / paired_freedom) if paired_freedom else math.nan
    losses = [loss for setting in settings for loss in setting.losses.values()]
    return SeedSpread(
        deviation=deviation,
        freedom=freedom,
        paired=paired if paired_freedom else math.sqrt(2) * deviation,
        paired_freedom=paired_freedom,
        mean=float(np.mean(losses)) if losses else math.nan,
    )


def _pool(groups: Iterable[Iterable[float]]) -> tuple[float, int]:
    """Returns the squares about the mean of each group, summed, and their degrees of freedom."""
    squares, freedom = 0.0, 0
    for group in groups:
        values = np.array([*group], float)
        if len(values) > 1:
            squares += float(np.sum((values - values.mean()) ** 2))
            freedom += len(values) - 1
    return squares, freedom


def _paired_differences(settings: Sequence[Setting]) -> Iterator[list[float]]:
    """Yields differences from the reference setting of the same sweep, seed by seed."""
    by_sweep: dict[str, list[Setting]] = {}
    for setting in settings:
        by_sweep.setdefault(setting.sweep, []).append(setting)
    for siblings in by_sweep.values():
        reference = max(siblings, key=lambda setting: len(setting.losses))
        for setting in siblings:
            if setting is not reference:
                shared = setting.losses.keys() & reference.losses.keys()
                yield [setting.losses[seed] - reference.losses[seed] for seed in sorted(shared)]


def nearest_settings(
    settings: Sequence[Setting], candidates: Sequence[Setting]
) -> tuple[list[Setting], list[str]]:
    """Returns the candidates with two seeds that differ from the first setting in fewest fields.

    Args:
      settings: settings without a spread.
      candidates: recorded settings.

    Returns:
      (settings that are equally near, the columns in which the first of them differs).

    Raises:
      ValueError: if no candidate has two seeds.
    """
    fields = settings[0].fields
    distances = [
        ([name for name in fields if fields[name] != candidate.fields[name]], candidate)
        for candidate in candidates
        if len(candidate.losses) > 1
    ]
    if not distances:
        raise ValueError(
            'no setting has two seeds, and no run beside it has: the spread is unknown. Train '
            'seeds, with --config.sweep="{\'train.seed\': (0, 1, 2)}", or name a folder of runs '
            'with --among'
        )
    shortest = min(len(names) for names, _ in distances)
    nearest = [(names, candidate) for names, candidate in distances if len(names) == shortest]
    return [candidate for _, candidate in nearest], nearest[0][0]


def describe(spread: SeedSpread, metric: str, tests: int) -> list[str]:
    """Returns the lines that the program prints about a spread.

    Args:
      spread: the spread over seeds.
      metric: column of the loss.
      tests: comparisons tested together.
    """
    low, high = deviation_interval(spread.deviation, spread.freedom)
    lines = [
        f'mean final loss of all runs {spread.mean:.4f} {UNITS[metric]}',
        f'standard deviation over seeds {spread.deviation:.2g} ({CONFIDENCE:.0%} interval '
        f'{low:.2g} to {high:.2g}, {spread.freedom} degrees of freedom)',
    ]
    if spread.paired_freedom:
        low, high = deviation_interval(spread.paired, spread.paired_freedom)
        lines.append(
            f'of a difference at the same seeds {spread.paired:.2g} ({low:.2g} to {high:.2g}, '
            f'{spread.paired_freedom} degrees of freedom)'
        )
    else:
        lines.append(
            f'of a difference {spread.paired:.2g}: sqrt(2) times that, as no two settings share '
            'seeds'
        )
    several = f', {tests} comparisons together' * (tests > 1)
    lines += ['', f'seeds per setting  detectable difference{several}']
    lines += [f'{n:<17}  {detectable_difference(n, spread.paired, tests):.2g}' for n in SEED_COUNTS]
    return [
        *lines,
        '',
        f'A difference is detected with probability {POWER:g}, by the paired t test of a sweep at '
        f'{1 - CONFIDENCE:.2g}',
    ]


def main(argv: list[str]) -> None:
    runs, metric, tests = [*map(expand_home, argv[1:])], flags.FLAGS.metric, flags.FLAGS.tests
    if not runs:
        raise ValueError('name runs or sweeps: python -m eval.noise RUN [RUN ...]')
    settings = list_settings(gather_all(runs), metric)
    if not settings:
        raise ValueError(f'{", ".join(map(str, runs))}: no run has ended with a {metric}')
    counts = [len(setting.losses) for setting in settings]
    plural = '' if len(counts) == 1 else 's'
    print(f'{len(counts)} setting{plural}, {min(counts)} to {max(counts)} seeds each')
    if max(counts) < 2:
        among = flags.FLAGS.among or _list_siblings(Path(runs[0]))
        nearest, names = nearest_settings(settings, list_settings(gather_all(among), metric))
        values = nearest[0].fields
        listed = ', '.join(f'{name} {format_number(values[name])}' for name in names[:MOST_FIELDS])
        remainder = f' and {len(names) - MOST_FIELDS} more' if len(names) > MOST_FIELDS else ''
        print(
            f'NOTE: no setting has two seeds. The spread is that of the nearest recorded setting '
            f'({nearest[0].sweep or "single runs"}), which differs in {len(names)} fields: '
            f'{listed}{remainder}'
        )
        settings = nearest
    spread = measure_spread(settings)
    print('\n'.join(describe(spread, metric, tests)))
    if flags.FLAGS.json:
        detectable = {str(n): detectable_difference(n, spread.paired, tests) for n in SEED_COUNTS}
        print_json(
            {
                'runs': runs,
                'metric': metric,
                'tests': tests,
                'is_of_nearest_setting': max(counts) < 2,
                **dataclasses.asdict(spread),
                'detectable_difference': detectable,
            }
        )


def _list_siblings(run: Path) -> list[Path]:
    """Returns the runs and sweeps in the folder that holds a run or its sweep."""
    folder = run.absolute().parent
    folder = folder.parent if (folder / SWEEP).exists() else folder
    return [
        path
        for path in sorted(folder.iterdir())
        if (path / CONFIG).exists() or (path / SWEEP).exists()
    ]


if __name__ == '__main__':
    text = 'Runs or sweeps whose spread may be used; default: those beside the first RUN.'
    define_path('among', None, text, is_list=True)
    flags.DEFINE_integer(
        'tests', 1, 'Comparisons with one baseline.', lower_bound=1, upper_bound=MAX_SEEDS
    )
    flags.DEFINE_enum('metric', 'ce', list(METRICS), 'The loss.')
    define_json()
    run_program(main)
