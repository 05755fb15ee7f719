"""config.tune: the fields that each arm of a sweep gets the best values of, and how far to look.

config.tune = {
    'optim.lr': None,  # around each arm's own value; or a centre for all; or (low, high)
    'smallest_effect': 0.01,  # of losses, that matters
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
PER_BYTE_FIELDS = {'data.tokenizer', 'data.source', 'data.mixture'}  # nats a token differ in these
MAX_FIELDS = len(STEPS)
MIN_SEEDS = 3
SWEEP_KEYS = ('protocol', 'zip', 'list')
TYPE_NAMES = {int: 'a whole number', bool: 'True or False', str: 'a text'}


@dataclasses.dataclass(frozen=True)
class Tune:
    """Settings of config.tune.

    fields: path -> None (each arm's own value is the centre), a centre, or (low, high).
    seeds: fresh ones of a look; there are two. smallest_effect: in the unit of losses.
    budget: runs of an arm at most, tuning and fresh seeds together; None: as many as it takes.
    test: of verdicts. lengths: of the baseline, complete runs, as shares of its steps; others'
    losses are translated into its tokens by them.
    """

    fields: Mapping[str, float | tuple[float, float] | None]
    seeds: int = 5
    smallest_effect: float = 0.01
    budget: int | None = None
    test: str = HOLM
    lengths: tuple[float, ...] = ()

    @property
    def min_budget(self) -> int:
        """Returns the runs of an arm that it takes at least: lines, refinement and a look."""
        lines = sum(map(len, self.scans))
        if len(self.fields) > 1:
            lines += (CYCLES - 1) * len(self.fields) * len(_line_indices(0))
        return lines + WAVE + self.seeds

    @property
    def typical_runs(self) -> int:
        """Returns the runs of an arm with a wave more than the least, and with a second look."""
        usual = self.min_budget + WAVE + self.seeds
        return usual if self.budget is None else min(usual, self.budget)

    @property
    def scans(self) -> tuple[tuple[int, ...], ...]:
        """Returns the indices of the first line along each field, around its centre: octaves over a
        range; else SCAN, or where there are several fields a step to both sides.
        """
        found = []
        for number, given in enumerate(self.fields.values()):
            if isinstance(given, tuple):
                half = max(1, math.ceil(math.log2(given[1] / given[0]) / 2))
                found.append(tuple(i * OCTAVE for i in range(-half, half + 1)))
            else:
                found.append(SCAN if len(self.fields) == 1 else _line_indices(number))
        return tuple(found)

    @property
    def search(self) -> Search:
        """Returns what waves follow from."""
        most = math.inf if self.budget is None else self.budget - self.seeds
        return Search(self.scans, self.smallest_effect, most)


def _line_indices(number: int) -> tuple[int, ...]:
    return -STEPS[number], 0, STEPS[number]


def select_metric(paths: Iterable[str]) -> str:
    """Returns the column that runs are compared by which differ in these fields: 'ce', or
    'bits_per_byte' where nats a token do not compare.
    """
    return 'bits_per_byte' if PER_BYTE_FIELDS & {*paths} else 'ce'


OPTIONS = {field.name for field in dataclasses.fields(Tune)} - {'fields'}


def parse_tune(raw: Any) -> Tune:
    """Reads config.tune. Raises ValueError for what it cannot mean."""
    if not isinstance(raw, Mapping):
        rule = '--config.tune must be a Python literal: 1e-3, and not 10**-3; names in quotes'
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
            raise ValueError(f'tune: {name!r} names no config field and no option of tune.{hint}')
    if not fields:
        example = tune_flag(TUNE_EXAMPLE | dict(raw))
        raise ValueError(f'tune names no field to tune, such as {example}; got {dict(raw)!r}')
    if len(fields) > MAX_FIELDS:
        raise ValueError(
            f'tune searches {MAX_FIELDS} fields at most, since each needs runs of its own; got '
            f'{len(fields)}: {", ".join(fields)}. Give the others values.'
        )
    tune = Tune(fields, **_parse_options(options))
    if tune.budget is not None and tune.budget < tune.min_budget:
        raise ValueError(
            f'tune.budget must be {tune.min_budget} runs an arm at least (scans, {WAVE} to '
            f'refine them, and {tune.seeds} fresh seeds); got {tune.budget}'
        )
    return tune


def _parse_field(path: str, value: Any) -> float | tuple[float, float] | None:
    if path in SEEDS:
        raise ValueError(f'tune: {path} is a seed: the option seeds says how many fresh ones')
    if set(FIELDS[path].types) - {float, type(None)}:
        kinds = ' or '.join(TYPE_NAMES[kind] for kind in FIELDS[path].types if kind in TYPE_NAMES)
        raise ValueError(
            f'tune: {path} is {kinds}, and a search needs a real number; make it an axis of '
            'config.sweep'
        )
    if path not in RUN_PATHS:
        raise ValueError(
            f'tune: each value of {path} is a program of its own; make it an axis of config.sweep'
        )
    if value is None:
        return None
    given = list(value) if isinstance(value, list | tuple) else [value]
    numbers = sorted({float(one) for one in given if _is_positive(one)})
    if given != numbers or len(numbers) != (2 if isinstance(value, list | tuple) else 1):
        hint = f'. Did you mean ({numbers[0]}, {numbers[-1]})?' if len(numbers) > 1 else ''
        raise ValueError(
            f'tune: {path} must be None, a centre above 0, or (low, high) with 0 < low < high; got '
            f'{value!r}{hint}'
        )
    for number in numbers:
        if option := FIELDS[path].option:
            option.check(f'tune: {path}', number)
    return (numbers[0], numbers[1]) if len(given) == 2 else numbers[0]


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _parse_options(raw: Mapping[str, Any]) -> dict[str, Any]:
    """The options with their types. Raises ValueError for values that they cannot have."""
    found = dict(raw)
    for name, what in (('seeds', 'fresh seeds of a look'), ('budget', 'runs of an arm')):
        value = raw.get(name, MIN_SEEDS)
        if type(value) is not int or (name == 'seeds' and value < MIN_SEEDS):
            bound = f' from {MIN_SEEDS} on' if name == 'seeds' else ''
            is_whole = isinstance(value, float) and value.is_integer()
            hint = f'. Write {int(value)}' if is_whole else ''
            raise ValueError(
                f'tune.{name} counts the {what}, a whole number{bound}; got {value!r}{hint}'
            )
    effect = raw.get('smallest_effect', 1.0)
    if not _is_positive(effect):
        raise ValueError(
            'tune.smallest_effect is the difference of losses that matters, a number above 0; got '
            f'{effect!r}'
        )
    test = raw.get('test', HOLM)
    choose(dict.fromkeys(TESTS), test if isinstance(test, str) else repr(test), 'tune.test')
    lengths = raw.get('lengths', ())
    if not isinstance(lengths, list | tuple) or not all(map(_is_positive, lengths)):
        raise ValueError(
            f"tune.lengths must be shares of the baseline's steps, such as (0.5, 0.7, 1.4); got "
            f'{lengths!r}'
        )
    found |= {'lengths': tuple(sorted({float(share) for share in lengths} - {1.0}))}
    return found | ({'smallest_effect': float(effect)} if 'smallest_effect' in raw else {})


@dataclasses.dataclass(frozen=True)
class Grid:
    """The values of one arm: centre * 2^(k / PER_OCTAVE) for each tuned field.

    coupled: whether weight decay is searched as lr * weight_decay, of which the averaging time of
    AdamW is the inverse (arXiv:2405.13698): the two decouple then.
    """

    centres: Mapping[str, float]
    coupled: bool = False

    def values(self, k: tuple[int, ...]) -> dict[str, float]:
        """Returns {path: value} at a place."""
        index = dict(zip(self.centres, k, strict=True))
        if self.coupled:
            index[DECAY] -= index[LR]
        return {path: c * 2.0 ** (index[path] / PER_OCTAVE) for path, c in self.centres.items()}

    @property
    def bounds(self) -> tuple[tuple[float, float], ...]:
        """Returns the lowest and highest index of each field that its bounds allow."""
        found = []
        for path, centre in self.centres.items():
            if self.coupled and path == DECAY:  # its own value moves with the learning rate
                found.append(UNBOUNDED)
                continue
            option = FIELDS[path].option
            least, most = (option.minimum or 0, option.maximum) if option else (0, None)
            low = -math.inf if least <= 0 else _nearest_index(least, centre, 1)
            high = math.inf if most is None or most >= FINITE else _nearest_index(most, centre, -1)
            found.append((low, high))
        return tuple(found)


def _nearest_index(bound: float, centre: float, inward: int) -> int:
    """The index nearest to a bound whose value does not exceed it."""
    k = round((math.log2(bound) - math.log2(centre)) * PER_OCTAVE)
    while (centre * 2.0 ** (k / PER_OCTAVE) - bound) * inward < 0:
        k += inward
    return k


def make_grid(tune: Tune, config: Mapping[str, Any], decay_times_lr: bool) -> Grid:
    """Returns the grid of an arm.

    Args:
      tune: the settings.
      own: the arm's config by path, for centres that are not given.
      decay_times_lr: whether the arm's decay of weights is in proportion to its learning rate.

    Raises:
      ValueError: where an arm has no value above 0 of its own.
    """
    centres = {}
    for path, given in tune.fields.items():
        centre = config.get(path) if given is None else given
        if isinstance(centre, tuple):
            centre = math.sqrt(centre[0] * centre[1])
        if not isinstance(centre, int | float) or not 0 < centre < math.inf:
            raise ValueError(
                f'tune: {path}={centre!r} is no centre to search around, as it must be above 0; '
                f"give one in config.tune: {{'{path}': CENTRE}}"
            )
        centres[path] = float(centre)
    return Grid(centres, decay_times_lr and LR in centres and DECAY in centres)
