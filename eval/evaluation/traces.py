"""Numbers of suites over the checkpoints of a run and over seeds: how steady they are.

As arXiv:2406.10229 has them: monotonicity, the spread over seeds, and the signal to noise of a
number. Runs whose configs differ in seeds alone are a group.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.evaluation.targets import Evaluation
from lm.study.tables.text import format_number
from lm.study.tables.variants import SEEDS

# What runs of a group may differ in besides: it changes no number, or by rounding alone.
NEUTRAL_FIELDS = ('mesh.', 'kernels.', 'data.cache_dir', 'data.prefetch')
MAX_STEPS = 6  # that the table on a terminal has a column of, each


@dataclasses.dataclass(frozen=True)
class NumberTrace:
    """A number of a suite in each run of a group, by step.

    monotonicity: Kendall's tau-b between the number and the step, the mean over `ordered_runs`: the
    runs with two steps or more in which the number changes; nan if there is none. seed_std: the
    standard deviation over seeds, the mean over the steps that two runs have; signal_to_noise: the
    mean over those runs and steps, over seed_std; both nan where there are no two runs.
    """

    suite: str
    number: str
    group: str
    values: Mapping[str, Mapping[int, float]]  # by run and step

    @property
    def steps(self) -> list[int]:
        return sorted({step for own in self.values.values() for step in own})

    @property
    def is_constant(self) -> bool:
        """Whether it is a count or the like, equal at all steps of all runs."""
        found = [value for own in self.values.values() for value in own.values()]
        return len(found) > 1 and len(set(map(repr, found))) == 1  # nan is not nan

    @property
    def ordered_runs(self) -> list[str]:
        """Runs that have a monotonicity; that of one whose number is nan somewhere is nan."""
        return [run for run, own in self.values.items() if len(set(own.values())) > 1]

    @property
    def monotonicity(self) -> float:
        ordered = [self.values[run] for run in self.ordered_runs]
        if not ordered:
            return math.nan
        return float(np.mean([kendall_tau([*own], [*own.values()]) for own in ordered]))

    @property
    def seed_std(self) -> float:
        shared = self._values_by_seed()
        return float(np.mean([np.std(own, ddof=1) for own in shared])) if shared else math.nan

    @property
    def signal_to_noise(self) -> float:
        shared = self._values_by_seed()
        if not shared:
            return math.nan
        with np.errstate(divide='ignore', invalid='ignore'):  # seeds may all be equal
            return float(np.mean([np.mean(own) for own in shared]) / np.float64(self.seed_std))

    def _values_by_seed(self) -> list[list[float]]:
        """Returns the values of the runs that have them, for each step that two runs have."""
        found = [[own[step] for own in self.values.values() if step in own] for step in self.steps]
        return [own for own in found if len(own) > 1]

    def mean_at(self, step: int) -> float:
        """Returns the mean over the runs that have this step."""
        return float(np.mean([own[step] for own in self.values.values() if step in own]))

    @property
    def record(self) -> dict[str, Any]:
        """Returns all of it for JSON."""
        return dataclasses.asdict(self) | {
            'monotonicity': self.monotonicity,
            'monotonicity_runs': len(self.ordered_runs),
            'seed_std': self.seed_std,
            'signal_to_noise': self.signal_to_noise,
        }


def kendall_tau(x: Sequence[float], y: Sequence[float]) -> float:
    """Kendall's tau-b: (pairs in one order - pairs in the other) / sqrt(pairs untied in x * pairs
    untied in y); nan where either never changes, or holds a nan (Biometrika 33, 1945).
    """
    one, other = (np.asarray(values, float) for values in (x, y))
    if np.isnan(one).any() or np.isnan(other).any():
        return math.nan
    signs = [np.sign(v[:, None] - v[None]) for v in map(_ranks, (one, other))]
    both = [np.count_nonzero(sign) for sign in signs]
    if not all(both):
        return math.nan
    return float(np.sum(signs[0] * signs[1]) / math.sqrt(both[0] * both[1]))


def _ranks(values: np.ndarray) -> np.ndarray:
    """Returns numbers in the same order, none of them infinite."""
    return np.unique(values, return_inverse=True)[1]


def collect_traces(evaluations: Sequence[Evaluation]) -> list[NumberTrace]:
    """Returns a trace for each number of each suite, and each group of runs."""
    groups = group_evaluations(evaluations)
    numbers = dict.fromkeys(
        (label, key)
        for one in evaluations
        for label, result in one.results.items()
        for key in result.numbers
    )
    traces = []
    for label, key in numbers:
        for name, members in groups.items():
            values: dict[str, dict[int, float]] = {}
            for one in sorted(members, key=lambda one: one.step):
                of_suite = one.results[label].numbers
                if key in of_suite:
                    values.setdefault(one.run, {})[one.step] = float(of_suite[key])
            if values:
                traces.append(NumberTrace(label, key, name, values))
    return traces


def group_evaluations(evaluations: Sequence[Evaluation]) -> dict[str, list[Evaluation]]:
    """Returns the evaluations of runs that differ in seeds alone, by what tells the group apart:
    its run, or the fields that differ between groups; '' for a single group.
    """
    groups: dict[tuple, list[Evaluation]] = {}
    for one in evaluations:
        alike = {
            path: value
            for path, value in one.config.items()
            if path not in SEEDS and not path.startswith(NEUTRAL_FIELDS)
        }
        groups.setdefault(tuple(sorted((path, repr(v)) for path, v in alike.items())), []).append(
            one
        )
    keys = [dict(key) for key in groups]
    paths = dict.fromkeys(path for key in keys for path in key)
    apart: dict[tuple, str] = {}  # of fields that differ alike, as one that follows another
    for path in sorted(paths, key=len):
        values = tuple(key.get(path) for key in keys)
        if len(set(values)) > 1:
            apart.setdefault(values, path)
    by_name = {}
    for members in groups.values():
        runs = list(dict.fromkeys(one.run for one in members))
        values = [(p.split('.')[1], members[0].config.get(p)) for p in apart.values()]
        words = ', '.join(f'{name} {format_number(value)}' for name, value in values)
        name = '' if len(groups) == 1 else runs[0] if len(runs) == 1 else words
        by_name[name] = members
    return by_name


def format_traces(traces: Sequence[NumberTrace]) -> list[dict[str, Any]]:
    """Returns the rows of a table: a number at each step, or at the first and last of many, and its
    statistics, where there are any: not of one that is equal everywhere. `of runs` says how many of
    its runs a monotonicity is the mean over, if one is not over all of them.
    """
    steps = sorted({step for trace in traces for step in trace.steps})
    is_partial = any(0 < len(trace.ordered_runs) < len(trace.values) for trace in traces)
    several, seeds = (
        len({trace.group for trace in traces}) > 1,
        any(len(t.values) > 1 for t in traces),
    )
    rows = []
    for trace in traces:
        row: dict[str, Any] = {'suite': trace.suite, 'number': trace.number}
        row |= {'runs': trace.group} if several else {}
        if len(steps) <= MAX_STEPS:
            row |= {
                f'step {step}': trace.mean_at(step) if step in trace.steps else None
                for step in steps
            }
        else:
            row |= {'first': trace.mean_at(trace.steps[0]), 'last': trace.mean_at(trace.steps[-1])}
        measured = {'monotonicity': trace.monotonicity} if len(steps) > 1 else {}
        if is_partial:
            measured['of runs'] = f'{len(trace.ordered_runs)} of {len(trace.values)}'
        if seeds:
            measured |= {'seed std': trace.seed_std, 'signal to noise': trace.signal_to_noise}
        if len(trace.values) < 2:
            measured |= dict.fromkeys(measured.keys() - {'monotonicity', 'of runs'})
        row |= dict.fromkeys(measured) if trace.is_constant else measured
        rows.append(row)
    return rows
