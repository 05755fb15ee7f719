"""config.tune: the fields that get their best value in each arm of a sweep, and the search
settings.

config.tune = {
    'optim.lr': None,  # around each arm's own value; or a centre for all; or (low, high)
    'smallest_effect': 0.01,  # difference of losses that matters
}
"""

import dataclasses
import math
from collections.abc import Iterable, Mapping
from typing import Any

from lm.config.fields import FIELDS, FINITE, RUN_PATHS
from lm.config.suggestions import TUNE_EXAMPLE, field_hint, tune_flag, tune_hint
from lm.study.plan.curve import OCTAVE, PER_OCTAVE
from lm.study.plan.search import CYCLES, SCAN, STEPS, UNBOUNDED, WAVE, Search
from lm.study.statistics import HOLM, TESTS
from modules.choices import choose, suggest_nearest

LR, DECAY = 'optim.lr', 'optim.weight_decay'
SEEDS = ('train.seed', 'data.seed')
# Cells that differ in these have other tokens, so that only losses per byte are comparable.
PER_BYTE_FIELDS = {'data.tokenizer', 'data.source', 'data.mixture', 'data.validation_source'}
MAX_FIELDS = len(STEPS)
MIN_SEEDS = 3
# A factor of 1e12. The first line of a range tries each octave, so a wider one is a slip.
MAX_OCTAVES = 40
SWEEP_KEYS = ('protocol', 'zip', 'list')
TYPE_NAMES = {int: 'a whole number', bool: 'True or False', str: 'text'}


@dataclasses.dataclass(frozen=True)
class Tune:
    """Settings of config.tune.

    Attributes:
      fields: path -> None (each arm's own value is the centre), a centre, or (low, high).
      seeds: fresh seeds of a look; there are two looks.
      smallest_effect: difference that matters, in the unit of losses.
      budget: maximal number of runs of an arm, tuning and fresh seeds together; None: no limit.
      test: test of the verdicts.
      lengths: lengths of further complete runs of the baseline, as shares of its steps; they
        translate the losses of other arms into tokens of the baseline.
    """

    fields: Mapping[str, float | tuple[float, float] | None]
    seeds: int = 5
    smallest_effect: float = 0.01
    budget: int | None = None
    test: str = HOLM
    lengths: tuple[float, ...] = ()

    @property
    def min_budget(self) -> int:
        """Returns the smallest number of runs of an arm: lines, refinement and one look."""
        lines = sum(map(len, self.scans))
        if len(self.fields) > 1:
            lines += (CYCLES - 1) * len(self.fields) * len(_line_indices(0))
        return lines + WAVE + self.seeds

    @property
    def typical_runs(self) -> int:
        """Returns the runs of an arm with one more wave than the minimum, and with a second
        look.
        """
        runs = self.min_budget + WAVE + self.seeds
        return runs if self.budget is None else min(runs, self.budget)

    @property
    def scans(self) -> tuple[tuple[int, ...], ...]:
        """Returns the indices of the first line along each field, around its centre.

        These are octaves over a range; else SCAN, or with several fields a step to both sides.
        """
        scans = []
        for position, setting in enumerate(self.fields.values()):
            if isinstance(setting, tuple):
                half = max(1, math.ceil(math.log2(setting[1] / setting[0]) / 2))
                scans.append(tuple(i * OCTAVE for i in range(-half, half + 1)))
            else:
                scans.append(SCAN if len(self.fields) == 1 else _line_indices(position))
        return tuple(scans)

    @property
    def search(self) -> Search:
        """Returns the settings of the waves."""
        max_runs = math.inf if self.budget is None else self.budget - self.seeds
        return Search(self.scans, self.smallest_effect, max_runs)


def _line_indices(field_index: int) -> tuple[int, ...]:
    return -STEPS[field_index], 0, STEPS[field_index]


def select_metric(paths: Iterable[str]) -> str:
    """Returns the column that compares runs which differ in these fields.

    This is 'ce', or 'bits_per_byte' if nats per token are not comparable.
    """
    return 'bits_per_byte' if PER_BYTE_FIELDS & {*paths} else 'ce'


OPTIONS = {field.name for field in dataclasses.fields(Tune)} - {'fields'}


def parse_tune(raw: Any) -> Tune:
    """Returns the settings of config.tune. Raises ValueError if they are not valid."""
    if not isinstance(raw, Mapping):
        rule = '--config.tune must be a Python literal (1e-3, not 10**-3) with names in quotes'
        if not isinstance(raw, str):
            rule = 'tune must map fields to None, a centre, or (low, high)'
        raise ValueError(f'{rule}; got {raw!r}. {tune_hint(raw, FIELDS)}')
    fields, options = {}, {}
    for name, value in raw.items():
        if name in OPTIONS:
            options |= {} if value is None else {name: value}
        elif name in FIELDS:
            fields[name] = _parse_field(name, value)
        else:
            hint = suggest_nearest(name, OPTIONS) or field_hint(name, FIELDS)
            hint = ' It is a key of config.sweep.' if name in SWEEP_KEYS else hint
            raise ValueError(f'tune: {name!r} is no config field and no option of tune.{hint}')
    if not fields:
        example = tune_flag(TUNE_EXAMPLE | dict(raw))
        raise ValueError(f'tune must name a field to tune, as in {example}; got {dict(raw)!r}')
    if len(fields) > MAX_FIELDS:
        raise ValueError(
            f'tune searches at most {MAX_FIELDS} fields, because each one needs more runs; got '
            f'{len(fields)}: {", ".join(fields)}. Set the other fields to fixed values.'
        )
    tune = Tune(fields, **_parse_options(options))
    if tune.budget is not None and tune.budget < tune.min_budget:
        raise ValueError(
            f'tune.budget must be at least {tune.min_budget} runs per arm (scans, {WAVE} to '
            f'refine them, and {tune.seeds} fresh seeds); got {tune.budget}'
        )
    return tune


def _parse_field(path: str, value: Any) -> float | tuple[float, float] | None:
    """Returns the centre, range or None of a tuned field. Raises ValueError if it is not valid."""
    if path in SEEDS:
        raise ValueError(
            f'tune: {path} is a seed and cannot be tuned; tune.seeds sets how many are used'
        )
    if set(FIELDS[path].types) - {float, type(None)}:
        kinds = ' or '.join(TYPE_NAMES[kind] for kind in FIELDS[path].types if kind in TYPE_NAMES)
        raise ValueError(
            f'tune: {path} is {kinds}, but a search needs a real number; make it an axis of '
            'config.sweep'
        )
    if path not in RUN_PATHS:
        raise ValueError(
            f'tune: each value of {path} needs its own program; make it an axis of config.sweep'
        )
    if value is None:
        return None
    numbers_given = list(value) if isinstance(value, list | tuple) else [value]
    numbers = sorted({float(number) for number in numbers_given if _is_positive(number)})
    if numbers_given != numbers or len(numbers) != (2 if isinstance(value, list | tuple) else 1):
        hint = f'. Did you mean ({numbers[0]}, {numbers[-1]})?' if len(numbers) > 1 else ''
        raise ValueError(
            f'tune: {path} must be None, a centre above 0, or (low, high) with 0 < low < high; got '
            f'{value!r}{hint}'
        )
    for number in numbers:
        if option := FIELDS[path].option:
            option.check(f'tune: {path}', number)
    if numbers[-1] / numbers[0] > 2.0**MAX_OCTAVES:
        raise ValueError(
            f'tune: the range of {path} must be at most {MAX_OCTAVES} octaves wide, a factor of '
            f'{2.0**MAX_OCTAVES:.1e}, since the search tries each octave; got {value!r}. Narrow it.'
        )
    return (numbers[0], numbers[1]) if len(numbers_given) == 2 else numbers[0]


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value <= FINITE  # a larger int is no float


def _parse_options(raw: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options with their types. Raises ValueError for invalid values."""
    options = dict(raw)
    for name, noun in (('seeds', 'fresh seeds per look'), ('budget', 'runs per arm')):
        value = raw.get(name, MIN_SEEDS)
        if type(value) is not int or (name == 'seeds' and value < MIN_SEEDS):
            bound = f' of at least {MIN_SEEDS}' if name == 'seeds' else ''
            is_whole = isinstance(value, float) and value.is_integer()
            hint = f'. Write {int(value)}' if is_whole else ''
            raise ValueError(
                f'tune.{name} ({noun}) must be a whole number{bound}; got {value!r}{hint}'
            )
    effect = raw.get('smallest_effect', 1.0)
    if not _is_positive(effect):
        raise ValueError(
            'tune.smallest_effect, the difference of losses that matters, must be a number above '
            f'0; got {effect!r}'
        )
    test = raw.get('test', HOLM)
    choose(dict.fromkeys(TESTS), test if isinstance(test, str) else repr(test), 'tune.test')
    lengths = raw.get('lengths', ())
    if not isinstance(lengths, list | tuple) or not all(map(_is_positive, lengths)):
        raise ValueError(
            f"tune.lengths must be shares of the baseline's steps, such as (0.5, 0.7, 1.4); got "
            f'{lengths!r}'
        )
    options |= {'lengths': tuple(sorted({float(share) for share in lengths} - {1.0}))}
    return options | ({'smallest_effect': float(effect)} if 'smallest_effect' in raw else {})


@dataclasses.dataclass(frozen=True)
class Grid:
    """The values of one arm: centre * 2^(k / PER_OCTAVE) for each tuned field.

    coupled: whether weight decay is searched as lr * weight_decay, the inverse of the averaging
    time of AdamW (arXiv:2405.13698). The search then decouples the two.
    """

    centres: Mapping[str, float]
    coupled: bool = False

    def values(self, k: tuple[float, ...]) -> dict[str, float]:
        """Returns {path: value} at indices k, which need not be integers."""
        index = dict(zip(self.centres, k, strict=True))
        if self.coupled:
            index[DECAY] -= index[LR]
        return {path: c * 2.0 ** (index[path] / PER_OCTAVE) for path, c in self.centres.items()}

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """Returns the lowest and highest index that the bounds of each field allow."""
        bounds = []
        for path, centre in self.centres.items():
            if self.coupled and path == DECAY:  # the same index is another decay at another rate
                bounds.append(UNBOUNDED)
                continue
            option = FIELDS[path].option
            low_bound, high_bound = (option.minimum or 0, option.maximum) if option else (0, None)
            low = -math.inf if low_bound <= 0 else _nearest_index(low_bound, centre, 1)
            high = (
                math.inf
                if high_bound is None or high_bound >= FINITE
                else _nearest_index(high_bound, centre, -1)
            )
            bounds.append((low, high))
        return tuple(bounds)


def _nearest_index(bound: float, centre: float, inward: int) -> int:
    """Returns the index nearest to a bound with a value that does not exceed it."""
    k = round((math.log2(bound) - math.log2(centre)) * PER_OCTAVE)
    while (centre * 2.0 ** (k / PER_OCTAVE) - bound) * inward < 0:
        k += inward
    return k


def make_grid(tune: Tune, config: Mapping[str, Any], decay_times_lr: bool) -> Grid:
    """Returns the grid of an arm.

    Args:
      tune: the settings.
      config: the arm's config by path, which provides missing centres.
      decay_times_lr: whether the arm's weight decay is proportional to its learning rate.

    Returns:
      The grid.

    Raises:
      ValueError: if a centre is not above 0.
    """
    centres = {}
    for path, setting in tune.fields.items():
        centre = config.get(path) if setting is None else setting
        if isinstance(centre, tuple):
            centre = math.sqrt(centre[0] * centre[1])
        if not isinstance(centre, int | float) or not 0 < centre < math.inf:
            raise ValueError(
                f'tune: the search of {path} needs a centre above 0, got {centre!r}. Set one in '
                f"config.tune: {{'{path}': CENTRE}}"
            )
        centres[path] = float(centre)
    return Grid(centres, decay_times_lr and LR in centres and DECAY in centres)
