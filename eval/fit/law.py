"""What a law is: its constants, the columns that it reads, and its value in numbers near 1.

A law is fitted in coordinates theta [P] in which its columns are divided by their `units`, so that
constants which differ by orders of magnitude are found to the last digit. `value` takes theta as
[P] scalars or [P, K, 1] for K of them at once, real or complex (`eval.fit.fitting.jacobian`).
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np

Columns = Mapping[str, np.ndarray]  # each [points, ...]
Units = Mapping[str, float]
LOSS, SCORE = 'loss', 'score'
LEAST = 1e-12  # what a loss that a start makes negative counts as, so that its logarithm exists


@dataclasses.dataclass(frozen=True)
class Law:
    """One law. `value` is the log of the loss where `target` is LOSS, and else the score itself.

    `inputs` are the columns in units; `starts` [S, P] is the grid from which it is fitted.
    `constants_of` gives `constants`, and what follows from them, in the units of the columns. A
    law of loss curves has `curve`: the columns at some steps (from 1) of a run, from the learning
    rate at each of its steps and `options`.
    """

    name: str
    equation: str
    source: str
    constants: tuple[str, ...]
    columns: tuple[str, ...]
    inputs: Callable[[Columns, Units], dict[str, np.ndarray]]
    value: Callable[[Sequence[Any], Columns], np.ndarray]
    starts: Callable[[Columns, np.ndarray, Units], np.ndarray]
    constants_of: Callable[[Sequence[Any], Units], dict[str, Any]]
    units: Callable[[Columns], dict[str, float]]
    distinct: int = 1  # different values of each column without which constants are not determined
    target: str = LOSS
    delta: float = 1e-3  # where Huber's loss turns linear: of log losses, arXiv:2203.15556
    curve: Callable[..., dict[str, np.ndarray]] | None = None

    def observed(self, target: np.ndarray) -> np.ndarray:
        """What `value` is compared with."""
        return np.log(target) if self.target == LOSS else target

    def shown(self, value: np.ndarray) -> np.ndarray:
        """The loss, or the score, of a value."""
        return np.exp(value) if self.target == LOSS else value


def geometric_means(columns: Columns) -> dict[str, float]:
    return {name: float(np.exp(np.mean(np.log(x)))) for name, x in columns.items()}


def log_inputs(columns: Columns, units: Units) -> dict[str, np.ndarray]:
    """log(column / unit)."""
    return {name: np.log(x / units[name]) for name, x in columns.items()}


def log_sum_exp(*terms: Any) -> np.ndarray:
    """log sum exp, also of complex terms: the largest real part is taken out."""
    terms = np.broadcast_arrays(*terms)
    largest = np.max([term.real for term in terms], axis=0)
    return largest + np.log(sum(np.exp(term - largest) for term in terms))


def log_positive(loss: np.ndarray) -> np.ndarray:
    """log(loss), that of LEAST where it is no loss."""
    return np.log(np.where(loss.real > LEAST, loss, LEAST))


def grid(*axes: Sequence[float]) -> np.ndarray:
    """Every combination, [S, P]."""
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing='ij')], axis=-1)
