"""What is recorded per layer, by depth: at the first and at the last step that has it."""

import dataclasses
import math
from collections.abc import Iterable, Mapping, Sequence

import numpy as np

from eval.compare import Comparison
from eval.report.series import HeatMap, Series, mean_map
from eval.text import number

DEPTH = 'n_layers'  # the column in which variants that make one line differ
TABLE = (
    'variant',
    'layers',
    'step',
    'first',
    'middle',
    'last',
    'last / first',
    'over seeds',
    'most / least',
    'exponent',
)
CAPTION = (
    'At the first and the last step that has it, each variant at its best learning rate, mean over '
    'seeds; last / first also of each seed, from the least to the most. The exponent is p of the '
    'power law value = c layer^p, fitted in logarithms to layers 1, 2, ...; of a square it is '
    'twice that.'
)


@dataclasses.dataclass(frozen=True)
class Profile:
    """A quantity of one variant by layer, mean over seeds, nan where there is no number.

    line: the variant's name without its number of layers, which is `layers`.
    values: step -> [layers], of the first and the last recorded step.
    ratios: step -> last layer over first, of each seed.
    """

    line: str
    is_baseline: bool
    layers: int
    values: dict[int, np.ndarray]
    ratios: dict[int, list[float]]


def shown(comparison: Comparison) -> list[str]:
    """The workdirs of the variant at its best learning rate, or all while none has ended."""
    best = comparison.best_lr
    records = comparison.variant.at(best) if best is not None else comparison.variant.records
    return [record['workdir'] for record in records]


def profiles(
    comparisons: Sequence[Comparison], series: Mapping[str, Series], name: str
) -> list[Profile]:
    """The quantity `name` of each variant that has numbers of it, as `shown`."""
    found = []
    for comparison in comparisons:
        maps = [series[w].layers[name] for w in shown(comparison) if name in series[w].layers]
        steps, values = mean_map(maps) if maps else ([], [])
        recorded = list(zip(steps, values, strict=True))
        ends = {step: np.array(v, float) for step, v in (*recorded[:1], *recorded[-1:])}
        if any(np.isfinite(values_L).any() for values_L in ends.values()):
            line, is_baseline = line_of(comparison), comparison.variant.is_baseline
            layers = len(next(iter(ends.values())))
            found.append(Profile(line, is_baseline, layers, ends, _ratios(maps, ends)))
    return found


def line_of(comparison: Comparison) -> str:
    """What the variant is called beside others of its number of layers."""
    variant = comparison.variant
    if DEPTH not in variant.values:
        return variant.name
    values = variant.values.items()
    parts = [f'{column} {number(value)}' for column, value in values if column != DEPTH]
    name = ', '.join(parts) or 'all runs'
    return f'{name} ({variant.sweep})' if variant.sweep else name


def _ratios(maps: Sequence[HeatMap], steps: Iterable[int]) -> dict[int, list[float]]:
    by_step = [dict(zip(*one, strict=True)) for one in maps]
    return {step: [ratio(np.array(one[step], float)) for one in by_step] for step in steps}


def ratio(values_L: np.ndarray) -> float:
    """Of the last layer to the first; nan where one is missing or the first is 0."""
    return float(values_L[-1] / values_L[0]) if values_L[0] else math.nan


def exponent(values_L: np.ndarray) -> float:
    """p of the power law v = c l^p, the least squares line through log v over log l, l from 1.

    nan with fewer than two layers, or where a value is missing or not positive.
    """
    if len(values_L) < 2 or not (values_L > 0).all() or not np.isfinite(values_L).all():
        return math.nan
    layers_L = np.arange(1, len(values_L) + 1)
    return float(np.polyfit(np.log(layers_L), np.log(values_L), 1)[0])


def table(found: Sequence[Profile]) -> list[list[str]]:
    """A head and a row for each profile and step, as text."""
    return [list(TABLE), *(_row(profile, step) for profile in found for step in profile.values)]


def _row(profile: Profile, step: int) -> list[str]:
    values_L = profile.values[step]
    middle = values_L[(len(values_L) - 1) // 2]
    numbers = (values_L[0], middle, values_L[-1], ratio(values_L))
    seeds = [r for r in profile.ratios[step] if math.isfinite(r)]
    spread = f'{_short(min(seeds))} to {_short(max(seeds))}' if len(seeds) > 1 else ''
    power = exponent(values_L)
    least = values_L.min()
    ends = [_short(values_L.max() / least if least > 0 else math.nan)]
    ends.append('' if math.isnan(power) else f'{power:+.2f}')
    return [profile.line, str(profile.layers), str(step), *map(_short, numbers), spread, *ends]


def _short(value: float) -> str:
    return '' if math.isnan(value) else f'{value:.3g}'
