"""Merged weights of several models, and pruned weights."""

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
    """Yields variances after averaging WORKERS models, and the steps saved by restoring them.

    variance_of_the_mean: variance of the mean of models with different seeds over the models'
    variance, mean over the matrices of a tiny model without norms. steps_saved: WORKERS such models
    train alone for STAGE steps, are merged, and continue from the merged weights with their own
    moments, STAGES times. It is the share of the steps that the rescaled merge does not need for
    the final loss of the plain merge; if it ends higher, it is minus the share that the plain merge
    does not need. From different initial weights and from the same (arXiv:2404.04616).
    """
    tiny = TinyModel({'model.norm': 'none'})
    yield from zip(*(_mean_variances(tiny, seed) for seed in range(STARTS)), strict=True)
    for apart in (1, 0):
        yield [steps_saved(*_merge_losses(tiny, seed, apart)) for seed in range(SEEDS)]


def _mean_variances(tiny: TinyModel, seed: int) -> list[float]:
    """Returns the variances of the plain and of the rescaled mean over the models' variances."""
    starts = [named_params(tiny.init(WORKERS * seed + i)) for i in range(WORKERS)]
    matrices = [path for path, spec in tiny.specs.items() if spec.role != 'vector']
    ratios = []
    for keep in (None, 'variance'):
        merged = merge_params(tiny.specs, starts, keep)
        start_variance = {
            path: np.mean([np.var(start[path]) for start in starts]) for path in matrices
        }
        ratios.append(float(np.mean([np.var(merged[p]) / start_variance[p] for p in matrices])))
    return ratios


def _merge_losses(tiny: TinyModel, seed: int, apart: int) -> list[list[float]]:
    """Returns losses before the first stage and after each merge, for plain and rescaled merges."""
    curves = []
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
        curves.append(losses)
    return curves


def steps_saved(plain: Sequence[float], rescaled: Sequence[float]) -> float:
    """Returns the share of steps that the better curve does not need for the other's last loss.

    It is positive if the better curve is `rescaled`, else negative.
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
    """Yields the error of representing MODELS models by DIRECTIONS directions from a base.

    error_of_unrelated_differences: |lost| / |differences| for Gaussian vectors of DRAWN numbers,
    over sqrt(1 - p / n). error_of_shared_differences: the same without the divisor, for random sums
    of DIRECTIONS vectors with relative NOISE. cost_over_that_of_the_mean: tiny models continue from
    a base on separate chains; half of the chains differ from the base's. The value is the loss that
    rebuilt models add to the tuned models, over the loss that the mean of all adds, each on the
    model's text (arXiv:2510.14163).
    """
    errors = (_basis_errors(np.random.default_rng(seed)) for seed in range(STARTS))
    yield from zip(*errors, strict=True)
    tiny = TinyModel({})
    yield [_cost_ratio(tiny, seed) for seed in range(SEEDS)]


def _basis_errors(rng: np.random.Generator) -> tuple[float, float]:
    unrelated = rng.standard_normal((MODELS, DRAWN))
    shared = rng.standard_normal((MODELS, DIRECTIONS)) @ rng.standard_normal((DIRECTIONS, DRAWN))
    noise = NOISE * np.sqrt(DIRECTIONS) * rng.standard_normal((MODELS, DRAWN))

    def error(differences):
        basis = compute_basis(differences, DIRECTIONS)
        residual = basis.coefficients @ basis.directions - differences
        return float(np.linalg.norm(residual) / np.linalg.norm(differences))

    return error(unrelated) / np.sqrt(1 - DIRECTIONS / MODELS), error(shared + noise)


def _cost_ratio(tiny: TinyModel, seed: int) -> float:
    rng = np.random.default_rng(seed)
    chains = draw_chains(rng)
    base = tiny.train(tiny.init(seed), chains, BASE_STAGES, rng)
    models, held_out = [], []
    for _ in range(MODELS):
        is_new = rng.random(chains.shape[:2]) < 0.5
        own_chains = np.where(is_new[..., None], draw_chains(rng), chains)
        models.append(named_params(tiny.train(base, own_chains, TUNED_STAGES, rng)))
        held_out.append(draw_text(own_chains, HELD_OUT, rng))
    start = named_params(base)
    bases = compute_bases(tiny.specs, start, models, DIRECTIONS)
    by_method = {
        'tuned': models,
        'rebuilt': [rebuild_params(start, bases, i) for i in range(MODELS)],
        'mean': [merge_params(tiny.specs, models, None)] * MODELS,
    }
    loss = {
        method: np.mean(
            [
                tiny.compute_loss(*arguments)
                for arguments in zip(models_of_method, [base] * MODELS, held_out, strict=True)
            ]
        )
        for method, models_of_method in by_method.items()
    }
    return float((loss['rebuilt'] - loss['tuned']) / (loss['mean'] - loss['tuned']))


@measure(
    *(f'loss_added_to_{which}_text' for which in ('wanted', 'unwanted')),
    'loss_added_to_wanted_text_above_random',
)
def pruned_by_text() -> Iterator[np.ndarray]:
    """Yields the loss that pruning adds to wanted and to unwanted text, in nats per token.

    A tiny model of wanted text, of the first mode, continues with a fifth of unwanted text, of the
    second. Then SHARE of the inputs of every output of its blocks are removed, by the largest
    scores on unwanted text (arXiv:2408.09600) or at random. Over SEEDS.
    """
    tiny = TinyModel({})
    by_score_S2, at_random_S2 = np.swapaxes(
        [_added_losses(tiny, seed) for seed in range(SEEDS)], 0, 1
    )
    yield from by_score_S2.T
    yield by_score_S2[:, 0] - at_random_S2[:, 0]


def _added_losses(tiny: TinyModel, seed: int) -> list[np.ndarray]:
    """Returns the loss added to (wanted, unwanted) text by scores, and at random."""
    rng = np.random.default_rng(seed)
    chains = draw_chains(rng)
    base = tiny.train(tiny.init(seed), chains, BASE_STAGES, rng, WANTED)
    tuned = tiny.train(base, chains, TUNED_STAGES, rng, BOTH)
    texts = [draw_text(chains, HELD_OUT, rng, shares) for shares in (WANTED, UNWANTED)]
    squares = tiny.compute_input_squares(tuned, draw_text(chains, HELD_OUT, rng, UNWANTED))
    params = named_params(tuned)
    before, added = [tiny.compute_loss(params, tuned, rows) for rows in texts], []
    for remove in ('important', 'random'):
        pruned = prune_params(tiny.specs, params, squares, remove, SHARE, rng).params
        after = [tiny.compute_loss(pruned, tuned, rows) for rows in texts]
        added.append(np.subtract(after, before))
    return added
