"""config.tune: the fields that each arm of a sweep gets the best values of, and how far to look.

config.tune = {
    'optim.lr': None,  # around each arm's own value; or a centre for all; or (low, high)
    'smallest_effect': 0.01,  # of losses, that matters
}
"""

import dataclasses
import math
from collections.abc import Mapping
from typing import Any

from lm.config.fields import FIELDS, FINITE, RUN_PATHS
from lm.config.suggestions import field_hint
from lm.tuning.curve import OCTAVE, PER_OCTAVE
from lm.tuning.search import SCAN, STEPS, WAVE, Search
from lm.tuning.verdicts import HOLM, TESTS
from modules.choices import choose, nearest

SEEDS = ('train.seed', 'data.seed')
MOST_FIELDS = len(STEPS)
EXAMPLE = '--config.tune="{\'optim.lr\': None}"'


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
    def least_budget(self) -> int:
        """Returns the runs of an arm that it takes at least: scan, refinement and a look."""
        scan = max(len(s) for s in self.scans) + 3 * (len(self.fields) - 1)
        return scan + WAVE + self.seeds

    @property
    def scans(self) -> tuple[tuple[int, ...], ...]:
        """Returns the octaves of the first line along each field."""
        found = []
        for i, given in enumerate(self.fields.values()):
            if isinstance(given, tuple):
                half = max(1, math.ceil(math.log2(given[1] / given[0]) / 2))
                found.append(tuple(range(-half, half + 1)))
            else:
                found.append(SCAN if i == 0 else (-1, 0, 1))
        return tuple(found)

    def search(self, bounds: tuple[tuple[float, float], ...]) -> Search:
        """Returns what waves follow from. bounds: as in `Search`."""
        most = math.inf if self.budget is None else self.budget - self.seeds
        return Search(len(self.fields), self.scans, bounds, self.smallest_effect, most)


OPTIONS = {field.name for field in dataclasses.fields(Tune)} - {'fields'}


def read(raw: Any) -> Tune:
    """Reads config.tune. Raises ValueError for what it cannot mean."""
    if not isinstance(raw, Mapping):
        raise ValueError(f'tune must name fields, such as {EXAMPLE}; got {raw!r}')
    fields, options = {}, {}
    for name, value in raw.items():
        if name in OPTIONS:
            options[name] = value
        elif name in FIELDS:
            fields[name] = _field(name, value)
        else:
            hint = nearest(name, OPTIONS) or field_hint(name, FIELDS)
            raise ValueError(f'tune: {name!r} names no config field and no option of tune.{hint}')
    if not fields:
        raise ValueError(f'tune names no field to tune, such as {EXAMPLE}; got {dict(raw)!r}')
    if len(fields) > MOST_FIELDS:
        raise ValueError(
            f'tune searches {MOST_FIELDS} fields at most, since each needs runs of its own; got '
            f'{len(fields)}: {", ".join(fields)}. Give the others values.'
        )
    tune = Tune(fields, **_options(options))
    if tune.budget is not None and tune.budget < tune.least_budget:
        raise ValueError(
            f'tune.budget must be {tune.least_budget} runs an arm at least (a scan, {WAVE} to '
            f'refine it, and {tune.seeds} fresh seeds); got {tune.budget}'
        )
    return tune


def _field(path: str, value: Any) -> float | tuple[float, float] | None:
    if path in SEEDS:
        raise ValueError(f'tune: {path} is a seed: the option seeds says how many fresh ones')
    if set(FIELDS[path].types) - {float, type(None)}:
        kinds = ' or '.join(kind.__name__ for kind in FIELDS[path].types)
        raise ValueError(
            f'tune: {path} is no real number ({kinds}), and a search needs one; make it an axis of '
            'config.sweep'
        )
    if path not in RUN_PATHS:
        raise ValueError(
            f'tune: each value of {path} is a program of its own; make it an axis of config.sweep'
        )
    if value is None:
        return None
    if isinstance(value, list | tuple):
        if len(value) == 2 and all(map(_is_positive, value)) and value[0] < value[1]:
            return float(value[0]), float(value[1])
    elif _is_positive(value):
        return float(value)
    raise ValueError(
        f'tune: {path} must be None, a centre above 0, or (low, high) with 0 < low < high; got '
        f'{value!r}'
    )


def _is_positive(value: Any) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return is_number and 0 < value < math.inf


def _options(given: Mapping[str, Any]) -> dict[str, Any]:
    """The options with their types. Raises ValueError for values that they cannot have."""
    found = dict(given)
    for name, least in (('seeds', 3), ('budget', 1)):
        value = given.get(name)
        if value is not None and (type(value) is not int or value < least):
            raise ValueError(f'tune.{name} must be a whole number from {least} on; got {value!r}')
    if 'smallest_effect' in given:
        if not _is_positive(value := given['smallest_effect']):
            raise ValueError(f'tune.smallest_effect must be a number above 0; got {value!r}')
        found['smallest_effect'] = float(value)
    if 'test' in given:
        choose(dict.fromkeys(TESTS), given['test'], 'tune.test')
    if 'lengths' in given:
        given = given['lengths']
        if not isinstance(given, list | tuple) or not all(map(_is_positive, given)):
            raise ValueError(f'tune.lengths must be shares such as (0.5, 0.7, 1.4); got {given!r}')
        found['lengths'] = tuple(sorted({float(share) for share in given} - {1.0}))
    return found


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
            option = FIELDS[path].option
            least, most = (option.least or 0, option.most) if option else (0, None)
            most = FINITE if most is None else most
            low = -math.inf if least <= 0 else math.ceil(_octaves(least, centre) * PER_OCTAVE)
            found.append((low, math.floor(_octaves(most, centre) * PER_OCTAVE)))
        return tuple(found)


def _octaves(value: float, centre: float) -> float:
    return math.log2(value) - math.log2(centre)


LR, DECAY = 'optim.lr', 'optim.weight_decay'


def grid(tune: Tune, own: Mapping[str, Any], decay_times_lr: bool) -> Grid:
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
        centre = own.get(path) if given is None else given
        if isinstance(centre, tuple):
            centre = math.sqrt(centre[0] * centre[1])
        if not isinstance(centre, int | float) or not 0 < centre < math.inf:
            raise ValueError(
                f'tune: {path}={centre!r} is no centre to search around, as it must be above 0; '
                f"give one: {{'{path}': CENTRE}}"
            )
        centres[path] = float(centre)
    return Grid(centres, decay_times_lr and LR in centres and DECAY in centres)


__all__ = ['OCTAVE', 'Grid', 'Tune', 'grid', 'read']
