"""Calibration of the next token's probabilities on the validation split."""

import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from eval.load import Checkpoint
from eval.suites.base import SuiteResult, Table
from eval.suites.calibration_errors import (
    Bins,
    bin_events,
    bootstrap_interval,
    correctness_losses,
    debiased_error,
    equal_mass,
    equal_width,
    expected_error,
    h_error,
    solve_temperature,
)
from eval.suites.calibrators import CALIBRATORS, make_events
from eval.suites.reading import TargetRow, validation_rows
from lm.inference.scoring import Scorer
from modules.options import Option

# Inverse temperatures at which slopes of the loss are measured: factors of 2^(1/4) apart.
BETAS = 2.0 ** (np.arange(-8, 9) / 4)


def calibration(
    checkpoint: Checkpoint,
    *,
    bins: Annotated[int, Option('number of probability bins', 1, 10_000)] = 15,
    candidates: Annotated[
        int, Option('most likely tokens per position that h_error counts', 1)
    ] = 10,
    classes: Annotated[int, Option('most frequent tokens that ece_classwise averages', 1)] = 16,
    tokens: Annotated[int, Option('approximate number of validation tokens; 0: all', 0)] = 200_000,
    resamples: Annotated[int, Option('bootstrap resamples', 1)] = 1000,
    calibrator: Annotated[
        str, Option('map to fit besides the temperature', choices=('none', *CALIBRATORS))
    ] = 'none',
) -> SuiteResult:
    """Compares probabilities with how often tokens are correct.

    The event is that the most likely token comes next, unless a number says otherwise. ece has bins
    of equal width; ece_adaptive and the debiased l2_debiased have bins of equal mass. Intervals
    (_low, _high) are at 95%, from a bootstrap over documents. temperature is fitted on half of the
    documents. The held_out_ numbers come from the other half, before and after scaling (_scaled). A
    `calibrator` is fitted and evaluated in the same way (_calibrated). Its events are the
    `candidates` and all other tokens together. Tokens of all sources of a mixture have equal
    weight.

    Args:
      checkpoint: a loaded checkpoint.
      bins: number of probability bins.
      candidates: most likely tokens per position in h_error.
      classes: most frequent tokens in ece_classwise.
      tokens: approximate number of validation tokens to read; 0: all.
      resamples: of the bootstrap.
      calibrator: a row of CALIBRATORS, or 'none'.
    """
    rows = validation_rows(checkpoint, tokens)
    unit = bootstrap_units(rows)
    # By documents, as tokens of a document are not independent of each other.
    is_fitted = split_halves(unit)
    frequent = frequent_tokens(rows, classes)
    top = min(candidates, checkpoint.learner.model.vocab_size)
    temperature = fit_temperature(checkpoint, rows, is_fitted)
    statistic = functools.partial(token_statistics, frequent, top, 1 / temperature)
    scores = score_targets(Scorer(checkpoint, statistic), rows)
    events = Events(scores['confidence'], scores['correct'], unit)
    scaled = Events(scores['scaled_confidence'], scores['correct'], unit).where(~is_fitted)
    widths = equal_width(bins)
    plain, balanced = correctness_losses(events.p, events.o)
    numbers = {
        'tokens': len(unit),
        'units': unit.max() + 1,
        'accuracy': events.o.mean(),
        'confidence': events.p.mean(dtype=np.float64),
        'nll': scores['nll'].mean(dtype=np.float64),
        'brier': scores['brier'].mean(dtype=np.float64),
        **compute_intervals(events, bin_classes(scores, frequent, unit, widths), bins, resamples),
        'h_error': h_error(scores['top'].ravel(), scores['is_next'].ravel()),
        'correctness_loss': plain,
        'correctness_balanced': balanced,
        'temperature': temperature,
        'held_out_tokens': (~is_fitted).sum(),
        'held_out_nll': scores['nll'][~is_fitted].mean(dtype=np.float64),
        'held_out_nll_scaled': scores['scaled_nll'][~is_fitted].mean(dtype=np.float64),
        'held_out_ece': expected_error(bin_events(*events.where(~is_fitted), widths).total),
        'held_out_ece_scaled': expected_error(bin_events(*scaled, widths).total),
    }
    diagram = {'all tokens': events, f'held-out half, T = {temperature:.3f}': scaled}
    if calibrator != 'none':
        calibrated = calibrate_events(calibrator, scores, unit, is_fitted)
        numbers['held_out_ece_calibrated'] = expected_error(bin_events(*calibrated, widths).total)
        diagram[f'held-out half, {calibrator}'] = calibrated
    return SuiteResult(
        {name: float(value) for name, value in numbers.items() if np.isfinite(value)},
        row_items(rows, scores),
        {'Reliability': reliability_table(diagram, widths)},
    )


class Events(NamedTuple):
    """Probabilities, whether each event happened, and its unit of the bootstrap, [M] each."""

    p: np.ndarray
    o: np.ndarray
    unit: np.ndarray

    def where(self, chosen: np.ndarray) -> 'Events':
        return Events(*(values[chosen] for values in self))


def calibrate_events(
    calibrator: str, scores: dict[str, np.ndarray], unit: np.ndarray, is_fitted: np.ndarray
) -> Events:
    """Returns the events that the likeliest token comes next, with calibrated probabilities.

    Args:
      calibrator: a row of CALIBRATORS, fitted on the targets of `is_fitted`.
      scores: of all targets, by name.
      unit: of the bootstrap, of each target.
      is_fitted: whether a target is in the first half; the events are of the second half.
    """
    log_p_ME, place_M = make_events(scores['top'], scores['is_next'])
    to_calibrated = CALIBRATORS[calibrator].fit(log_p_ME[is_fitted], place_M[is_fitted])
    confidence = to_calibrated(log_p_ME[~is_fitted])[:, 0]
    return Events(confidence, scores['correct'][~is_fitted], unit[~is_fitted])


def compute_intervals(events: Events, classes: Bins, bins: int, resamples: int) -> dict[str, float]:
    """Returns each binned error with the ends of its interval, by name.

    Args:
      events: of the likeliest tokens.
      classes: bins of ece_classwise.
      bins: number of bins.
      resamples: of the bootstrap.
    """
    widths = bin_events(*events, equal_width(bins))
    masses = bin_events(*events, equal_mass(events.p, bins))
    errors = {
        'ece': (expected_error, widths),
        'ece_adaptive': (expected_error, masses),
        'l2_debiased': (debiased_error, masses),
        'ece_classwise': (expected_error, classes),
    }
    numbers = {}
    for name, (error, sums) in errors.items():
        value, low, high = bootstrap_interval(error, sums, resamples)
        numbers |= {name: value, f'{name}_low': low, f'{name}_high': high}
    return numbers


def bin_classes(
    scores: dict[str, np.ndarray], classes: np.ndarray, unit: np.ndarray, edges: np.ndarray
) -> Bins:
    """Returns the bins of all classes as bins of a single class; its error is the classes' mean.

    The event of a class is that its token comes next.

    Args:
      scores: of all targets, by name.
      classes: tokens.
      unit: of the bootstrap, of each target.
      edges: between bins.
    """
    class_bins = [
        bin_events(scores['of_classes'][:, i], scores['next'] == token, unit, edges)
        for i, token in enumerate(classes)
    ]
    return Bins(*(np.concatenate(sums, -1) for sums in zip(*class_bins, strict=True)))


def bootstrap_units(rows: Sequence[TargetRow]) -> np.ndarray:
    """Returns the number of the document of each target, or of its row for a single document.

    Raises ValueError if there is also a single row: both halves need a unit.
    """
    document = np.concatenate([row.document[row.is_target] for row in rows])
    row_number = np.repeat(np.arange(len(rows)), [row.is_target.sum() for row in rows])
    for number in (document, row_number):
        values, unit = np.unique(number, return_inverse=True)
        if len(values) > 1:
            return unit
    raise ValueError(
        'calibration needs at least two documents or rows of validation text; got one. Raise '
        '--calibration.tokens, or train with a larger data.validation_fraction.'
    )


def split_halves(unit: np.ndarray) -> np.ndarray:
    """Returns whether each target is in the first of two halves, which share no unit.

    Units are assigned in order to the half with fewer targets so far.
    """
    filled, is_first = [0, 0], []
    for size in np.bincount(unit).tolist():
        smaller = int(filled[1] < filled[0])
        filled[smaller] += size
        is_first.append(smaller == 0)
    return np.array(is_first)[unit]


def frequent_tokens(rows: Sequence[TargetRow], max_tokens: int) -> np.ndarray:
    """Returns the most frequent targets, at most `max_tokens` of them."""
    targets = np.concatenate([row.tokens[1:][row.is_target] for row in rows])
    values, counts = np.unique(targets, return_counts=True)
    return values[np.argsort(-counts, kind='stable')[:max_tokens]].astype(np.int32)


def score_targets(scorer: Scorer, rows: Sequence[TargetRow]) -> dict[str, np.ndarray]:
    """Returns the scores of all targets, [M, ...] by name, in the order of the rows."""
    row_scores = scorer([row.tokens for row in rows])  # ty: ignore[invalid-argument-type]  arrays
    return {
        name: np.concatenate(
            [scores[name][row.is_target] for scores, row in zip(row_scores, rows, strict=True)]
        )
        for name in row_scores[0]
    }


def fit_temperature(
    checkpoint: Checkpoint, rows: Sequence[TargetRow], is_fitted: np.ndarray
) -> float:
    """Returns the temperature that minimises the mean loss over some targets.

    Args:
      checkpoint: a loaded checkpoint.
      rows: of the validation split.
      is_fitted: whether each target is among these.
    """
    scorer = Scorer(checkpoint, functools.partial(compute_slopes, BETAS))
    derivatives = score_targets(scorer, list(select_targets(rows, is_fitted)))
    slopes, curvatures = (derivatives[name].mean(0, np.float64) for name in ('slope', 'curvature'))
    return solve_temperature(BETAS, slopes, curvatures)


def select_targets(rows: Sequence[TargetRow], chosen: np.ndarray) -> Iterator[TargetRow]:
    """Yields the rows with chosen targets, limited to these. chosen: mask of all targets, [M]."""
    edges = np.cumsum([row.is_target.sum() for row in rows])[:-1]
    for row, chosen_in_row in zip(rows, np.split(chosen, edges), strict=True):
        if chosen_in_row.any():
            is_target = row.is_target.copy()
            is_target[is_target] = chosen_in_row
            yield row._replace(is_target=is_target)


def compute_slopes(
    betas: np.ndarray, logits_BCV: jax.Array, next_BC: jax.Array
) -> dict[str, jax.Array]:
    """Returns {'slope', 'curvature'} [B, C, K] of each token's loss of logits beta z, in beta.

    Args:
      betas: K inverse temperatures.
      logits_BCV: z.
      next_BC: the true tokens.
    """
    true_BC1 = jnp.take_along_axis(logits_BCV, next_BC[..., None], -1)
    centred_BCV = logits_BCV - true_BC1

    def derivatives_at(beta):
        p_BCV = jax.nn.softmax(beta * logits_BCV)
        mean_BC = jnp.sum(p_BCV * centred_BCV, -1)
        return mean_BC, jnp.sum(p_BCV * (centred_BCV - mean_BC[..., None]) ** 2, -1)

    slope_KBC, curvature_KBC = jax.lax.map(derivatives_at, jnp.asarray(betas, jnp.float32))
    return {
        'slope': jnp.moveaxis(slope_KBC, 0, -1),
        'curvature': jnp.moveaxis(curvature_KBC, 0, -1),
    }


def token_statistics(
    classes: np.ndarray, top: int, beta: float, logits_BCV: jax.Array, next_BC: jax.Array
) -> dict[str, jax.Array]:
    """Returns the statistics of the probabilities at each place, [B, C, ...], by name.

    nll, brier and confidence also have the prefix scaled_, for logits beta z.

    Args:
      classes: tokens with probabilities in `of_classes`.
      top: number of the likeliest tokens, with probabilities in `top`.
      beta: inverse temperature.
      logits_BCV: z.
      next_BC: the true tokens.
    """
    statistics = {}
    for prefix, scale in (('', 1.0), ('scaled_', beta)):
        z_BCV = scale * logits_BCV
        true_BC = jnp.take_along_axis(z_BCV, next_BC[..., None], -1)[..., 0]
        log_z_BC = jax.nn.logsumexp(z_BCV, -1)
        squares_BC = jnp.exp(jax.nn.logsumexp(2 * z_BCV, -1) - 2 * log_z_BC)
        statistics[f'{prefix}nll'] = log_z_BC - true_BC
        statistics[f'{prefix}brier'] = squares_BC - 2 * jnp.exp(true_BC - log_z_BC) + 1
        statistics[f'{prefix}confidence'] = jnp.exp(jnp.max(z_BCV, -1) - log_z_BC)
    log_p_BCV = jax.nn.log_softmax(logits_BCV)
    log_top_BCK, tokens_BCK = jax.lax.top_k(log_p_BCV, top)
    is_next_BCK = tokens_BCK == next_BC[..., None]
    return statistics | {
        'correct': is_next_BCK[..., 0],
        'next': next_BC,
        'top': jnp.exp(log_top_BCK),
        'is_next': is_next_BCK,
        'of_classes': jnp.exp(log_p_BCV[..., classes]),
    }


def row_items(rows: Sequence[TargetRow], scores: dict[str, np.ndarray]) -> dict[str, list]:
    """Returns the sums over the targets of each row, as columns."""
    starts = np.cumsum([0, *(row.is_target.sum() for row in rows)])
    sizes = np.diff(starts)
    nonempty = np.flatnonzero(sizes)
    columns = {'item': [f'row {i}' for i in nonempty], 'tokens': sizes[nonempty].tolist()}
    for name in ('nll', 'correct', 'confidence'):
        sums = np.concatenate([[0.0], np.cumsum(scores[name], dtype=np.float64)])
        columns[name] = np.diff(sums[starts])[nonempty].tolist()
    return columns


def reliability_table(series: dict[str, Events], edges: np.ndarray) -> Table:
    """Returns the mean confidence and accuracy of each nonempty bin of each series."""
    columns = {'tokens of': [], 'confidence': [], 'accuracy': [], 'tokens': []}
    for name, events in series.items():
        bins = bin_events(*events, edges).total
        is_filled = bins.count > 0
        columns['tokens of'] += [name] * int(is_filled.sum())
        columns['confidence'] += (bins.p[is_filled] / bins.count[is_filled]).tolist()
        columns['accuracy'] += (bins.o[is_filled] / bins.count[is_filled]).tolist()
        columns['tokens'] += bins.count[is_filled].astype(int).tolist()
    return Table(columns, x='confidence', y='accuracy', by='tokens of')
