"""Ratios of steps that others measured and published to their estimates.

The steps, and what plans say of them, are in measured_steps.json, which `python -m
tests.bench.public_steps --write` makes; tpu/PLANS.md has them as a table, with their sources.
"""

import collections
import functools
import json
import math
import statistics
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from tpu.chips import CHIPS

FILE = Path(__file__).with_name('measured_steps.json')


class Ratio(NamedTuple):
    """Measured seconds of a step over estimated ones. value: their median over `steps` steps on
    `chip`, from `least` to `most`.
    """

    value: float
    chip: str
    steps: int
    least: float
    most: float

    @property
    def description(self) -> str:
        number = f'{self.steps} measured step{"s" if self.steps > 1 else ""} on {self.chip}'
        between = f', {self.least:.2f} to {self.most:.2f}' if self.steps > 1 else ''
        return f'{self.value:.2f} times the estimate, as {number} took{between}'


@functools.cache
def load_ratios() -> dict[str, tuple[float, ...]]:
    """Returns the ratios of all measured steps that a plan fits, by the name of their chips."""
    found = collections.defaultdict(list)
    for row in json.loads(FILE.read_text())['steps']:
        if row['estimate'] is not None:
            found[row['chip']].append(row['measured'] / row['estimate'])
    return {chip: tuple(ratios) for chip, ratios in found.items()}


def nearest_ratio(chip: str, measured: Mapping[str, Sequence[float]] | None = None) -> Ratio | None:
    """Returns the ratio of a kind of chip, or of the nearest that steps were measured on; None
    where none was on its platform.

    The nearest is the chip of the same platform whose device has the nearest peak, as a ratio: of
    an H200 the H100, of a v5p the v4.
    """
    measured = load_ratios() if measured is None else measured
    alike = [name for name in measured if CHIPS[name].platform == CHIPS[chip].platform]
    if not alike:
        return None

    def distance(name: str) -> tuple[bool, float]:
        return name != chip, abs(math.log(CHIPS[name].peak / CHIPS[chip].peak))

    nearest = min(alike, key=distance)
    found = measured[nearest]
    return Ratio(statistics.median(found), nearest, len(found), min(found), max(found))
