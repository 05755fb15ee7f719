"""What a fit says, as text and as JSON."""

import dataclasses
import math
from typing import Any

import numpy as np

from eval.fit.fitting import CONFIDENCE, Fit, fit
from eval.fit.law import Law
from eval.fit.points import Points, resampled_together, split
from eval.text import number, render


@dataclasses.dataclass(frozen=True)
class Fitted:
    """held_interval [2, held points]; resampled: what the bootstrap drew."""

    fit: Fit
    fitted: Points
    held: Points
    held_interval: np.ndarray
    resampled: str


def fit_points(
    law: Law, points: Points, share: float | None, starts: int, boots: int, seed: int
) -> Fitted:
    """The fit without the runs held out: the largest `share`, or those named where it is None."""
    fitted, held = split(points, law, share or 0.0, by_name=share is None)
    together, resampled = resampled_together(fitted, law)
    found = fit(law, fitted.columns, fitted.target, starts, boots, together, seed)
    return Fitted(found, fitted, held, found.predicted_interval(held.columns, seed), resampled)


def record(found: Fitted) -> dict[str, Any]:
    """For JSON: numbers that are none are None."""
    fit, law = found.fit, found.fit.law
    return {
        'law': law.name,
        'equation': law.equation,
        'source': law.source,
        'constants': {
            name: dict(zip(('value', 'low', 'high'), map(finite, values), strict=True))
            for name, values in fit.constants().items()
        },
        'confidence': CONFIDENCE,
        'bootstrap': len(fit.resampled),
        'resampled': found.resampled,
        'objective': fit.objective,
        'residual_rms': float(np.sqrt(np.mean(fit.residuals**2))),
        'fitted': sorted(set(found.fitted.runs.tolist())),
        'left_out': found.fitted.left_out,
        'held_out': held_rows(found),
    }


def finite(value: float) -> float | None:
    return float(value) if math.isfinite(value) else None


def held_rows(found: Fitted) -> list[dict[str, Any]]:
    """Of each run held out its last point: measured, predicted, their difference and interval; of
    laws of curves also the mean of |relative error| along the run.
    """
    held, rows = found.held, []
    if not len(held.target):
        return rows
    predicted = found.fit.predict(held.columns)
    errors = predicted / held.target - 1
    low, high = found.held_interval
    for name in dict.fromkeys(held.runs.tolist()):
        (own,) = np.nonzero(held.runs == name)
        last = own[-1]
        row = {'run': name} | {key: float(column[last]) for key, column in held.at.items()}
        row |= {'measured': float(held.target[last]), 'predicted': float(predicted[last])}
        row |= {'low': finite(low[last]), 'high': finite(high[last])}
        row['relative_error'] = float(errors[last])
        if found.fit.law.curve is not None:
            row['mean_relative_error'] = float(np.mean(np.abs(errors[own])))
        rows.append(row)
    return rows


def text(found: Fitted) -> str:
    fit, runs = found.fit, len(set(found.fitted.runs.tolist()))
    constants = [
        {
            'constant': name,
            'value': number(value, 6),
            f'{CONFIDENCE:.0%} interval': between(low, high),
        }
        for name, (value, low, high) in fit.constants().items()
    ]
    rms = float(np.sqrt(np.mean(fit.residuals**2)))
    of = 'log loss' if fit.law.target == 'loss' else 'score'
    lines = [
        f'{fit.law.name}: {fit.law.equation} ({fit.law.source})',
        f'{len(found.fitted.target)} points of {runs} runs, residual {rms:.2g} in {of}; '
        f'{len(fit.resampled)} resamples of {found.resampled}',
        '',
        render(constants, list(constants[0]), 'table'),
    ]
    if rows := held_rows(found):
        shown = [
            {key: number(value) for key, value in row.items() if not key.endswith('error')}
            | {key: f'{row[key]:.3%}' for key in row if key.endswith('error')}
            for row in rows
        ]
        lines += ['', 'held out:', render(shown, list(shown[0]), 'table')]
    return '\n'.join(lines)


def between(low: float, high: float) -> str:
    return f'{number(low)} to {number(high)}' if math.isfinite(low + high) else ''
