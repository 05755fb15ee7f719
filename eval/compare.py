"""What a sweep says: best learning rates, sensitivity to them, and differences from the baseline.

A variant is a combination of what was swept besides the learning rate and the seeds. Only runs that
ended count. One that diverged counts as the loss at initialisation, as arXiv:2309.14322 does it, so
that a variant cannot look good by losing its bad seeds; one that failed or was stopped says nothing
and is left out. Losses are in the unit of the metric: nats per token for `ce`.
"""

import dataclasses
import itertools
import json
import math
from collections.abc import Hashable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from scipy import stats

from eval.runs import Record, columns
from eval.text import number
from lm.config import flatten
from lm.record.metrics import FILE

CONFIDENCE = 0.95
LR = 'optim.lr'
SEEDS = ('train.seed', 'data.seed')
FIRST_LINES = 5  # among which are all rows of step 1
BETTER, WORSE, WITHIN_NOISE, ONE_SEED = 'better', 'worse', 'within noise', 'one seed'

Seed = Hashable
Losses = Mapping[float, Mapping[Seed, float]]  # learning rate -> seed -> loss


@dataclasses.dataclass(frozen=True)
class Interval:
    """`mean` of n values and the half width of its confidence interval: nan where n < 2."""

    mean: float
    half: float
    n: int


def t_interval(values: Iterable[float]) -> Interval:
    """mean +- t s / sqrt(n), with s^2 = sum (x - mean)^2 / (n - 1).

    t is the (1 + CONFIDENCE) / 2 quantile of Student's distribution with n - 1 degrees of freedom:
    the interval of the mean of normal values (Student, Biometrika 6, 1908). Without values: nan.
    """
    x = np.asarray(list(values), float)
    if x.size < 2:
        return Interval(float(x[0]) if x.size else math.nan, math.nan, x.size)
    t = stats.t.ppf((1 + CONFIDENCE) / 2, x.size - 1)
    return Interval(float(x.mean()), float(t * x.std(ddof=1) / math.sqrt(x.size)), x.size)


def paired(losses: Mapping[Seed, float], baseline: Mapping[Seed, float]) -> Interval:
    """The interval of losses[s] - baseline[s] over the seeds s that both have.

    What a seed does to both cancels, so this is narrower than the difference of two means.
    """
    return t_interval(losses[seed] - baseline[seed] for seed in losses if seed in baseline)


def verdict(difference: Interval) -> str:
    """Of a difference in loss from the baseline: does its interval exclude 0, on which side."""
    if difference.n < 2:
        return ONE_SEED
    if abs(difference.mean) <= difference.half:
        return WITHIN_NOISE
    return BETTER if difference.mean < 0 else WORSE


def best_lr(losses: Losses) -> float | None:
    """The learning rate of the lowest mean over seeds; of equal ones the smallest."""
    means = {lr: np.mean(list(by_seed.values())) for lr, by_seed in losses.items() if by_seed}
    return min(sorted(means), key=means.get) if means else None


def sensitivity(losses: Losses, initial: float) -> float:
    """E_lr[min(loss(lr), initial)] - min_lr loss(lr), the learning-rate sensitivity.

    The expectation is the mean over the swept learning rates, which is one over log(lr) where they
    are spaced evenly in it; each is first averaged over its seeds. Only variants that were swept
    over the same learning rates compare. nan with fewer than two of them, or where `initial` is.
    From arXiv:2309.14322, where the grid spans three decades.
    """
    capped = [np.minimum(list(by_seed.values()), initial) for by_seed in losses.values() if by_seed]
    if len(capped) < 2:
        return math.nan
    means = [losses_S.mean() for losses_S in capped]
    return float(np.mean(means) - min(means))


@dataclasses.dataclass(frozen=True)
class Variant:
    """The runs that share `values` (column -> value) of what is swept besides lr and seeds."""

    name: str
    values: dict[str, Any]
    records: list[Record]
    is_baseline: bool

    def at(self, lr: float | None) -> list[Record]:
        return [record for record in self.records if record['lr'] == lr]


def split(records: Sequence[Record], sweep: Mapping[str, Any]) -> list[Variant]:
    """The variants of a sweep (its sweep.json as a dict), in the order in which they come.

    The baseline is the one that has the values of the sweep's base, or else the first.
    """
    names, base = columns(), flatten(sweep['base'])
    axes = [path for path in sweep['axes'] if path != LR and path not in SEEDS]
    groups: dict[tuple, list[Record]] = {}
    for record in records:
        groups.setdefault(tuple(record[names[path]] for path in axes), []).append(record)
    baseline = tuple(base.get(path) for path in axes)
    if baseline not in groups:
        baseline = next(iter(groups), None)
    return [
        Variant(
            name=_name(dict(zip(axes, key, strict=True)), members),
            values={names[p]: v for p, v in zip(axes, key, strict=True)},
            records=members,
            is_baseline=key == baseline,
        )
        for key, members in groups.items()
    ]


def _name(values: Mapping[str, Any], members: Sequence[Record]) -> str:
    parts = (f'{columns()[path]} {number(value)}' for path, value in values.items())
    return ', '.join(parts) or (members[0]['cell'] if len(members) == 1 else 'all runs')


def has_diverged(record: Record) -> bool:
    """Whether training went wrong, which leaves no final loss, or none that is a number."""
    not_finite = record['status'] == 'done' and record['ce'] is None and record['validated_step']
    broke_off = record['status'] == 'failed' and record['diverged_step']
    return bool(record['status'] == 'diverged' or broke_off or not_finite)


def initial_loss(records: Iterable[Record]) -> float:
    """The mean over runs of the training loss of step 1, before any update; nan without one."""
    found = [ce for record in records if (ce := _first_ce(Path(record['workdir']))) is not None]
    return float(np.mean(found)) if found else math.nan


def _first_ce(workdir: Path) -> float | None:
    """Reads the first lines only, and not the 10,000 of a long run."""
    if not (workdir / FILE).exists():
        return None
    with (workdir / FILE).open() as file:
        for line in itertools.islice(file, FIRST_LINES):
            try:
                row = json.loads(line)
            except json.JSONDecodeError:  # cut short
                break
            if row['step'] == 1 and row.get('ce') is not None:
                return row['ce']
    return None


def losses_by_lr(variant: Variant, metric: str, initial: float) -> dict[float, dict[Seed, float]]:
    """lr -> seed -> final loss of the runs that ended; `initial` for those that diverged."""
    seeds = [columns()[path] for path in SEEDS]
    found: dict[float, dict[Seed, float]] = {}
    for record in variant.records:
        loss = _final_loss(record, metric, initial)
        if not math.isnan(loss):
            seed = tuple(record[name] for name in seeds)
            found.setdefault(record['lr'], {})[seed] = loss
    return dict(sorted(found.items()))


def _final_loss(record: Record, metric: str, initial: float) -> float:
    if has_diverged(record):
        return initial
    known = record['status'] == 'done' and record[metric] is not None
    return record[metric] if known else math.nan


@dataclasses.dataclass(frozen=True)
class Comparison:
    """What is known of a variant. `difference` is from the baseline, each at its own `best_lr`."""

    variant: Variant
    losses: dict[float, dict[Seed, float]]
    initial: float
    best_lr: float | None
    loss: Interval
    bits_per_byte: Interval
    tokens_per_sec: float
    sensitivity: float
    difference: Interval
    verdict: str  # '' for the baseline
    diverged: int
    notes: list[str]


def metric_of(sweep: Mapping[str, Any]) -> str:
    """'ce', or 'bits_per_byte' where tokenizers differ and nats per token do not compare."""
    return 'bits_per_byte' if {'data.tokenizer', 'data.source'} & set(sweep['axes']) else 'ce'


def compare(records: Sequence[Record], sweep: Mapping[str, Any]) -> list[Comparison]:
    """Each variant of the sweep against its baseline.

    The learning rate is chosen by the seeds that are then compared, which flatters variants with
    more learning rates; and each interval stands for itself, uncorrected for their number.
    """
    metric, variants = metric_of(sweep), split(records, sweep)
    initials = [_initial(variant, variants, metric) for variant in variants]
    losses = [losses_by_lr(v, metric, l0) for v, l0 in zip(variants, initials, strict=True)]
    baseline = next((i for i, v in enumerate(variants) if v.is_baseline), None)
    return [
        _comparison(variant, losses[i], initials[i], losses[baseline])
        for i, variant in enumerate(variants)
    ]


def _initial(variant: Variant, variants: list[Variant], metric: str) -> float:
    """In the unit of the metric, which differs from nats per token by a factor that runs know."""
    initial = initial_loss(variant.records)
    if math.isnan(initial):
        initial = initial_loss(record for other in variants for record in other.records)
    if metric == 'ce':
        return initial
    ratios = [r[metric] / r['ce'] for r in variant.records if r['ce'] and r[metric]]
    return initial * float(np.mean(ratios)) if ratios else math.nan


def _comparison(variant: Variant, losses: Losses, initial: float, baseline: Losses) -> Comparison:
    best = best_lr(losses)
    at_best, of_baseline = losses.get(best, {}), baseline.get(best_lr(baseline), {})
    per_byte = [_final_loss(r, 'bits_per_byte', math.nan) for r in variant.at(best)]
    difference = paired(at_best, of_baseline)
    speeds = [r['tokens_per_sec'] for r in variant.records if r['tokens_per_sec']]
    return Comparison(
        variant=variant,
        losses=losses,
        initial=initial,
        best_lr=best,
        loss=t_interval(at_best.values()),
        bits_per_byte=t_interval(x for x in per_byte if not math.isnan(x)),
        tokens_per_sec=float(np.mean(speeds)) if speeds else math.nan,
        sensitivity=sensitivity(losses, initial),
        difference=difference,
        verdict='' if variant.is_baseline or not difference.n else verdict(difference),
        diverged=sum(map(has_diverged, variant.records)),
        notes=_notes(variant, losses, best, difference),
    )


def _notes(variant: Variant, losses: Losses, best: float | None, difference: Interval) -> list[str]:
    """What a reader of the numbers must know about them."""
    if best is None:
        return ['no run has ended']
    notes, records = [], variant.at(best)
    diverged, missing = sum(map(has_diverged, records)), len(records) - len(losses[best])
    if diverged:
        notes.append(
            f'{diverged} of {len(records)} diverged at its best learning rate; '
            'counted as the loss at initialisation'
        )
    if missing:
        notes.append(f'{missing} of {len(records)} have not ended, or failed, there')
    rates = sorted({record['lr'] for record in variant.records})
    if len(rates) > 1 and best in (rates[0], rates[-1]):
        notes.append(
            f'best at the {"lowest" if best == rates[0] else "highest"} learning rate tried'
        )
    if not variant.is_baseline and not difference.n:
        notes.append('no seed has ended here and in the baseline')
    return notes
