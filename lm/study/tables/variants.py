"""The variants of a sweep and their final losses.

A variant is a combination of what was swept besides the learning rate and the seeds. Only runs that
ended count. One that diverged counts as the loss at initialisation, as arXiv:2309.14322 does it, so
that a variant cannot look good by losing its bad seeds; one that failed or was stopped says nothing
and is left out.
"""

import collections
import dataclasses
import itertools
import math
from collections.abc import Collection, Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from lm.config.choice import AUTO
from lm.config.fields import CHOICES
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
    """The runs that share `values` (column -> value) of what is swept besides lr and seeds.

    sweep: the name of their sweep, where several are compared.
    words: column -> value in words, without its field where the value alone says enough.
    """

    name: str
    values: dict[str, Any]
    records: list[Record]
    is_baseline: bool
    sweep: str = ''
    value_texts: dict[str, str] = dataclasses.field(default_factory=dict)

    @property
    def values_text(self) -> str:
        """The values in words; the name where nothing is swept."""
        known = ((column, value) for column, value in self.values.items() if value is not None)
        return ', '.join(f'{column} {format_number(value)}' for column, value in known) or self.name

    @property
    def rates(self) -> list[float]:
        """The learning rates of its runs, smallest first."""
        return sorted({record['lr'] for record in self.records})

    def records_at(self, lr: float | None) -> list[Record]:
        return [record for record in self.records if record['lr'] == lr]


def split_variants(records: Sequence[Record], sweep: Mapping[str, Any]) -> list[Variant]:
    """Returns the variants of a sweep (its sweep.json as a dict), in the order in which they come.

    The baseline is the first (`select_baseline` for another).
    """
    names = columns()
    axes = [path for path in sweep['axes'] if path != LR and path not in SEEDS]
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[names[path]] for path in axes), []).append(record)
    first = next(iter(groups), ())
    named = _select_naming_axes(axes, groups)
    kept = [[key[axes.index(path)] for path in named] for key in groups]
    usual = dict(zip(axes, first, strict=False)) if is_partial_grid({*map(tuple, kept)}) else {}
    # A text that one axis alone has says what it is the value of.
    owners = collections.Counter(
        value
        for path, column in zip(axes, zip(*groups, strict=True), strict=True)
        for value in {*column}
        if _is_self_explanatory(path, value)
    )
    found = []
    for key, members in groups.items():
        told = {
            path: value
            if owners[value] == 1 and _is_self_explanatory(path, value)
            else f'{names[path]} {format_number(value)}'
            for path, value in zip(axes, key, strict=True)
        }
        # In a list of variants a dozen values would name each, most of them shared with the
        # baseline or not read.
        own = {p for p, v in zip(axes, key, strict=True) if v is not None and v != usual.get(p)}
        parts = [told[path] for path in named if path in own or not usual]
        one = members[0]['cell'] if len(members) == 1 else 'all runs'
        variant = Variant(
            name=BASELINE if usual and key == first else ', '.join(parts) or one,
            values={names[p]: v for p, v in zip(axes, key, strict=True)},
            records=members,
            is_baseline=key == first,
            value_texts={names[p]: text for p, text in told.items()},
        )
        found.append(variant)
    return found


def _select_naming_axes(axes: Sequence[str], groups: Collection[tuple]) -> list[str]:
    """Returns the axes that name a variant: without what a size brings along, where it has a name
    of its own without these.
    """
    names = columns()
    fewer = [path for path in axes if names[path] not in SIZE_DEPENDENT]
    own = {tuple(key[axes.index(path)] for path in fewer) for key in groups}
    has_size = any(names[path] in SIZES for path in axes)
    return fewer if has_size and len(own) == len(groups) else list(axes)


def _is_self_explanatory(path: str, value: Any) -> bool:
    """Whether a value says what it is of: of model.norm and model.qk_norm, which have the same
    names, the first does.
    """
    if not isinstance(value, str) or value in ('', AUTO, 'none'):
        return False
    row = value.partition(':')[0]
    return path == next((one for one, choice in CHOICES.items() if row in choice.table), path)


def is_partial_grid(combinations: Collection[tuple]) -> bool:
    """Returns whether the values of axes are not all combined: they are zipped, or listed."""
    return len(combinations) < math.prod(len({*c}) for c in zip(*combinations, strict=True))


def select_baseline(variants: Sequence[Variant], name: str) -> list[Variant]:
    """Makes the variant of that name, or with that cell, the baseline. Raises ValueError where none
    is.
    """
    called = [(v.name, v.values_text, *(r['cell'] for r in v.records)) for v in variants]
    found = [v for v, names in zip(variants, called, strict=True) if name in names]
    if not found:
        names = [variant.name for variant in variants]
        raise ValueError(
            f'--baseline={name} is no variant and no cell of the sweep.{suggest_nearest(name, names)} '
            f'Variants: {"; ".join(names[:12])}'
        )
    names = {BASELINE: 'the first'}  # whose name is no longer true
    return [
        dataclasses.replace(v, is_baseline=True)
        if v is found[0]
        else dataclasses.replace(v, is_baseline=False, name=names.get(v.name, v.name))
        for v in variants
    ]


def has_diverged(record: Record) -> bool:
    """Whether training went wrong, which leaves no final loss, or none that is a number."""
    not_finite = record['status'] == 'done' and record['ce'] is None and record['validated_step']
    broke_off = record['status'] == 'failed' and record['diverged_step']
    return bool(record['status'] == 'diverged' or broke_off or not_finite)


def initial_loss(records: Iterable[Record]) -> float:
    """The mean over runs of the training loss of step 1, before any update; nan without one."""
    found = [
        ce for record in records if (ce := _read_first_ce(Path(record['workdir']))) is not None
    ]
    return float(np.mean(found)) if found else math.nan


def _read_first_ce(workdir: Path) -> float | None:
    """Reads the first lines only, and not the 10,000 of a long run."""
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
    """lr -> seed -> final loss of the runs that ended; `initial` for those that diverged."""
    seeds = [columns()[path] for path in SEEDS]
    found: dict[float, dict[Seed, float]] = {}
    for record in variant.records:
        loss = loss_or_initial(record, metric, initial)
        if not math.isnan(loss):
            seed = tuple(record[name] for name in seeds)
            found.setdefault(record['lr'], {})[seed] = loss
    return dict(sorted(found.items()))


def loss_or_initial(record: Record, metric: str, initial: float) -> float:
    """The final loss; `initial` after divergence, nan where there is none."""
    if has_diverged(record):
        return initial
    known = record['status'] == 'done' and record[metric] is not None
    return record[metric] if known else math.nan
