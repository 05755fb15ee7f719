"""What a sweep says: best learning rates, sensitivity to them, and differences from the baseline.

Losses are in the unit of the metric: nats per token for `ce`. Which runs count stands in
`eval.variants`.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from eval.columns import columns
from eval.runs import UNREADABLE, Record
from eval.stats import (
    WITHIN_NOISE,
    Interval,
    Seed,
    holm,
    p_value,
    paired,
    seeds_needed,
    t_interval,
    verdict,
)
from eval.text import number
from eval.variants import (
    LR,
    SEEDS,
    Losses,
    Variant,
    final_loss,
    has_diverged,
    initial_loss,
    losses_by_lr,
    split,
)
from lm.config import flatten

PER_BYTE_FIELDS = {
    'data.tokenizer',
    'data.source',
    'data.mixture',
}  # nats per token do not compare across these
WAITS = 'has not ended'
LACKS = {  # status: why a run that did not diverge has no final loss
    'done': 'has no final loss',
    'failed': 'failed',
    UNREADABLE: 'cannot be read',
}


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
    diverged: int
    notes: list[str]
    p: float = math.nan  # adjusted for the number of variants; nan for the baseline or one seed
    verdict: str = ''  # '' for the baseline
    seeds_needed: int | None = None  # to settle a difference that is within noise


def metric_of(sweep: Mapping[str, Any]) -> str:
    """'ce', or 'bits_per_byte' where tokenizers differ and nats per token do not compare."""
    return 'bits_per_byte' if PER_BYTE_FIELDS & set(sweep['axes']) else 'ce'


def compare(records: Sequence[Record], sweep: Mapping[str, Any]) -> list[Comparison]:
    """Each variant of the sweep against its baseline (`compare_variants`)."""
    return compare_variants(split(records, sweep), metric_of(sweep))


def compare_rates(records: Sequence[Record], sweep: Mapping[str, Any]) -> list[Comparison]:
    """Each learning rate against that of the base, or against the best where the base's was not
    swept; [] where anything but learning rates and seeds was swept, or one rate only.

    The best is chosen by the seeds that it is then compared by, so that no other can be better.
    """
    rates = sorted({record['lr'] for record in records})
    if set(sweep['axes']) - {LR, *SEEDS} or len(rates) < 2:
        return []
    (everything,) = compare(records, sweep)
    at_base = flatten(sweep['base']).get(LR)
    reference = at_base if at_base in rates else everything.best_lr
    variants = [
        Variant(f'lr {number(lr)}', {columns()[LR]: lr}, everything.variant.at(lr), lr == reference)
        for lr in rates
    ]
    return compare_variants(variants, metric_of(sweep))


def compare_variants(variants: Sequence[Variant], metric: str) -> list[Comparison]:
    """Each variant against the one that is the baseline.

    Verdicts are corrected for their number: by p-values that `eval.stats.holm` adjusted. Intervals
    are not. The learning rate is chosen by the seeds that are then compared, which flatters
    variants with more learning rates, and which nothing here corrects.
    """
    initials = [_initial(variant, variants, metric) for variant in variants]
    losses = [losses_by_lr(v, metric, l0) for v, l0 in zip(variants, initials, strict=True)]
    baseline = next((i for i, v in enumerate(variants) if v.is_baseline), None)
    of_baseline = {} if baseline is None else losses[baseline]
    found = [
        _comparison(variant, losses[i], initials[i], of_baseline, metric)
        for i, variant in enumerate(variants)
    ]
    return _with_verdicts([_with_grid_note(c, found) for c in found])


def _with_grid_note(c: Comparison, found: Sequence[Comparison]) -> Comparison:
    """Sensitivities are means over a grid of learning rates, and compare over equal ones alone."""
    of_baseline = next((other for other in found if other.variant.is_baseline), c)
    grids = [{record['lr'] for record in one.variant.records} for one in (c, of_baseline)]
    if grids[0] == grids[1] or math.isnan(c.sensitivity) or math.isnan(of_baseline.sensitivity):
        return c
    note = "sensitivity is over other learning rates than the baseline's: they do not compare"
    return dataclasses.replace(c, notes=[*c.notes, note])


def _with_verdicts(found: Sequence[Comparison]) -> list[Comparison]:
    nothing = t_interval([])
    differences = [nothing if c.variant.is_baseline else c.difference for c in found]
    adjusted = holm([p_value(difference) for difference in differences])
    verdicts = [verdict(d, p) if d.n else '' for d, p in zip(differences, adjusted, strict=True)]
    undecided = verdicts.count(WITHIN_NOISE)
    return [
        dataclasses.replace(
            c,
            p=p,
            verdict=said,
            seeds_needed=seeds_needed(c.difference, undecided) if said == WITHIN_NOISE else None,
        )
        for c, p, said in zip(found, adjusted, verdicts, strict=True)
    ]


def _initial(variant: Variant, variants: Sequence[Variant], metric: str) -> float:
    """In the unit of the metric, which differs from nats per token by a factor that runs know."""
    initial = initial_loss(variant.records)
    if math.isnan(initial):
        initial = initial_loss(record for other in variants for record in other.records)
    if metric == 'ce':
        return initial
    ratios = [r[metric] / r['ce'] for r in variant.records if r['ce'] and r[metric]]
    return initial * float(np.mean(ratios)) if ratios else math.nan


def _comparison(
    variant: Variant, losses: Losses, initial: float, baseline: Losses, metric: str
) -> Comparison:
    best = best_lr(losses)
    at_best, of_baseline = losses.get(best, {}), baseline.get(best_lr(baseline), {})
    per_byte = [final_loss(r, 'bits_per_byte', math.nan) for r in variant.at(best)]
    difference = paired(at_best, of_baseline)
    speeds = [r['tokens_per_sec'] for r in variant.records if r['tokens_per_sec']]
    gaps = sensitivity_gaps(variant, metric, initial)
    notes = _notes(variant, losses, initial, difference)
    if gaps and best is not None:
        notes.append(f'sensitivity is not given: {"; ".join(gaps)}')
    return Comparison(
        variant=variant,
        losses=losses,
        initial=initial,
        best_lr=best,
        loss=t_interval(at_best.values()),
        bits_per_byte=t_interval(x for x in per_byte if not math.isnan(x)),
        tokens_per_sec=float(np.mean(speeds)) if speeds else math.nan,
        sensitivity=math.nan if gaps else sensitivity(losses, initial),
        difference=difference,
        diverged=sum(map(has_diverged, variant.records)),
        notes=notes,
    )


def sensitivity_gaps(variant: Variant, metric: str, initial: float) -> list[str]:
    """Why there is no sensitivity yet: what is missing of the variant's grid of learning rates.

    A sweep ends with its largest rates, which are the worst: over a part of its grid a sensitivity
    would be too low. [] where every run of the grid has ended, or there is one rate only.
    """
    rates = sorted({record['lr'] for record in variant.records})
    if len(rates) < 2:
        return []
    if math.isnan(initial):
        return ['the loss at initialisation is not recorded']
    gaps = []
    for lr in rates:
        records = variant.at(lr)
        lacking = [r for r in records if math.isnan(final_loss(r, metric, initial))]
        for why, n in collections.Counter(LACKS.get(r['status'], WAITS) for r in lacking).items():
            share = '' if n == len(records) else f' for {n} of {len(records)} seeds'
            gaps.append(f'lr {number(lr)} {why}{share}')
    return gaps


def _notes(variant: Variant, losses: Losses, initial: float, difference: Interval) -> list[str]:
    """What a reader of the numbers must know about them."""
    best = best_lr(losses)
    if best is None:
        return ['no run has ended']
    notes, records = [], variant.at(best)
    diverged = sum(map(has_diverged, records))
    counted = 0 if math.isnan(initial) else diverged
    missing = len(records) - len(losses[best]) - (diverged - counted)
    if diverged:
        notes.append(
            f'{diverged} of {len(records)} diverged at its best learning rate; '
            + ('counted as' if counted else 'left out, as there is no record of')
            + ' the loss at initialisation'
        )
    if missing:
        notes.append(
            f'{missing} of {len(records)} at its best learning rate have not ended, failed, or '
            'cannot be read'
        )
    rates = sorted({record['lr'] for record in variant.records})
    if len(rates) > 1 and best in (rates[0], rates[-1]):
        notes.append(
            f'best at the {"lowest" if best == rates[0] else "highest"} learning rate tried'
        )
    if not variant.is_baseline and not difference.n:
        notes.append('no seed has ended here and in the baseline')
    return notes
