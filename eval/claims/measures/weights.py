"""Weights of several models made one or few, and weights that are left out."""

from collections.abc import Iterable, Iterator, Sequence

import numpy as np

from eval.claims.lab import measure
from eval.claims.measures.tiny import (
    TinyModel,
    draw_chains,
    draw_text,
    named_params,
    replace_params,
)
from eval.convert.means import compute_bases, compute_basis, merge_params, rebuild_params
from eval.convert.prune import prune_params

SEEDS, STARTS, HELD_OUT = 5, 10, 128
WORKERS, STAGES = 4, 4
DRAWN, MODELS, DIRECTIONS, NOISE = 4096, 6, 3, 0.1
BASE_STAGES, TUNED_STAGES = 8, 2
WANTED, BOTH, UNWANTED = (1.0, 0.0, 0.0, 0.0), (0.8, 0.2, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0)
SHARE = 0.1  # of the inputs of every output


@measure(
    *('variance_of_the_mean', 'variance_of_the_mean_rescaled'),
    *('steps_saved_from_different_starts', 'steps_saved_from_one_start'),
)
def merged_starts() -> Iterator[Iterable[float]]:
    """Returns what a mean of WORKERS models does to variances, and what it saves to keep these.

    variance_of_the_mean: of starts from different seeds, over theirs, mean over the matrices of a
    tiny model without norms. steps_saved: WORKERS such models train alone for STAGE steps, are
    merged, and go on from the result with their own moments, STAGES times. It is the share of the
    steps that the rescaled merge does not need for the loss that the plain one ends with; where it
    ends above, the share that the plain one does not need for its loss, negative. From different
    starts and from one (arXiv:2404.04616).
    """
    tiny = TinyModel({'model.norm': 'none'})
    yield from zip(*(_mean_variances(tiny, seed) for seed in range(STARTS)), strict=True)
    for apart in (1, 0):
        yield [steps_saved(*_merge_losses(tiny, seed, apart)) for seed in range(SEEDS)]


def _mean_variances(tiny: TinyModel, seed: int) -> list[float]:
    """Returns those of the plain and of the rescaled mean, over those of the starts."""
    starts = [named_params(tiny.init(WORKERS * seed + i)) for i in range(WORKERS)]
    matrices = [path for path, spec in tiny.specs.items() if spec.role != 'vector']
    found = []
    for keep in (None, 'variance'):
        merged = merge_params(tiny.specs, starts, keep)
        of_starts = {path: np.mean([np.var(one[path]) for one in starts]) for path in matrices}
        found.append(float(np.mean([np.var(merged[p]) / of_starts[p] for p in matrices])))
    return found


def _merge_losses(tiny: TinyModel, seed: int, apart: int) -> list[list[float]]:
    """Returns the losses behind each merge, and before the first stage, of plain and rescaled."""
    found = []
    for keep in (None, 'variance'):
        rng = np.random.default_rng(seed)  # both read the same
        chains = draw_chains(rng)
        held_out = draw_text(chains, HELD_OUT, rng)
        states = [tiny.init(WORKERS * seed + apart * i) for i in range(WORKERS)]
        losses = [tiny.compute_loss(named_params(states[0]), states[0], held_out)]
        for _ in range(STAGES):
            states = [tiny.train(state, chains, 1, rng) for state in states]
            params = merge_params(tiny.specs, [named_params(state) for state in states], keep)
            states = [replace_params(state, params) for state in states]
            losses.append(tiny.compute_loss(params, states[0], held_out))
        found.append(losses)
    return found


def steps_saved(plain: Sequence[float], rescaled: Sequence[float]) -> float:
    """Returns the share of steps that the better of two does not need for the other's last loss:
    positive where that is `kept`.
    """
    better, goal, sign = (
        (rescaled, plain[-1], 1) if rescaled[-1] <= plain[-1] else (plain, rescaled[-1], -1)
    )
    i = next(i for i, loss in enumerate(better) if loss <= goal)
    before = better[max(i - 1, 0)]
    place = i - (goal - better[i]) / (before - better[i]) if before > better[i] else i
    return float(sign * (1 - place / (len(plain) - 1)))


@measure(
    *('error_of_unrelated_differences', 'error_of_shared_differences'),
    'cost_over_that_of_the_mean',
)
def merged_models() -> Iterator[Iterable[float]]:
    """Returns what MODELS models lose in DIRECTIONS directions of what they differ by from a base.

    error_of_unrelated_differences: |lost| / |differences| of Gaussian vectors of DRAWN numbers,
    over sqrt(1 - p / n); error_of_shared_differences: as it is, of random sums of DIRECTIONS
    vectors with NOISE of their size. cost_over_that_of_the_mean: tiny models go on from one base on
    chains of their own, half of whose rows are not the base's; the loss that rebuilt models have
    above the tuned ones, over that of the mean of all, each on its own text (arXiv:2510.14163).
    """
    errors = (_basis_errors(np.random.default_rng(seed)) for seed in range(STARTS))
    yield from zip(*errors, strict=True)
    tiny = TinyModel({})
    yield [_cost_ratio(tiny, seed) for seed in range(SEEDS)]


def _basis_errors(rng: np.random.Generator) -> tuple[float, float]:
    unrelated = rng.standard_normal((MODELS, DRAWN))
    of_few = rng.standard_normal((MODELS, DIRECTIONS)) @ rng.standard_normal((DIRECTIONS, DRAWN))
    noise = NOISE * np.sqrt(DIRECTIONS) * rng.standard_normal((MODELS, DRAWN))

    def error(differences):
        basis = compute_basis(differences, DIRECTIONS)
        lost = basis.coefficients @ basis.directions - differences
        return float(np.linalg.norm(lost) / np.linalg.norm(differences))

    return error(unrelated) / np.sqrt(1 - DIRECTIONS / MODELS), error(of_few + noise)


def _cost_ratio(tiny: TinyModel, seed: int) -> float:
    rng = np.random.default_rng(seed)
    chains = draw_chains(rng)
    base = tiny.train(tiny.init(seed), chains, BASE_STAGES, rng)
    models, held_out = [], []
    for _ in range(MODELS):
        is_new = rng.random(chains.shape[:2]) < 0.5
        own = np.where(is_new[..., None], draw_chains(rng), chains)
        models.append(named_params(tiny.train(base, own, TUNED_STAGES, rng)))
        held_out.append(draw_text(own, HELD_OUT, rng))
    start = named_params(base)
    bases = compute_bases(tiny.specs, start, models, DIRECTIONS)
    ways = {
        'tuned': models,
        'rebuilt': [rebuild_params(start, bases, i) for i in range(MODELS)],
        'mean': [merge_params(tiny.specs, models, None)] * MODELS,
    }
    loss = {
        way: np.mean(
            [tiny.compute_loss(*both) for both in zip(each, [base] * MODELS, held_out, strict=True)]
        )
        for way, each in ways.items()
    }
    return float((loss['rebuilt'] - loss['tuned']) / (loss['mean'] - loss['tuned']))


@measure(
    *(f'loss_added_to_{which}_text' for which in ('wanted', 'unwanted')),
    'loss_added_to_wanted_text_above_random',
)
def pruned_by_text() -> Iterator[np.ndarray]:
    """Returns the losses that pruning adds to wanted and to unwanted text, in nats a token.

    A tiny model of wanted text, of the first mode, goes on with a fifth of unwanted text, of the
    second. Then SHARE of the inputs of every output of its blocks are removed: those whose scores
    are largest on unwanted text (arXiv:2408.09600), or as many at random. Over SEEDS.
    """
    tiny = TinyModel({})
    by_score_S2, at_random_S2 = np.swapaxes(
        [_added_losses(tiny, seed) for seed in range(SEEDS)], 0, 1
    )
    yield from by_score_S2.T
    yield by_score_S2[:, 0] - at_random_S2[:, 0]


def _added_losses(tiny: TinyModel, seed: int) -> list[np.ndarray]:
    """Returns what is added to (wanted, unwanted) text by scores, and at random."""
    rng = np.random.default_rng(seed)
    chains = draw_chains(rng)
    base = tiny.train(tiny.init(seed), chains, BASE_STAGES, rng, WANTED)
    tuned = tiny.train(base, chains, TUNED_STAGES, rng, BOTH)
    texts = [draw_text(chains, HELD_OUT, rng, shares) for shares in (WANTED, UNWANTED)]
    squares = tiny.compute_input_squares(tuned, draw_text(chains, HELD_OUT, rng, UNWANTED))
    params = named_params(tuned)
    before, found = [tiny.compute_loss(params, tuned, rows) for rows in texts], []
    for remove in ('important', 'random'):
        left = prune_params(tiny.specs, params, squares, remove, SHARE, rng).params
        after = [tiny.compute_loss(left, tuned, rows) for rows in texts]
        found.append(np.subtract(after, before))
    return found
