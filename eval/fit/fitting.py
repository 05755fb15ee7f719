"""A law fitted to points: many starts, intervals by the bootstrap, and points held out."""

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np
from scipy.optimize import least_squares, minimize

from eval.fit.law import Columns, Law

STEP = 1e-30  # of the complex step: nothing is subtracted, so that it costs no digit
NO_VALUE = 1e30
DESCENT_STEPS = 100  # enough to be in a minimum's basin
POLISHED = 5  # best ends of L-BFGS from which the last digits are found
RESAMPLED_TOLERANCE = 1e-8  # far below the spread between resamples
MOST_TRIES = 20  # resamples for one that determines the constants
CONFIDENCE = 0.95


@dataclasses.dataclass(frozen=True)
class Fit:
    """theta [P]; resampled [boots, P]; residuals [points] in `value`, of the points fitted."""

    law: Law
    theta: np.ndarray
    units: Mapping[str, float]
    resampled: np.ndarray
    residuals: np.ndarray
    objective: float

    def constants(self) -> dict[str, tuple[float, float, float]]:
        """{name: (value, low, high)}, the interval by percentiles of the bootstrap."""
        best = self.law.constants_of(self.theta, self.units)
        each = self.law.constants_of(self.resampled.T, self.units)
        return {name: (float(best[name]), *interval(each[name])) for name in best}

    def predict(self, columns: Columns) -> np.ndarray:
        """The loss (or score) at other points."""
        return self.law.shown(self.law.value(self.theta, self.law.inputs(columns, self.units)))

    def predicted_interval(self, columns: Columns, seed: int) -> np.ndarray:
        """[2, points] in which a new run's loss is expected: from each resampled fit, with one of
        the fit's residuals.
        """
        x, draw = self.law.inputs(columns, self.units), np.random.default_rng(seed)
        values = np.array([self.law.value(theta, x) for theta in self.resampled])
        if len(values) == 0:
            return np.full((2, len(next(iter(x.values())))), np.nan)
        values += draw.choice(self.residuals, values.shape)
        return self.law.shown(np.percentile(values, bounds(), axis=0))


def bounds() -> tuple[float, float]:
    return 50 * (1 - CONFIDENCE), 50 * (1 + CONFIDENCE)


def interval(values: np.ndarray) -> tuple[float, float]:
    if len(values) == 0:
        return np.nan, np.nan
    low, high = np.percentile(values, bounds())
    return float(low), float(high)


def huber(residuals: np.ndarray) -> np.ndarray:
    """r^2 / 2 up to 1, |r| - 1/2 beyond: residuals are in units of the law's delta."""
    size = np.abs(residuals)
    return np.where(size <= 1, 0.5 * size**2, size - 0.5)


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
    units_of_resampling: Sequence[int] | None = None,
    seed: int = 0,
) -> Fit:
    """Minimises the sum of Huber's loss of value - observed, as arXiv:2203.15556 does.

    Of the law's grid, the `starts` points with the lowest sums are followed by L-BFGS; the best
    ends are brought to the minimum by Gauss-Newton steps on the same sum. boots: resamples, with
    replacement, of `units_of_resampling`, one number a point (points that share one stay
    together, None: each its own); each is fitted from the best constants.

    Raises ValueError where no start leads to finite constants, or where one of them changes no
    value.
    """
    units = law.units(columns)
    x, y = law.inputs(columns, units), law.observed(target)
    with np.errstate(all='ignore'):  # starts far off overflow, and lose
        begun = best_starts(law, x, y, units, starts)
        ends = sorted((descend(law, theta, x, y) for theta in begun), key=lambda end: end[0])
        polished = [polish(law, theta, x, y) for _, theta in ends[:POLISHED]]
        value, theta = min(polished, key=lambda end: end[0])
        if not value < NO_VALUE or not np.isfinite(theta).all():
            raise ValueError(f'{law.name} fits no start to these {len(y)} points')
        check_sensitive(law, theta, x, units)
        resampled = bootstrap(law, theta, x, y, boots, units_of_resampling, seed)
    return Fit(law, theta, units, resampled, y - law.value(theta, x), value * law.delta**2)


def check_sensitive(law: Law, theta: np.ndarray, x: Columns, units: Mapping) -> None:
    """ValueError for constants that no point depends on, such as those of repeated tokens where no
    run has repeated any.
    """
    matters = (np.abs(jacobian(law, theta, x)) > 0).any(axis=0)
    if not matters.all():
        now, then = (law.constants_of(at, units) for at in (theta, theta + ~matters))
        names = ', '.join(name for name in law.constants if now[name] != then[name])
        raise ValueError(
            f'{law.name}: no point depends on {names}, which would be as they were started. Add '
            'runs that do, or choose a law without'
        )


def best_starts(law: Law, x: Columns, y: np.ndarray, units: Mapping, count: int) -> np.ndarray:
    grid = law.starts(x, y, units)
    sums = np.array([objective(law, theta, x, y) for theta in grid])
    return grid[np.argsort(sums, kind='stable')[:count]]


def objective(law: Law, theta: np.ndarray, x: Columns, y: np.ndarray) -> float:
    found = float(np.sum(huber((law.value(theta, x) - y) / law.delta)))
    return found if np.isfinite(found) else NO_VALUE


def descend(law: Law, theta: np.ndarray, x: Columns, y: np.ndarray) -> tuple[float, np.ndarray]:
    def value_and_slope(theta):
        value, slopes = value_and_jacobian(law, theta, x)
        residuals = (value - y) / law.delta
        total, slope = huber(residuals).sum(), np.clip(residuals, -1, 1) @ slopes / law.delta
        if not np.isfinite(total) or not np.isfinite(slope).all():
            return NO_VALUE, np.zeros_like(theta)
        return total, slope

    options = {'maxiter': DESCENT_STEPS}
    end = minimize(value_and_slope, theta, jac=True, method='L-BFGS-B', options=options)
    return float(end.fun), end.x


def polish(
    law: Law, theta: np.ndarray, x: Columns, y: np.ndarray, tolerance: float = 1e-13
) -> tuple[float, np.ndarray]:
    """SciPy's `huber` with f_scale 1 is twice the sum here, of the same residuals."""
    if objective(law, theta, x, y) == NO_VALUE or not np.isfinite(jacobian(law, theta, x)).all():
        return NO_VALUE, theta
    end = least_squares(
        lambda theta: (law.value(theta, x) - y) / law.delta,
        theta,
        jac=lambda theta: np.nan_to_num(jacobian(law, theta, x)) / law.delta,
        loss='huber',
        x_scale='jac',
        ftol=tolerance,
        xtol=tolerance,
        gtol=tolerance,
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
    """[at most boots, P]. A resample that does not determine the constants is drawn again: of no
    more different points than constants, or of fewer different values of a column than the law
    needs; one that no fit is found for is left out.
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
            if len(np.unique(index)) > len(theta) and values >= law.distinct:
                end, own = polish(law, theta, at, y[index], RESAMPLED_TOLERANCE)
                found += [own] if end < NO_VALUE else []
                break
    return np.array(found).reshape(len(found), len(theta))
