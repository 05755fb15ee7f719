"""The variants of a sweep and their final losses.

A variant is a combination of swept values other than the learning rate and the seeds. Only runs
that ended count. A diverged run counts as the loss at initialisation, as in arXiv:2309.14322, so
that a variant cannot look good by losing its bad seeds. A run that failed or was stopped is left
out.
"""

import collections
import dataclasses
import functools
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.config.choice import AUTO
from lm.config.fields import CHOICES
from lm.config.resolve import flatten
from lm.record.metrics import FILE
from lm.storage.files import UnreadableFile, open_regular, parse_json
from lm.study.plan.settings import LR, SEEDS
from lm.study.tables.columns import Record, columns
from lm.study.tables.text import format_number
from modules.choices import suggest_nearest

BASELINE = 'baseline'  # the name of the first of a list
SIZES = ('d_model', 'n_layers')
# What a size brings along: no choice of its own.
SIZE_DEPENDENT = (
    *('d_ff', 'n_heads', 'n_kv_heads', 'model_head_dim'),
    *('scaling_base_width', 'scaling_base_depth'),
)
FIRST_LINES = 5  # among which are all rows of step 1

Seed = Hashable
Losses = Mapping[float, Mapping[Seed, float]]  # learning rate -> seed -> loss


@dataclasses.dataclass(frozen=True)
class Variant:
    """The runs that share `values` of the fields swept besides learning rate and seeds.

    Attributes:
      name: name of the variant, unique in its sweep.
      values: column -> value.
      records: records of its runs.
      is_baseline: whether the others are compared with it.
      sweep: name of the sweep, if several are compared.
      value_texts: column -> value as text, without its field if the value alone is clear.
    """

    name: str
    values: dict[str, Any]
    records: list[Record]
    is_baseline: bool
    sweep: str = ''
    value_texts: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def values_text(self) -> str:
        """The values as text; the name if nothing is swept."""
        present = ((column, value) for column, value in self.values.items() if value is not None)
        return (
            ', '.join(f'{column} {format_number(value)}' for column, value in present) or self.name
        )

    @functools.cached_property
    def rates(self) -> list[float]:
        """The learning rates of its runs, in ascending order."""
        return sorted(self._by_lr)

    def records_at(self, lr: float | None) -> list[Record]:
        """Returns the records with a learning rate."""
        return [] if lr is None else self._by_lr.get(lr, [])

    @functools.cached_property
    def _by_lr(self) -> dict[float, list[Record]]:
        # Callers go through all rates, of which there may be as many as runs.
        by_lr: dict[float, list[Record]] = {}
        for record in self.records:
            by_lr.setdefault(record['lr'], []).append(record)
        return by_lr


def find_base_differences(sweeps: Sequence[Mapping[str, Any]]) -> dict[str, list[Any]]:
    """Returns field -> values where the base configs of sweeps differ, without rate and seeds."""
    bases = [flatten(sweep['base']) for sweep in sweeps]
    paths = dict.fromkeys(path for base in bases for path in base if path not in (LR, *SEEDS))
    values_by_path = {path: [base.get(path) for base in bases] for path in paths}
    return {
        path: values
        for path, values in values_by_path.items()
        if any(value != values[0] for value in values)
    }


def split_variants(records: Sequence[Record], sweep: Mapping[str, Any]) -> list[Variant]:
    """Returns the variants of a sweep (its sweep.json as a dict), in order of appearance.

    The baseline is the first (see `select_baseline` for another).
    """
    names = columns()
    axes = [path for path in sweep['axes'] if path != LR and path not in SEEDS]
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[names[path]] for path in axes), []).append(record)
    first = next(iter(groups), ())
    naming_axes = _select_naming_axes(axes, groups)
    combinations = [[key[axes.index(path)] for path in naming_axes] for key in groups]
    defaults = (
        dict(zip(axes, first, strict=False)) if is_partial_grid({*map(tuple, combinations)}) else {}
    )
    # A text that only one axis has needs no field beside it.
    owners = collections.Counter(
        value
        for path, column in zip(axes, zip(*groups, strict=True), strict=True)
        for value in {*column}
        if _is_self_explanatory(path, value)
    )
    variants = []
    for key, members in groups.items():
        texts = {
            path: value
            if owners[value] == 1 and _is_self_explanatory(path, value)
            else f'{names[path]} {format_number(value)}'
            for path, value in zip(axes, key, strict=True)
        }
        # A list of variants has a dozen axes, most with the value of the baseline or unread: only
        # the changed values are part of a name.
        changed = {
            p for p, v in zip(axes, key, strict=True) if v is not None and v != defaults.get(p)
        }
        parts = [texts[path] for path in naming_axes if path in changed or not defaults]
        fallback = members[0]['cell'] if len(members) == 1 else 'all runs'
        variant = Variant(
            name=BASELINE if defaults and key == first else ', '.join(parts) or fallback,
            values={names[p]: v for p, v in zip(axes, key, strict=True)},
            records=members,
            is_baseline=key == first,
            value_texts={names[p]: text for p, text in texts.items()},
        )
        variants.append(variant)
    return variants


def _select_naming_axes(axes: Sequence[str], groups: Collection[tuple]) -> list[str]:
    """Returns the axes that name a variant.

    Axes that follow from the size are left out, if the names stay distinct without them.
    """
    names = columns()
    own_axes = [path for path in axes if names[path] not in SIZE_DEPENDENT]
    combinations = {tuple(key[axes.index(path)] for path in own_axes) for key in groups}
    has_size = any(names[path] in SIZES for path in axes)
    return own_axes if has_size and len(combinations) == len(groups) else list(axes)


def _is_self_explanatory(path: str, value: Any) -> bool:
    """Whether a value tells its field: model.norm and model.qk_norm share their values, which stand
    for the first.
    """
    if not isinstance(value, str) or value in ('', AUTO, 'none'):
        return False
    row = value.partition(':')[0]
    return path == next((field for field, choice in CHOICES.items() if row in choice.table), path)


def is_partial_grid(combinations: Collection[tuple]) -> bool:
    """Whether combinations of the axes' values are missing, because axes are zipped or listed."""
    return len(combinations) < math.prod(len({*c}) for c in zip(*combinations, strict=True))


def select_baseline(variants: Sequence[Variant], name: str) -> list[Variant]:
    """Makes the variant with a name or a cell the baseline.

    Raises ValueError if no variant matches.
    """
    aliases = [(v.name, v.values_text, *(r['cell'] for r in v.records)) for v in variants]
    matches = [v for v, names in zip(variants, aliases, strict=True) if name in names]
    if not matches:
        names = [variant.name for variant in variants]
        raise ValueError(
            f'--baseline={name} is not a variant or a cell of the sweep.'
            f'{suggest_nearest(name, names)} Variants: {"; ".join(names[:12])}'
        )
    names = {BASELINE: 'the first'}  # whose name is no longer true
    return [
        dataclasses.replace(v, is_baseline=True)
        if v is matches[0]
        else dataclasses.replace(v, is_baseline=False, name=names.get(v.name, v.name))
        for v in variants
    ]


def has_diverged(record: Record) -> bool:
    """Whether training diverged, so that the final loss is missing or not finite."""
    not_finite = record['status'] == 'done' and record['ce'] is None and record['validated_step']
    broke_off = record['status'] == 'failed' and record['diverged_step']
    return bool(record['status'] == 'diverged' or broke_off or not_finite)


def initial_loss(records: Iterable[Record]) -> float:
    """Returns the mean over runs of the training loss of step 1, before any update; nan without
    any.
    """
    losses = [
        ce for record in records if (ce := _read_first_ce(Path(record['workdir']))) is not None
    ]
    return float(np.mean(losses)) if losses else math.nan


def _read_first_ce(workdir: Path) -> float | None:
    """Reads only the first lines, and not all 10,000 of a long run."""
    try:
        with open_regular(workdir / FILE) as file:
            lines = list(itertools.islice(file, FIRST_LINES))
    except (OSError, UnreadableFile):  # there is none, or it cannot be read
        return None
    for line in lines:
        try:
            row = parse_json(line)
        except ValueError:  # cut short, or written over
            continue
        if isinstance(row, dict) and row.get('step') == 1:
            ce = row.get('ce')
            if isinstance(ce, int | float) and math.isfinite(ce):
                return ce
    return None


def losses_by_lr(variant: Variant, metric: str, initial: float) -> dict[float, dict[Seed, float]]:
    """Returns lr -> seed -> final loss of the runs that ended; `initial` for diverged runs.

    Args:
      variant: the runs.
      metric: column of the loss.
      initial: loss at initialisation.

    Returns:
      The losses, by ascending learning rate.
    """
    seeds = [columns()[path] for path in SEEDS]
    by_lr: dict[float, dict[Seed, float]] = {}
    for record in variant.records:
        loss = loss_or_initial(record, metric, initial)
        if not math.isnan(loss):
            seed = tuple(record[name] for name in seeds)
            by_lr.setdefault(record['lr'], {})[seed] = loss
    return dict(sorted(by_lr.items()))


def loss_or_initial(record: Record, metric: str, initial: float) -> float:
    """Returns the final loss of a run.

    Args:
      record: record of the run.
      metric: column of the loss.
      initial: loss at initialisation.

    Returns:
      The loss; `initial` after divergence; nan if the run has no final loss.
    """
    if has_diverged(record):
        return initial
    has_ended = record['status'] == 'done' and record[metric] is not None
    return record[metric] if has_ended else math.nan
