"""Ratios of measured steps, as others have published them, to their estimates.

The steps and their plans are in measured_steps.json, which `python -m tests.bench.public_steps
--write` creates; tpu/PLANS.md lists them with their sources.
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
    """Measured seconds of a step over estimated seconds.

    value: the median over `steps` steps on `chip`, which range from `least` to `most`.
    """

    value: float
    chip: str
    steps: int
    least: float
    most: float

    @property
    def description(self) -> str:
        """Returns the ratio in words, for a plan."""
        start = f'{self.value:.2f} times the estimate, '
        if self.steps == 1:
            return f'{start}from 1 measured step on {self.chip}'
        return (
            f'{start}the median of {self.steps} measured steps on {self.chip} '
            f'({self.least:.2f} to {self.most:.2f})'
        )


@functools.cache
def load_ratios() -> dict[str, tuple[float, ...]]:
    """Returns the ratios of all measured steps that a plan fits, by the name of their chips."""
    ratios_by_chip = collections.defaultdict(list)
    for row in json.loads(FILE.read_text())['steps']:
        if row['estimate'] is not None:
            ratios_by_chip[row['chip']].append(row['measured'] / row['estimate'])
    return {chip: tuple(ratios) for chip, ratios in ratios_by_chip.items()}


def held_out_errors(ratios: Sequence[float]) -> list[float]:
    """Returns the error of each step's prediction from the other steps on its kind of chip.

    The error is |predicted / measured - 1|, where the prediction is the estimate times the median
    ratio of the others. Returns [] for a single step, which has no others.
    """
    if len(ratios) == 1:
        return []
    medians = [statistics.median((*ratios[:i], *ratios[i + 1 :])) for i in range(len(ratios))]
    return [abs(median / ratio - 1) for median, ratio in zip(medians, ratios, strict=True)]


def nearest_ratio(chip: str, measured: Mapping[str, Sequence[float]] | None = None) -> Ratio | None:
    """Returns the ratio of a kind of chip, or of the nearest measured chip of its platform.

    The nearest chip is the nearest in log peak: an H200 takes the ratio of the H100, a v5p the
    ratio of the v4. Returns None if no chip of the platform was measured.
    """
    measured = load_ratios() if measured is None else measured
    same_platform = [name for name in measured if CHIPS[name].platform == CHIPS[chip].platform]
    if not same_platform:
        return None

    def distance(name: str) -> tuple[bool, float]:
        return name != chip, abs(math.log(CHIPS[name].peak / CHIPS[chip].peak))

    nearest = min(same_platform, key=distance)
    ratios = measured[nearest]
    return Ratio(statistics.median(ratios), nearest, len(ratios), min(ratios), max(ratios))
