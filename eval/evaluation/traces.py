"""Numbers of suites over the checkpoints of a run and over seeds: how reliable they are.

As in arXiv:2406.10229: monotonicity, the spread over seeds, and the signal-to-noise ratio. Runs
with configs that differ only in seeds form a group.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.evaluation.targets import Evaluation
from lm.study.tables.text import format_number
from lm.study.tables.variants import SEEDS

# Other fields in which runs of a group may differ: they change numbers by rounding at most.
NEUTRAL_FIELDS = ('mesh.', 'kernels.', 'data.cache_dir', 'data.prefetch')
MAX_STEPS = 6  # columns of steps in the table on a terminal


@dataclasses.dataclass(frozen=True)
class NumberTrace:
    """A number of a suite in each run of a group, by step.

    monotonicity: Kendall's tau-b between the number and the step, averaged over `ordered_runs`:
    runs with two steps or more and a number that changes; nan without such a run. seed_std: the
    standard deviation over seeds, averaged over the steps that two runs have. signal_to_noise: the
    mean over those runs and steps, over seed_std. Both are nan without two runs.
    """

    suite: str
    number: str
    group: str
    values: Mapping[str, Mapping[int, float]]  # by run and step

    @property
    def steps(self) -> list[int]:
        return sorted({step for series in self.values.values() for step in series})

    @property
    def is_constant(self) -> bool:
        """Whether the number is equal at all steps of all runs, such as a count."""
        numbers = [value for series in self.values.values() for value in series.values()]
        return len(numbers) > 1 and len(set(map(repr, numbers))) == 1  # nan is not equal to nan

    @property
    def ordered_runs(self) -> list[str]:
        """Runs that have a monotonicity. It is nan for a run with a nan."""
        return [run for run, series in self.values.items() if len(set(series.values())) > 1]

    @property
    def monotonicity(self) -> float:
        ordered = [self.values[run] for run in self.ordered_runs]
        if not ordered:
            return math.nan
        return float(np.mean([kendall_tau([*series], [*series.values()]) for series in ordered]))

    @property
    def seed_std(self) -> float:
        shared = self._values_by_seed()
        return float(np.mean([np.std(values, ddof=1) for values in shared])) if shared else math.nan

    @property
    def signal_to_noise(self) -> float:
        shared = self._values_by_seed()
        if not shared:
            return math.nan
        with np.errstate(divide='ignore', invalid='ignore'):  # seeds may all be equal
            return float(
                np.mean([np.mean(values) for values in shared]) / np.float64(self.seed_std)
            )

    def _values_by_seed(self) -> list[list[float]]:
        """Returns the values of all runs at each step that at least two runs have."""
        by_step = [
            [series[step] for series in self.values.values() if step in series]
            for step in self.steps
        ]
        return [values for values in by_step if len(values) > 1]

    def mean_at(self, step: int) -> float:
        """Returns the mean over the runs that have this step."""
        return float(np.mean([series[step] for series in self.values.values() if step in series]))

    @property
    def record(self) -> dict[str, Any]:
        """The fields and statistics for JSON."""
        return dataclasses.asdict(self) | {
            'monotonicity': self.monotonicity,
            'monotonicity_runs': len(self.ordered_runs),
            'seed_std': self.seed_std,
            'signal_to_noise': self.signal_to_noise,
        }


def kendall_tau(x: Sequence[float], y: Sequence[float]) -> float:
    """Returns Kendall's tau-b of two sequences (Biometrika 33, 1945).

    It is (pairs in the same order - pairs in the opposite order) / sqrt(pairs untied in x * pairs
    untied in y), and nan if either is constant or holds a nan.
    """
    x_N, y_N = (np.asarray(values, float) for values in (x, y))
    if np.isnan(x_N).any() or np.isnan(y_N).any():
        return math.nan
    signs = [np.sign(v[:, None] - v[None]) for v in map(_ranks, (x_N, y_N))]
    n_untied = [np.count_nonzero(sign) for sign in signs]
    if not all(n_untied):
        return math.nan
    return float(np.sum(signs[0] * signs[1]) / math.sqrt(n_untied[0] * n_untied[1]))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Returns numbers in the same order, all of them finite."""
    return np.unique(values, return_inverse=True)[1]


def collect_traces(evaluations: Sequence[Evaluation]) -> list[NumberTrace]:
    """Returns a trace for each number of each suite and each group of runs."""
    groups = group_evaluations(evaluations)
    numbers = dict.fromkeys(
        (label, key)
        for evaluation in evaluations
        for label, suite_result in evaluation.results.items()
        for key in suite_result.numbers
    )
    traces = []
    for label, key in numbers:
        for name, members in groups.items():
            values: dict[str, dict[int, float]] = {}
            for evaluation in sorted(members, key=lambda evaluation: evaluation.step):
                numbers_here = evaluation.results[label].numbers
                if key in numbers_here:
                    values.setdefault(evaluation.run, {})[evaluation.step] = float(
                        numbers_here[key]
                    )
            if values:
                traces.append(NumberTrace(label, key, name, values))
    return traces


def group_evaluations(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """Returns the evaluations of runs that differ only in seeds, by the name of the group.

    The name is the run, or the fields that differ between groups; '' for a single group.
    """
    groups: dict[tuple, list[Evaluation]] = {}
    for evaluation in evaluations:
        shared_fields = {
            path: value
            for path, value in evaluation.config.items()
            if path not in SEEDS and not path.startswith(NEUTRAL_FIELDS)
        }
        groups.setdefault(
            tuple(sorted((path, repr(v)) for path, v in shared_fields.items())), []
        ).append(evaluation)
    keys = [dict(key) for key in groups]
    paths = dict.fromkeys(path for key in keys for path in key)
    # Fields that differ in the same way are named once, by the shortest path.
    path_by_values: dict[tuple, str] = {}
    for path in sorted(paths, key=len):
        values = tuple(key.get(path) for key in keys)
        if len(set(values)) > 1:
            path_by_values.setdefault(values, path)
    by_name = {}
    for members in groups.values():
        runs = list(dict.fromkeys(evaluation.run for evaluation in members))
        values = [(p.split('.')[1], members[0].config.get(p)) for p in path_by_values.values()]
        description = ', '.join(f'{name} {format_number(value)}' for name, value in values)
        name = '' if len(groups) == 1 else runs[0] if len(runs) == 1 else description
        by_name[name] = members
    return by_name


def format_traces(traces: Sequence[NumberTrace]) -> list[dict[str, Any]]:
    """Returns table rows: each number at each step, or at the first and last of many steps.

    A number that varies has its statistics too. `runs used` is the number of runs in the mean of
    monotonicity, if not all.
    """
    steps = sorted({step for trace in traces for step in trace.steps})
    is_partial = any(0 < len(trace.ordered_runs) < len(trace.values) for trace in traces)
    has_groups, has_seeds = (
        len({trace.group for trace in traces}) > 1,
        any(len(t.values) > 1 for t in traces),
    )
    rows = []
    for trace in traces:
        row: dict[str, Any] = {'suite': trace.suite, 'number': trace.number}
        row |= {'runs': trace.group} if has_groups else {}
        if len(steps) <= MAX_STEPS:
            row |= {
                f'step {step}': trace.mean_at(step) if step in trace.steps else None
                for step in steps
            }
        else:
            row |= {'first': trace.mean_at(trace.steps[0]), 'last': trace.mean_at(trace.steps[-1])}
        statistics: dict[str, Any] = {'monotonicity': trace.monotonicity} if len(steps) > 1 else {}
        if is_partial:
            statistics['runs used'] = f'{len(trace.ordered_runs)} of {len(trace.values)}'
        if has_seeds:
            statistics |= {'seed std': trace.seed_std, 'signal to noise': trace.signal_to_noise}
        if len(trace.values) < 2:
            # A single run has no spread over seeds.
            statistics |= dict.fromkeys(statistics.keys() - {'monotonicity', 'runs used'})
        row |= dict.fromkeys(statistics) if trace.is_constant else statistics
        rows.append(row)
    return rows
