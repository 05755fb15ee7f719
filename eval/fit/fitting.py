"""A law fitted to points: many starts, intervals by the bootstrap, and points held out; the fit as
text and as JSON.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from scipy.optimize import least_squares, minimize
from scipy.special import huber
from scipy.stats import binom, norm, t

from eval.fit.laws import Columns, Law
from eval.fit.points import Points, resampling_groups, split_held_out
from lm.study.tables.text import format_number, format_table

STEP = 1e-30  # of the complex step: nothing is subtracted, so that it costs no digit
NO_VALUE = 1e30
DESCENT_STEPS = 100  # enough to be in a minimum's basin
POLISHED = 5  # best ends of L-BFGS from which the last digits are found
RESAMPLED_TOLERANCE = 1e-8  # far below the spread between resamples
MOST_TRIES = 20  # resamples for one that determines the constants
CONFIDENCE = 0.95
BOUNDS = 50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)  # percentiles


@dataclasses.dataclass(frozen=True)
class FittedLaw:
    """theta [P]; resampled [boots, P]; residuals [points] in `value`, of the points fitted;
    widening: by which intervals are wider than the spread of either (`small_sample_factor`).
    """

    law: Law
    theta: np.ndarray
    units: Mapping[str, float]
    resampled_thetas: np.ndarray
    residuals: np.ndarray
    objective: float
    widening: float = 1.0

    @property
    def widened_thetas(self) -> np.ndarray:
        """The resampled constants [boots, P], as far from `theta` as intervals take them."""
        return self.theta + self.widening * (self.resampled_thetas - self.theta)

    @property
    def residual_rms(self) -> float:
        return float(np.sqrt(np.mean(self.residuals**2)))

    def constants(self) -> dict[str, tuple[float, float, float]]:
        """{name: (value, low, high)}, the interval by percentiles of the widened bootstrap."""
        best = self.law.named_constants(self.theta, self.units)
        each = self.law.named_constants(self.widened_thetas.T, self.units)
        found = {}
        for name, value in best.items():
            ends = percentile_interval(each[name]) if len(each[name]) else (np.nan, np.nan)
            found[name] = (float(value), *map(float, ends))
        return found

    def predict(self, columns: Columns) -> np.ndarray:
        """The loss (or score) at other points."""
        return self.law.to_target(self.law.value(self.theta, self.law.inputs(columns, self.units)))

    def predict_interval(self, columns: Columns, seed: int) -> np.ndarray:
        """The interval [2, points] in which a new run's loss is expected: from each resampled fit,
        with one of the fit's residuals, both widened.
        """
        x, draw = self.law.inputs(columns, self.units), np.random.default_rng(seed)
        values = np.array([self.law.value(theta, x) for theta in self.widened_thetas])
        if len(values) == 0:
            return np.full((2, len(next(iter(x.values())))), np.nan)
        values += self.widening * draw.choice(self.residuals, values.shape)
        return self.law.to_target(percentile_interval(values))


def percentile_interval(values: np.ndarray) -> np.ndarray:
    """The ends [2, ...] between which CONFIDENCE of further draws like values [boots, ...] lie.

    The value in place p (boots + 1) in order, which p of further draws are below. Of numpy's
    default, place p (boots - 1) + 1, they are more: 93% would be within those of 80, 90% of 40.
    """
    return np.percentile(values, BOUNDS, axis=0, method='weibull')


def value_and_jacobian(law: Law, theta: np.ndarray, x: Columns) -> tuple[np.ndarray, np.ndarray]:
    """value [points] and d value / d theta [points, P], exact to rounding: by complex steps."""
    moved = theta[:, None] + 1j * STEP * np.eye(len(theta))  # [P, P]: a column a step
    found = law.value(moved[:, :, None], x)
    return found[0].real, found.imag.T / STEP


def jacobian(law: Law, theta: np.ndarray, x: Columns) -> np.ndarray:
    return value_and_jacobian(law, theta, x)[1]


def fit(
    law: Law,
    columns: Columns,
    target: np.ndarray,
    starts: int,
    boots: int = 0,
    groups: Sequence[int] | None = None,
    seed: int = 0,
) -> FittedLaw:
    """Minimises the sum of Huber's loss of value - observed, as arXiv:2203.15556 does.

    L-BFGS follows the `starts` points of the law's grid with the lowest sums; Gauss-Newton steps on
    the same sum bring the best ends to the minimum.

    Args:
        boots: the number of resamples, with replacement; each is fitted from the best constants.
        groups: what is resampled: a number for each point, points that share one stay together;
            None: each point alone.

    Raises ValueError where no start leads to finite constants, or where one of them changes no
    value.
    """
    units = law.units(columns)
    x, y = law.inputs(columns, units), law.from_target(target)
    with np.errstate(all='ignore'):  # starts far off overflow, and lose
        grid = law.starts(x, y, units)
        sums = np.array([objective(law, theta, x, y) for theta in grid])
        begun = grid[np.argsort(sums, kind='stable')[:starts]]
        ends = sorted((descend(law, theta, x, y) for theta in begun), key=lambda end: end[0])
        polished = [polish(law, theta, x, y) for _, theta in ends[:POLISHED]]
        value, theta = min(polished, key=lambda end: end[0])
        if not value < NO_VALUE or not np.isfinite(theta).all():
            raise ValueError(f'{law.name} fits no start to these {len(y)} points')
        check_sensitivity(law, theta, x, units)
        resampled = bootstrap(law, theta, x, y, boots, groups, seed)
    groups = len(y) if groups is None else len(np.unique(groups))
    widening = small_sample_factor(len(y), groups, len(theta))
    residuals = y - law.value(theta, x)
    return FittedLaw(law, theta, units, resampled, residuals, value * law.delta**2, widening)


def small_sample_factor(points: int, groups: int, constants: int) -> float:
    """sqrt(G / (G - 1) (n - 1) / (n - P)) t / z, above 1: what a bootstrap of few runs lacks.

    The constants are fitted to the errors too, which leaves residuals too small by the root, n / (n
    - P) where each point is a group; and their size is known from few, so that Student's t quantile
    for min(G - 1, n - P) degrees of freedom replaces the normal one, z. Source: the corrections of
    cluster-robust errors in Cameron and Miller, Journal of Human Resources 50 (2015), section VI.

    Args:
        points: n, those fitted.
        groups: G, of points that are resampled together.
        constants: P, those fitted.
    """
    free, others = max(points - constants, 1), max(groups - 1, 1)
    residual = math.sqrt(groups / others * (points - 1) / free)
    end = (1 + CONFIDENCE) / 2
    return float(residual * t.ppf(end, min(others, free)) / norm.ppf(end))


def check_sensitivity(law: Law, theta: np.ndarray, x: Columns, units: Mapping) -> None:
    """Raises ValueError for constants that no point depends on, such as those of repeated tokens
    where no run has repeated any.
    """
    matters = (np.abs(jacobian(law, theta, x)) > 0).any(axis=0)
    if not matters.all():
        now, then = (law.named_constants(at, units) for at in (theta, theta + ~matters))
        names = ', '.join(name for name in law.constants if now[name] != then[name])
        raise ValueError(
            f'{law.name}: no point depends on {names}, which would be as they were started. Add '
            'runs that do, or choose a law without'
        )


def objective(law: Law, theta: np.ndarray, x: Columns, y: np.ndarray) -> float:
    found = float(np.sum(huber(1.0, (law.value(theta, x) - y) / law.delta)))
    return found if np.isfinite(found) else NO_VALUE


def descend(law: Law, theta: np.ndarray, x: Columns, y: np.ndarray) -> tuple[float, np.ndarray]:
    def value_and_slope(theta):
        value, slopes = value_and_jacobian(law, theta, x)
        residuals = (value - y) / law.delta
        total, slope = huber(1.0, residuals).sum(), np.clip(residuals, -1, 1) @ slopes / law.delta
        if not np.isfinite(total) or not np.isfinite(slope).all():
            return NO_VALUE, np.zeros_like(theta)
        return total, slope

    steps = {'maxiter': DESCENT_STEPS}
    end = minimize(value_and_slope, theta, jac=True, method='L-BFGS-B', options=steps)
    return float(end.fun), end.x


def polish(
    law: Law, theta: np.ndarray, x: Columns, y: np.ndarray, tolerance: float = 1e-13
) -> tuple[float, np.ndarray]:
    """Takes Gauss-Newton steps. SciPy's `huber` loss is twice the sum of the objective here."""
    if objective(law, theta, x, y) == NO_VALUE or not np.isfinite(jacobian(law, theta, x)).all():
        return NO_VALUE, theta
    end = least_squares(
        lambda theta: (law.value(theta, x) - y) / law.delta,
        theta,
        jac=lambda theta: np.nan_to_num(jacobian(law, theta, x)) / law.delta,
        loss='huber',
        x_scale='jac',
        **dict.fromkeys(('ftol', 'xtol', 'gtol'), tolerance),
        max_nfev=300,
    )
    return objective(law, end.x, x, y), end.x


def bootstrap(
    law: Law,
    theta: np.ndarray,
    x: Columns,
    y: np.ndarray,
    boots: int,
    groups: Sequence[int] | None,
    seed: int,
) -> np.ndarray:
    """Fits resamples of the points: [at most boots, P]. One that does not determine the constants
    is drawn again: it has no more different points than constants, or fewer different values of a
    column than the law needs. One that no fit is found for is left out.
    """
    groups = np.arange(len(y)) if groups is None else np.asarray(groups)
    members = [np.flatnonzero(groups == group) for group in np.unique(groups)]
    draw, found = np.random.default_rng(seed), []
    for _ in range(boots):
        for _ in range(MOST_TRIES):
            drawn = draw.integers(len(members), size=len(members))
            index = np.concatenate([members[i] for i in drawn])
            at = {name: column[index] for name, column in x.items()}
            values = min(len(np.unique(column)) for column in at.values())
            if len(np.unique(index)) > len(theta) and values >= law.min_distinct:
                end, own = polish(law, theta, at, y[index], RESAMPLED_TOLERANCE)
                found += [own] if end < NO_VALUE else []
                break
    return np.array(found).reshape(len(found), len(theta))


@dataclasses.dataclass(frozen=True)
class FitReport:
    """A fit and its points. held_interval [2, held points]; resampled: what the bootstrap drew."""

    fit: FittedLaw
    fitted_points: Points
    held_out_points: Points
    held_out_interval: np.ndarray
    resampling_unit: str


def fit_points(
    law: Law, points: Points, share: float | None, starts: int, boots: int, seed: int
) -> FitReport:
    """The fit without the runs held out: the largest `share`, or those named where it is None."""
    fitted, held = split_held_out(points, law, share or 0.0, by_name=share is None)
    together, resampled = resampling_groups(fitted, law)
    found = fit(law, fitted.columns, fitted.target, starts, boots, together, seed)
    return FitReport(found, fitted, held, found.predict_interval(held.columns, seed), resampled)


def report_record(report: FitReport) -> dict[str, Any]:
    """The fit for JSON; numbers that are not finite are None."""
    best, law = report.fit, report.fit.law
    return {
        'law': law.name,
        'equation': law.equation,
        'source': law.source,
        'constants': {
            name: dict(zip(('value', 'low', 'high'), map(finite_or_none, values), strict=True))
            for name, values in best.constants().items()
        },
        'confidence': CONFIDENCE,
        'bootstrap': len(best.resampled_thetas),
        'resampled': report.resampling_unit,
        'objective': best.objective,
        'residual_rms': best.residual_rms,
        'fitted': sorted(set(report.fitted_points.runs.tolist())),
        'left_out': report.fitted_points.left_out,
        'held_out': held_out_rows(report),
    }


def finite_or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def held_out_rows(report: FitReport) -> list[dict[str, Any]]:
    """The last point of each run held out: measured, predicted, their difference and interval; for
    laws of curves also the mean of |relative error| along the run.
    """
    held, rows = report.held_out_points, []
    if not len(held.target):
        return rows
    predicted = report.fit.predict(held.columns)
    errors = predicted / held.target - 1
    low, high = report.held_out_interval
    for name in dict.fromkeys(held.runs.tolist()):
        (own,) = np.nonzero(held.runs == name)
        last = own[-1]
        row = {'run': name} | {
            key: float(column[last]) for key, column in held.figure_columns.items()
        }
        row |= {'measured': float(held.target[last]), 'predicted': float(predicted[last])}
        row |= {'low': finite_or_none(low[last]), 'high': finite_or_none(high[last])}
        row['relative_error'] = float(errors[last])
        if report.fit.law.curve is not None:
            row['mean_relative_error'] = float(np.mean(np.abs(errors[own])))
        rows.append(row)
    return rows


def is_outside(row: Mapping[str, Any]) -> bool:
    """Whether a run held out has a loss outside of its interval, where it has one."""
    return row['low'] is not None and not row['low'] <= row['measured'] <= row['high']


def judge_intervals(report: FitReport) -> tuple[str, bool]:
    """Says how many runs held out are within their intervals, and whether these are too few:
    fewer than they would be by chance in all but 5% of fits.
    """
    rows = held_out_rows(report)
    if not rows or rows[0]['low'] is None:
        lacking = 'intervals, which --bootstrap gives' if rows else 'run held out'
        return f'Not judged: without {lacking}', True
    within = len(rows) - sum(map(is_outside, rows))
    largest = max(abs(row['relative_error']) for row in rows)
    is_bad = bool(binom.cdf(within, len(rows), CONFIDENCE) < 1.001 * (1 - CONFIDENCE))
    words = (
        f'{within} of {len(rows)} runs held out are within their {CONFIDENCE:.0%} intervals'
        f'{", too few" if is_bad else ""}; the largest error is {largest:.2%}'
    )
    return words, is_bad


def describe_fit(report: FitReport) -> str:
    best, points = report.fit, report.fitted_points
    of = 'log loss' if best.law.target == 'loss' else 'score'
    return (
        f'{len(points.target)} points of {len(np.unique(points.runs))} runs, residual '
        f'{best.residual_rms:.2g} in {of}; {len(best.resampled_thetas)} resamples of {report.resampling_unit}'
    )


def constant_rows(fitted_law: FittedLaw) -> list[dict[str, str]]:
    return [
        {
            'constant': name,
            'value': format_number(value, 6),
            f'{CONFIDENCE:.0%} interval': f'{format_number(low)} to {format_number(high)}'
            if math.isfinite(low + high)
            else '',
        }
        for name, (value, low, high) in fitted_law.constants().items()
    ]


def format_report(report: FitReport) -> str:
    law, constants = report.fit.law, constant_rows(report.fit)
    lines = [
        f'{law.name}: {law.equation} ({law.source})',
        describe_fit(report),
        '',
        format_table(constants, list(constants[0]), 'table'),
    ]
    if rows := held_out_rows(report):
        shown = [
            {key: format_number(value) for key, value in row.items() if not key.endswith('error')}
            | {key: f'{row[key]:.3%}' for key in row if key.endswith('error')}
            for row in rows
        ]
        lines += [
            '',
            'held out:',
            format_table(shown, list(shown[0]), 'table'),
            judge_intervals(report)[0],
        ]
    return '\n'.join(lines)
