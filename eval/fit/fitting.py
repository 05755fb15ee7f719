"""Fits a law to points: many starts, bootstrap intervals, held-out points, and reports."""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import numpy.typing as npt
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
    """A law with its constants.

    theta: constants [P]. resampled_thetas: from the bootstrap, [boots, P]. residuals: of the fitted
    points, [points], in units of `value`. widening: factor by which intervals are wider than the
    spread of resamples and residuals (`small_sample_factor`).
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
        """Returns the resampled constants [boots, P], moved away from `theta` by the widening."""
        return self.theta + self.widening * (self.resampled_thetas - self.theta)

    @property
    def residual_rms(self) -> float:
        """Returns the root mean square of the residuals."""
        return float(np.sqrt(np.mean(self.residuals**2)))

    def constants(self) -> dict[str, tuple[float, float, float]]:
        """Returns {name: (value, low, high)}, with intervals of the widened bootstrap."""
        values = self.law.named_constants(self.theta, self.units)
        resampled = self.law.named_constants(self.widened_thetas.T, self.units)
        constants = {}
        for name, value in values.items():
            draws = resampled[name]
            low, high = percentile_interval(draws) if len(draws) else (np.nan, np.nan)
            constants[name] = (float(value), float(low), float(high))
        return constants

    def predict(self, columns: Columns) -> np.ndarray:
        """Returns the loss (or score) at other points."""
        return self.law.to_target(self.law.value(self.theta, self.law.inputs(columns, self.units)))

    def predict_interval(self, columns: Columns, seed: int) -> np.ndarray:
        """Returns the interval [2, points] for the loss of new runs.

        It combines each resampled fit with a random residual of the fit, both widened.
        """
        x, rng = self.law.inputs(columns, self.units), np.random.default_rng(seed)
        values = np.array([self.law.value(theta, x) for theta in self.widened_thetas])
        if len(values) == 0:
            return np.full((2, len(next(iter(x.values())))), np.nan)
        values += self.widening * rng.choice(self.residuals, values.shape)
        return self.law.to_target(percentile_interval(values))


def percentile_interval(values: np.ndarray) -> np.ndarray:
    """Returns the ends [2, ...] that contain CONFIDENCE of further draws like values [boots, ...].

    Takes the value at position p (boots + 1) of the sorted draws; a share p of further draws is
    below it. numpy's default position, p (boots - 1) + 1, makes intervals too narrow: 80 draws
    cover 93%, 40 draws 90%.
    """
    return np.percentile(values, BOUNDS, axis=0, method='weibull')


def value_and_jacobian(law: Law, theta: np.ndarray, x: Columns) -> tuple[np.ndarray, np.ndarray]:
    """Returns the value and its Jacobian by complex steps, exact to rounding.

    Args:
      law: the law.
      theta: constants [P].
      x: its inputs.

    Returns:
      (value [points], d value / d theta [points, P]).
    """
    shifted = theta[:, None] + 1j * STEP * np.eye(len(theta))  # [P, P]: a column a step
    values = law.value(shifted[:, :, None], x)
    return values[0].real, values.imag.T / STEP


def jacobian(law: Law, theta: np.ndarray, x: Columns) -> np.ndarray:
    """Returns d value / d theta, [points, P].

    Args:
      law: the law.
      theta: constants [P].
      x: its inputs.
    """
    return value_and_jacobian(law, theta, x)[1]


def fit(
    law: Law,
    columns: Columns,
    target: np.ndarray,
    starts: int,
    boots: int = 0,
    groups: npt.ArrayLike | None = None,
    seed: int = 0,
) -> FittedLaw:
    """Minimises the sum of Huber's loss of value - observed, as in arXiv:2203.15556.

    L-BFGS follows the `starts` points of the law's grid with the lowest sums. Gauss-Newton steps on
    the same sum bring the best of them to the minimum.

    Args:
      law: the law.
      columns: columns that the law reads, [points] each.
      target: loss or score, [points].
      starts: number of starts to follow.
      boots: number of resamples with replacement; each is fitted from the best constants.
      groups: an id for each point; points with the same id are resampled together. By default each
        point is a group.
      seed: seed of the bootstrap.

    Raises:
      ValueError: if no start leads to finite constants, or if a constant changes no value.
    """
    units = law.units(columns)
    x, y = law.inputs(columns, units), law.from_target(target)
    with np.errstate(all='ignore'):  # starts far off overflow, and lose
        grid = law.starts(x, y, units)
        sums = np.array([objective(law, theta, x, y) for theta in grid])
        selected = grid[np.argsort(sums, kind='stable')[:starts]]
        ends = sorted((descend(law, theta, x, y) for theta in selected), key=lambda end: end[0])
        polished = [polish(law, theta, x, y) for _, theta in ends[:POLISHED]]
        value, theta = min(polished, key=lambda end: end[0])
        if not value < NO_VALUE or not np.isfinite(theta).all():
            raise ValueError(
                f'{law.name} does not fit these {len(y)} points from any start. Check their '
                'columns, or choose another law.'
            )
        check_sensitivity(law, theta, x, units)
        resampled_thetas = bootstrap(law, theta, x, y, boots, groups, seed)
    n_groups = len(y) if groups is None else len(np.unique(groups))
    widening = small_sample_factor(len(y), n_groups, len(theta))
    residuals = y - law.value(theta, x)
    return FittedLaw(law, theta, units, resampled_thetas, residuals, value * law.delta**2, widening)


def small_sample_factor(points: int, groups: int, constants: int) -> float:
    """Returns sqrt(G / (G - 1) (n - 1) / (n - P)) t / z, which corrects a bootstrap of few runs.

    The factor is above 1. Residuals are too small because the constants are fitted to the errors
    too; the root corrects this, with n / (n - P) if each point is a group. As the size of the
    residuals is estimated from few groups, Student's t quantile
    for min(G - 1, n - P) degrees of freedom replaces the normal quantile z. Source: the corrections
    of cluster-robust errors in Cameron and Miller, Journal of Human Resources 50 (2015), section
    VI.

    Args:
      points: n, fitted points.
      groups: G, groups of points that are resampled together.
      constants: P, fitted constants.
    """
    free, free_groups = max(points - constants, 1), max(groups - 1, 1)
    residual = math.sqrt(groups / free_groups * (points - 1) / free)
    quantile = (1 + CONFIDENCE) / 2
    return float(residual * t.ppf(quantile, min(free_groups, free)) / norm.ppf(quantile))


def check_sensitivity(law: Law, theta: np.ndarray, x: Columns, units: Mapping) -> None:
    """Raises ValueError for constants that no point depends on.

    An example: the constants of repeated tokens, if no run has repeated tokens.

    Args:
      law: the law.
      theta: its constants.
      x: its inputs.
      units: units of its columns.
    """
    matters = (np.abs(jacobian(law, theta, x)) > 0).any(axis=0)
    if not matters.all():
        before, after = (law.named_constants(point, units) for point in (theta, theta + ~matters))
        names = ', '.join(name for name in law.constants if before[name] != after[name])
        raise ValueError(
            f'{law.name}: these runs do not determine {names}. Add runs that depend on them, or '
            'choose a law without them.'
        )


def objective(law: Law, theta: np.ndarray, x: Columns, y: np.ndarray) -> float:
    """Returns the sum of Huber's losses; NO_VALUE if it is not finite.

    Args:
      law: the law.
      theta: constants [P].
      x: its inputs.
      y: observed values [points].
    """
    total = float(np.sum(huber(1.0, (law.value(theta, x) - y) / law.delta)))
    return total if np.isfinite(total) else NO_VALUE


def descend(law: Law, theta: np.ndarray, x: Columns, y: np.ndarray) -> tuple[float, np.ndarray]:
    """Minimises the objective by L-BFGS for DESCENT_STEPS.

    Args:
      law: the law.
      theta: initial constants [P].
      x: its inputs.
      y: observed values [points].

    Returns:
      (the sum, the constants).
    """

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
    """Minimises the objective by Gauss-Newton steps. SciPy's `huber` loss is twice this sum.

    Args:
      law: the law.
      theta: initial constants [P].
      x: its inputs.
      y: observed values [points].
      tolerance: stops at smaller relative changes.

    Returns:
      (the sum, the constants); NO_VALUE and theta if they are not finite.
    """
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
    groups: npt.ArrayLike | None,
    seed: int,
) -> np.ndarray:
    """Fits resamples of the points.

    A resample is drawn again if it does not determine the constants: if its distinct points do not
    outnumber the constants, or a column has fewer distinct values than the law needs. A resample
    without a fit is left out.

    Args:
      law: the law.
      theta: initial constants of each fit.
      x: its inputs.
      y: observed values [points].
      boots: number of resamples.
      groups: ids of points that are resampled together; None if each point is a group.
      seed: seed of the draws.

    Returns:
      Constants [at most boots, P].
    """
    ids = np.arange(len(y)) if groups is None else np.asarray(groups)
    members = [np.flatnonzero(ids == group) for group in np.unique(ids)]
    rng, thetas = np.random.default_rng(seed), []
    for _ in range(boots):
        for _ in range(MOST_TRIES):
            group_ids = rng.integers(len(members), size=len(members))
            index = np.concatenate([members[i] for i in group_ids])
            columns = {name: column[index] for name, column in x.items()}
            n_distinct = min(len(np.unique(column)) for column in columns.values())
            if len(np.unique(index)) > len(theta) and n_distinct >= law.min_distinct:
                error, resampled_theta = polish(law, theta, columns, y[index], RESAMPLED_TOLERANCE)
                thetas += [resampled_theta] if error < NO_VALUE else []
                break
    return np.array(thetas).reshape(len(thetas), len(theta))


@dataclasses.dataclass(frozen=True)
class FitReport:
    """A fit with its points.

    held_out_interval: [2, held-out points]. resampling_unit: what the bootstrap draws, in words.
    """

    fit: FittedLaw
    fitted_points: Points
    held_out_points: Points
    held_out_interval: np.ndarray
    resampling_unit: str


def fit_points(
    law: Law, points: Points, share: float | None, starts: int, boots: int, seed: int
) -> FitReport:
    """Fits a law to all but the held-out runs.

    Args:
      law: the law.
      points: all points.
      share: share of the largest runs to hold out; None to hold out the runs that points name.
      starts: number of starts to follow.
      boots: number of resamples.
      seed: seed of the bootstrap.
    """
    fitted, held_out = split_held_out(points, law, share or 0.0, by_name=share is None)
    groups, unit = resampling_groups(fitted, law)
    fitted_law = fit(law, fitted.columns, fitted.target, starts, boots, groups, seed)
    return FitReport(
        fitted_law, fitted, held_out, fitted_law.predict_interval(held_out.columns, seed), unit
    )


def report_record(report: FitReport) -> dict[str, Any]:
    """Returns the fit for JSON; numbers that are not finite are None."""
    fitted_law, law = report.fit, report.fit.law
    return {
        'law': law.name,
        'equation': law.equation,
        'source': law.source,
        'constants': {
            name: dict(zip(('value', 'low', 'high'), map(finite_or_none, values), strict=True))
            for name, values in fitted_law.constants().items()
        },
        'confidence': CONFIDENCE,
        'bootstrap': len(fitted_law.resampled_thetas),
        'resampled': report.resampling_unit,
        'objective': fitted_law.objective,
        'residual_rms': fitted_law.residual_rms,
        'fitted': sorted(set(report.fitted_points.runs.tolist())),
        'left_out': report.fitted_points.left_out,
        'held_out': held_out_rows(report),
    }


def finite_or_none(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def held_out_rows(report: FitReport) -> list[dict[str, Any]]:
    """Returns a row for the last point of each held-out run.

    It has the measured and predicted loss, their relative difference and the interval; for laws of
    curves also the mean of |relative error| along the run.
    """
    points, rows = report.held_out_points, []
    if not len(points.target):
        return rows
    predicted = report.fit.predict(points.columns)
    errors = predicted / points.target - 1
    low, high = report.held_out_interval
    for name in dict.fromkeys(points.runs.tolist()):
        (indices,) = np.nonzero(points.runs == name)
        last = indices[-1]
        row = {'run': name} | {
            key: float(column[last]) for key, column in points.figure_columns.items()
        }
        row |= {'measured': float(points.target[last]), 'predicted': float(predicted[last])}
        row |= {'low': finite_or_none(low[last]), 'high': finite_or_none(high[last])}
        row['relative_error'] = float(errors[last])
        if report.fit.law.curve is not None:
            row['mean_relative_error'] = float(np.mean(np.abs(errors[indices])))
        rows.append(row)
    return rows


def is_outside(row: Mapping[str, Any]) -> bool:
    """Whether a held-out run has a loss outside of its interval, if it has an interval."""
    return row['low'] is not None and not row['low'] <= row['measured'] <= row['high']


def judge_intervals(report: FitReport) -> tuple[str, bool]:
    """Returns a text on the held-out runs within their intervals, and whether there are too few.

    Too few means fewer than by chance in all but 5% of fits.
    """
    rows = held_out_rows(report)
    if not rows or rows[0]['low'] is None:
        reason = 'no intervals; set --bootstrap above 0' if rows else 'no run was held out'
        return f'Not judged: {reason}', True
    within = len(rows) - sum(map(is_outside, rows))
    largest = max(abs(row['relative_error']) for row in rows)
    is_bad = bool(binom.cdf(within, len(rows), CONFIDENCE) < 1.001 * (1 - CONFIDENCE))
    text = (
        f'{within} of {len(rows)} held-out runs are within their {CONFIDENCE:.0%} intervals'
        f'{", too few" if is_bad else ""}; the largest error is {largest:.2%}'
    )
    return text, is_bad


def describe_fit(report: FitReport) -> str:
    """Returns the number of points and resamples, and the residual, in words."""
    fitted_law, points = report.fit, report.fitted_points
    unit = 'log loss' if fitted_law.law.target == 'loss' else 'score'
    return (
        f'{len(points.target)} points of {len(np.unique(points.runs))} runs, rms residual of the '
        f'{unit} {fitted_law.residual_rms:.2g}; {len(fitted_law.resampled_thetas)} resamples of '
        f'{report.resampling_unit}'
    )


def constant_rows(fitted_law: FittedLaw) -> list[dict[str, str]]:
    """Returns a table of the constants with their intervals."""
    return [
        {
            'constant': name,
            'value': format_number(estimate, 6),
            f'{CONFIDENCE:.0%} interval': f'{format_number(low)} to {format_number(high)}'
            if math.isfinite(low + high)
            else '',
        }
        for name, (estimate, low, high) in fitted_law.constants().items()
    ]


def format_report(report: FitReport) -> str:
    """Returns the fit as text for a terminal."""
    law, constants = report.fit.law, constant_rows(report.fit)
    lines = [
        f'{law.name}: {law.equation} ({law.source})',
        describe_fit(report),
        '',
        format_table(constants, list(constants[0]), 'table'),
    ]
    if rows := held_out_rows(report):
        formatted = [
            {key: format_number(value) for key, value in row.items() if not key.endswith('error')}
            | {key: f'{row[key]:.3%}' for key in row if key.endswith('error')}
            for row in rows
        ]
        lines += [
            '',
            'held out:',
            format_table(formatted, list(formatted[0]), 'table'),
            judge_intervals(report)[0],
        ]
    return '\n'.join(lines)
