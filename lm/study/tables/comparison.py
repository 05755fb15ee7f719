"""Compares a sweep's variants: best learning rates, sensitivity, differences from the baseline.

Losses are in the unit of the metric: nats per token for `ce`. `lm.study.tables.variants` defines
which runs count. All statistics assume normal values, as Student's t does.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from lm.config.resolve import flatten
from lm.study.plan.settings import select_metric
from lm.study.statistics import (
    WITHIN_NOISE,
    Interval,
    classify_difference,
    holm_adjust,
    p_value,
    paired_interval,
    seeds_needed,
    t_interval,
)
from lm.study.tables.columns import columns
from lm.study.tables.results import UNREADABLE, Record
from lm.study.tables.text import format_number
from lm.study.tables.variants import (
    LR,
    SEEDS,
    Losses,
    Variant,
    has_diverged,
    initial_loss,
    loss_or_initial,
    losses_by_lr,
    split_variants,
)

# status: why a run that did not diverge has no final loss
MISSING_REASONS = {'done': 'has no final loss', 'failed': 'failed', UNREADABLE: 'cannot be read'}
WAITS = 'has not ended'
OTHER_GRID_NOTE = (
    "sensitivity is not comparable with the baseline's, which has other learning rates"
)


def best_lr(losses: Losses) -> float | None:
    """Returns the learning rate with the lowest mean over seeds; the smallest of equal rates."""
    means = {lr: np.mean(list(by_seed.values())) for lr, by_seed in losses.items() if by_seed}
    return min(sorted(means), key=means.__getitem__) if means else None


def sensitivity(losses: Losses, initial: float) -> float:
    """Returns the learning-rate sensitivity, E_lr[min(loss(lr), initial)] - min_lr loss(lr).

    The expectation is the mean over the swept learning rates, each averaged over its seeds first.
    For rates that are evenly spaced in log(lr) it is a mean over log(lr). Only variants swept over
    the same learning rates are comparable. The result is nan with fewer than two rates, or if
    `initial` is nan. From arXiv:2309.14322; its grid spans three decades.
    """
    capped = [np.minimum(list(by_seed.values()), initial) for by_seed in losses.values() if by_seed]
    if len(capped) < 2:
        return math.nan
    means = [losses_S.mean() for losses_S in capped]
    return float(np.mean(means) - min(means))


@dataclasses.dataclass(frozen=True)
class Comparison:
    """Results of a variant. `difference` is from the baseline, each at its own `best_lr`."""

    variant: Variant
    losses: Losses
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
    seeds_needed: int | None = None  # to detect an inconclusive difference
    chosen_records: Sequence[
        Record
    ] = ()  # the runs at its chosen values, where lr is not all that is

    @property
    def display_workdirs(self) -> list[str]:
        """Returns the workdirs at the best learning rate, or all workdirs until a run has ended."""
        if self.chosen_records:
            return [record['workdir'] for record in self.chosen_records]
        at_best = self.variant.records_at(self.best_lr) if self.best_lr is not None else None
        return [record['workdir'] for record in at_best or self.variant.records]


def compare(records: Sequence[Record], sweep: Mapping[str, Any]) -> list[Comparison]:
    """Compares each variant of the sweep with its baseline (`compare_variants`)."""
    return compare_variants(split_variants(records, sweep), select_metric(sweep['axes']))


def compare_rates(records: Sequence[Record], sweep: Mapping[str, Any]) -> list[Comparison]:
    """Compares each learning rate with the base's, or with the best rate if the base's was not
    swept.

    Returns [] if anything but learning rates and seeds was swept, or only one rate. The best rate
    is chosen on the same seeds that it is compared on, so no other rate can be better.
    """
    rates = sorted({record['lr'] for record in records})
    if set(sweep['axes']) - {LR, *SEEDS} or len(rates) < 2:
        return []
    (pooled,) = compare(records, sweep)
    base_lr = flatten(sweep['base']).get(LR)
    reference = base_lr if base_lr in rates else pooled.best_lr
    variants = [
        Variant(
            f'lr {format_number(lr)}',
            {columns()[LR]: lr},
            pooled.variant.records_at(lr),
            lr == reference,
        )
        for lr in rates
    ]
    return compare_variants(variants, select_metric(sweep['axes']))


def compare_variants(variants: Sequence[Variant], metric: str) -> list[Comparison]:
    """Compares each variant with the baseline among them.

    Verdicts are corrected for their number, with p-values that `holm_adjust` adjusts. Intervals are
    not. The learning rate is chosen on the seeds that are then compared. This favours variants with
    more learning rates and is not corrected; `describe_lr_choice` tells the reader.
    """
    initials = initial_losses(variants, metric)
    losses = [losses_by_lr(v, metric, l0) for v, l0 in zip(variants, initials, strict=True)]
    baseline_losses = next(
        (
            variant_losses
            for v, variant_losses in zip(variants, losses, strict=True)
            if v.is_baseline
        ),
        {},
    )
    comparisons = [
        _compare_variant(variant, variant_losses, initial, baseline_losses, metric)
        for variant, variant_losses, initial in zip(variants, losses, initials, strict=True)
    ]
    nothing = t_interval([])
    differences = [nothing if c.variant.is_baseline else c.difference for c in comparisons]
    adjusted = holm_adjust([p_value(difference) for difference in differences])
    verdicts = [
        classify_difference(d, p) if d.n else '' for d, p in zip(differences, adjusted, strict=True)
    ]
    undecided = verdicts.count(WITHIN_NOISE)
    baseline = next((c for c in comparisons if c.variant.is_baseline), None)
    for i, (c, p, verdict) in enumerate(zip(comparisons, adjusted, verdicts, strict=True)):
        mean, deviation = c.difference.mean, c.difference.std
        seeds = seeds_needed(mean, deviation, undecided) if verdict == WITHIN_NOISE else None
        # Sensitivities are means over a grid of learning rates, and compare over equal ones alone.
        is_other = baseline is not None and c.variant.rates != baseline.variant.rates
        is_other = is_other and not math.isnan(c.sensitivity + baseline.sensitivity)
        notes = [*c.notes, OTHER_GRID_NOTE] if is_other else c.notes
        comparisons[i] = dataclasses.replace(
            c, p=p, verdict=verdict, seeds_needed=seeds, notes=notes
        )
    return comparisons


def initial_losses(variants: Sequence[Variant], metric: str) -> list[float]:
    """Returns the loss of each variant at initialisation, in the unit of the metric.

    The unit differs from nats per token by a factor that is estimated from recorded losses.
    """
    initials = []
    # Of all runs, for variants without any. Read at most once: in a sweep that has just begun most
    # variants need it.
    of_all: float | None = None
    for variant in variants:
        initial = initial_loss(variant.records)
        if math.isnan(initial):
            if of_all is None:
                of_all = initial_loss(record for v in variants for record in v.records)
            initial = of_all
        if metric != 'ce':
            ratios = [r[metric] / r['ce'] for r in variant.records if r['ce'] and r[metric]]
            initial *= float(np.mean(ratios)) if ratios else math.nan
        initials.append(initial)
    return initials


def describe_lr_choice(
    comparisons: Sequence[Comparison], by_rate: Sequence[Comparison], base: Mapping[str, Any]
) -> str:
    """Returns a sentence on how learning rates were chosen for the verdicts; '' without a verdict.

    Args:
      comparisons: comparisons of the variants.
      by_rate: comparisons from `compare_rates`, or [].
      base: the config of the sweep.

    Returns:
      The sentence.
    """
    if not any(c.verdict for c in by_rate or comparisons):
        return ''
    if by_rate:
        baseline = next(c for c in by_rate if c.variant.is_baseline)
        if flatten(base).get(LR) in baseline.variant.rates:
            return 'The learning rates are compared as configured: no result chose one.'
        return (
            f'The same seeds chose {baseline.variant.name} as the best, so it looks better than it '
            'is, and the others worse; config.tune judges on fresh seeds.'
        )
    counts = sorted(len(c.variant.rates) for c in comparisons)
    if counts[-1] < 2:
        return (
            'Each variant has a single learning rate, which may suit some better than others; '
            'config.tune finds the best for each.'
        )
    text = (
        'The same seeds chose the learning rates, so each variant looks better than it is; '
        'config.tune tunes all with the same number of runs and judges on fresh seeds.'
    )
    if counts[0] < counts[-1]:
        text += (
            f' Variants have {counts[0]} to {counts[-1]} rates: those with more rates look better '
            'by chance.'
        )
    return text


def _compare_variant(
    variant: Variant, losses: Losses, initial: float, baseline: Losses, metric: str
) -> Comparison:
    """Returns the comparison of one variant, without verdict."""
    best = best_lr(losses)
    best_losses, baseline_losses = losses.get(best, {}), baseline.get(best_lr(baseline), {})
    difference = paired_interval(best_losses, baseline_losses)
    gaps = _sensitivity_gaps(variant, metric, initial)
    notes = _list_notes(variant, losses, initial, difference)
    if gaps and best is not None:
        notes.append(f'no sensitivity: {"; ".join(gaps)}')
    return Comparison(
        variant=variant,
        losses=losses,
        initial=initial,
        best_lr=best,
        loss=t_interval(best_losses.values()),
        sensitivity=math.nan if gaps else sensitivity(losses, initial),
        difference=difference,
        notes=notes,
        **summarize_runs(variant.records_at(best), variant.records),
    )


def summarize_runs(best_records: Sequence[Record], records: Sequence[Record]) -> dict[str, Any]:
    """Returns fields of a `Comparison` that summarize the best runs and all runs."""
    per_byte = [loss_or_initial(r, 'bits_per_byte', math.nan) for r in best_records]
    speeds = [r['tokens_per_sec'] for r in records if r['tokens_per_sec']]
    return {
        'bits_per_byte': t_interval(x for x in per_byte if not math.isnan(x)),
        'tokens_per_sec': float(np.mean(speeds)) if speeds else math.nan,
        'diverged': sum(map(has_diverged, records)),
    }


def _sensitivity_gaps(variant: Variant, metric: str, initial: float) -> list[str]:
    """Returns reasons why a variant has no sensitivity yet: unfinished parts of its learning-rate
    grid.

    A sweep ends with its largest rates, which are the worst, so a sensitivity over part of its grid
    would be too low. Returns [] if every run of the grid has ended, or if there is only one rate.
    """
    if len(variant.rates) < 2:
        return []
    if math.isnan(initial):
        return ['the loss at initialisation is not recorded']
    gaps = []
    for lr in variant.rates:
        records = variant.records_at(lr)
        incomplete = [r for r in records if math.isnan(loss_or_initial(r, metric, initial))]
        for reason, n in collections.Counter(
            MISSING_REASONS.get(r['status'], WAITS) for r in incomplete
        ).items():
            share = '' if n == len(records) else f' for {n} of {len(records)} seeds'
            gaps.append(f'lr {format_number(lr)} {reason}{share}')
    return gaps


def _list_notes(
    variant: Variant, losses: Losses, initial: float, difference: Interval
) -> list[str]:
    """Returns notes that a reader of the numbers needs."""
    best = best_lr(losses)
    if best is None:
        return ['no run has ended']
    notes, records, rates = [], variant.records_at(best), variant.rates
    diverged = sum(map(has_diverged, records))
    n_counted = 0 if math.isnan(initial) else diverged
    missing = len(records) - len(losses[best]) - (diverged - n_counted)
    if diverged:
        treatment = 'counted as' if n_counted else 'left out, as there is no record of'
        notes.append(
            f'{diverged} of {len(records)} diverged at its best learning rate; {treatment} the '
            'loss at initialisation'
        )
    if missing:
        notes.append(
            f'{missing} of {len(records)} at its best learning rate have not ended, failed, or '
            'cannot be read'
        )
    if len(rates) > 1 and best in (rates[0], rates[-1]):
        end = 'lowest' if best == rates[0] else 'highest'
        notes.append(f'best at the {end} learning rate tried')
    if not variant.is_baseline and not difference.n:
        notes.append('no seed has ended both here and in the baseline')
    return notes
