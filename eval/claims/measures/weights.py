"""Merged weights of several models, and pruned weights."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import NamedTuple

import numpy as np

from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from eval.claims.measures.tiny import (
    TinyModel,
    draw_chains,
    draw_text,
    named_params,
    replace_params,
)
from eval.convert.means import Flat, compute_bases, compute_basis, merge_params, rebuild_params
from eval.convert.prune import prune_params
from modules.params import ParamSpec, batch_axes

SEEDS, STARTS, HELD_OUT = 5, 10, 128
WORKERS, STAGES = 4, 4
DRAWN, MODELS, DIRECTIONS, NOISE = 4096, 6, 3, 0.1
BASE_STAGES, TUNED_STAGES = 8, 2
WANTED, BOTH, UNWANTED = (1.0, 0.0, 0.0, 0.0), (0.8, 0.2, 0.0, 0.0), (0.0, 1.0, 0.0, 0.0)
SHARE, HALF, PRUNED_SEEDS = 0.1, 0.5, 16  # shares of the inputs of every output

Specs = Mapping[str, ParamSpec]
Merge = Callable[[Specs, Sequence[Flat]], Flat]


@measure(
    *('variance_of_the_mean', 'steps_saved_from_different_starts', 'steps_saved_from_one_start'),
    *('variance_of_the_mean_from_one_start', 'steps_saved_without_merges'),
    'steps_saved_with_root_taken_twice',
)
def merged_starts() -> Iterator[Estimate | list[float]]:
    """Yields the variance left after averaging WORKERS models, and the steps saved by restoring it.

    WORKERS tiny models without norms train alone for STAGE steps, are merged, and continue from the
    merged weights with their own moments, STAGES times. variance_of_the_mean: variance of the plain
    mean at the first merge over the models' variance, mean over the matrices, from different
    initial weights. steps_saved: the share of the steps that the rescaled merge does not need for
    the final loss of the plain merge; if it ends higher, it is minus the share that the plain merge
    does not need. From different initial weights and from the same (arXiv:2404.04616).

    Then variance_of_the_mean from the same initial weights; and the steps saved, from different
    ones, by the first model if it is never merged, and by a merge that is rescaled by the root of
    the right factor. Over SEEDS.
    """
    tiny = TinyModel({'model.norm': 'none'})
    runs = {
        (name, apart): [_merge_stages(tiny, seed, apart, MERGES[name]) for seed in range(SEEDS)]
        for name, apart in (*((name, 1) for name in MERGES), ('plain', 0), ('rescaled', 0))
    }

    def variances(apart):
        return mean_over_seeds([run.variance for run in runs['plain', apart]], 'log')

    def compare(name, apart):
        pairs = zip(runs['plain', apart], runs[name, apart], strict=True)
        return [steps_saved(plain.losses, run.losses) for plain, run in pairs]

    yield variances(1)
    yield compare('rescaled', 1)
    yield compare('rescaled', 0)
    yield variances(0)
    yield compare('first', 1)
    yield compare('root', 1)


class MergedRun(NamedTuple):
    """Losses before the first stage and after each merge, and the variance at the first merge.

    variance: of the merged matrices over that of the models, mean over matrices.
    """

    losses: list[float]
    variance: float


def _merge_stages(tiny: TinyModel, seed: int, apart: int, merge: Merge) -> MergedRun:
    """Trains WORKERS models and merges them after each stage.

    Args:
      tiny: the model.
      seed: of the text and the initial weights.
      apart: 1 for different initial weights, 0 for the same.
      merge: one of MERGES.
    """
    rng = np.random.default_rng(seed)  # all merges read the same
    chains = draw_chains(rng)
    held_out = draw_text(chains, HELD_OUT, rng)
    states = [tiny.init(WORKERS * seed + apart * i) for i in range(WORKERS)]
    losses, variances = [tiny.compute_loss(named_params(states[0]), states[0], held_out)], []
    for _ in range(STAGES):
        states = [tiny.train(state, chains, 1, rng) for state in states]
        models = [named_params(state) for state in states]
        params = merge(tiny.specs, models)
        variances.append(_relative_variance(tiny.specs, params, models))
        states = [replace_params(state, params) for state in states]
        losses.append(tiny.compute_loss(params, states[0], held_out))
    return MergedRun(losses, variances[0])


def _relative_variance(specs: Specs, merged: Flat, models: Sequence[Flat]) -> float:
    """Returns the mean over matrices of the merged variance over the variance of the models."""
    matrices = [path for path, spec in specs.items() if spec.role != 'vector']
    return float(
        np.mean([np.var(merged[p]) / np.mean([np.var(m[p]) for m in models]) for p in matrices])
    )


def _rescale_by_root(specs: Specs, models: Sequence[Flat]) -> Flat:
    """Returns the mean of models with each matrix scaled by the root of the right factor."""
    plain, rescaled = (merge_params(specs, models, keep) for keep in (None, 'variance'))
    for path, spec in specs.items():
        if spec.role != 'vector':
            axes = tuple(range(len(batch_axes(spec)), plain[path].ndim))
            factor = np.std(rescaled[path], axes, keepdims=True) / np.std(
                plain[path], axes, keepdims=True
            )
            centre = np.mean(plain[path], axes, keepdims=True)
            plain[path] = centre + np.sqrt(factor) * (plain[path] - centre)
    return plain


MERGES: Mapping[str, Merge] = {
    'plain': lambda specs, models: merge_params(specs, models, None),
    'rescaled': lambda specs, models: merge_params(specs, models, 'variance'),
    'first': lambda specs, models: models[0],
    'root': _rescale_by_root,
}


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
    'cost_over_that_of_the_mean',
    *('error_of_unrelated_differences', 'error_of_shared_differences', 'cost_of_one_direction'),
    'cost_of_centred_differences',
)
def merged_models() -> Iterator[Estimate]:
    """Yields the error of representing MODELS models by DIRECTIONS directions from a base.

    cost_over_that_of_the_mean: tiny models continue from a base on separate chains; half of the
    chains differ from the base's. The value is the loss that rebuilt models add to the tuned
    models, over the loss that the mean of all adds, each on the model's text (arXiv:2510.14163).

    Then error_of_unrelated_differences: |lost| / |differences| for Gaussian vectors of DRAWN
    numbers, over sqrt(1 - p / n); error_of_shared_differences: the same without the divisor, for
    random sums of DIRECTIONS vectors with relative NOISE; the cost of a single direction; and the
    cost of directions of the differences from the mean of all, added to the base.
    """
    tiny = TinyModel({})
    costs = [_cost_ratios(tiny, seed) for seed in range(SEEDS)]
    errors = [_basis_errors(np.random.default_rng(seed)) for seed in range(STARTS)]
    rebuilt, one_direction, centred = zip(*costs, strict=True)
    for values in (rebuilt, *zip(*errors, strict=True), one_direction, centred):
        yield mean_over_seeds(values, 'log')


def _basis_errors(rng: np.random.Generator) -> tuple[float, float]:
    unrelated = rng.standard_normal((MODELS, DRAWN))
    shared = rng.standard_normal((MODELS, DIRECTIONS)) @ rng.standard_normal((DIRECTIONS, DRAWN))
    noise = NOISE * np.sqrt(DIRECTIONS) * rng.standard_normal((MODELS, DRAWN))

    def error(differences):
        basis = compute_basis(differences, DIRECTIONS)
        residual = basis.coefficients @ basis.directions - differences
        return float(np.linalg.norm(residual) / np.linalg.norm(differences))

    return error(unrelated) / np.sqrt(1 - DIRECTIONS / MODELS), error(shared + noise)


def _cost_ratios(tiny: TinyModel, seed: int) -> list[float]:
    """Returns the costs of rebuilt models: as published, of one direction, and centred."""
    rng = np.random.default_rng(seed)
    chains = draw_chains(rng)
    base = tiny.train(tiny.init(seed), chains, BASE_STAGES, rng)
    models, held_out = [], []
    for _ in range(MODELS):
        is_new = rng.random(chains.shape[:2]) < 0.5
        own_chains = np.where(is_new[..., None], draw_chains(rng), chains)
        models.append(named_params(tiny.train(base, own_chains, TUNED_STAGES, rng)))
        held_out.append(draw_text(own_chains, HELD_OUT, rng))
    start, mean = named_params(base), merge_params(tiny.specs, models, None)

    def rebuild(origin, p):
        bases = compute_bases(tiny.specs, origin, models, p)
        return [rebuild_params(start, bases, i) for i in range(MODELS)]

    def loss(models):
        pairs = zip(models, held_out, strict=True)
        return np.mean([tiny.compute_loss(params, base, rows) for params, rows in pairs])

    tuned, merged = loss(models), loss([mean] * MODELS)
    return [
        float((loss(rebuild(origin, p)) - tuned) / (merged - tuned))
        for origin, p in ((start, DIRECTIONS), (start, 1), (mean, DIRECTIONS))
    ]


@measure(
    *(f'loss_added_to_{which}_text' for which in ('wanted', 'unwanted')),
    'loss_added_to_wanted_text_above_random',
    'loss_added_to_unwanted_text_by_half_at_random',
    'loss_added_to_wanted_text_by_smallest_scores_above_random',
    'loss_added_to_unwanted_text_by_magnitude',
)
def pruned_by_text() -> Iterator[np.ndarray]:
    """Yields the loss that pruning adds to wanted and to unwanted text, in nats per token.

    A tiny model of wanted text, of the first mode, continues with a fifth of unwanted text, of the
    second. Then SHARE of the inputs of every output of its blocks are removed, by the largest
    scores on unwanted text (arXiv:2408.09600) or at random; HALF at random; SHARE by the smallest
    scores; and SHARE by the largest magnitudes, which are the scores without the inputs' size. Over
    PRUNED_SEEDS.
    """
    tiny = TinyModel({})
    by_score_S2, at_random_S2, half_S2, smallest_S2, by_magnitude_S2 = np.swapaxes(
        [_added_losses(tiny, seed) for seed in range(PRUNED_SEEDS)], 0, 1
    )
    yield from by_score_S2.T
    yield by_score_S2[:, 0] - at_random_S2[:, 0]
    yield half_S2[:, 1]
    yield smallest_S2[:, 0] - at_random_S2[:, 0]
    yield by_magnitude_S2[:, 1]


def _added_losses(tiny: TinyModel, seed: int) -> list[np.ndarray]:
    """Returns the loss added to (wanted, unwanted) text, by the removals of `pruned_by_text`."""
    rng = np.random.default_rng(seed)
    chains = draw_chains(rng)
    base = tiny.train(tiny.init(seed), chains, BASE_STAGES, rng, WANTED)
    tuned = tiny.train(base, chains, TUNED_STAGES, rng, BOTH)
    texts = [draw_text(chains, HELD_OUT, rng, shares) for shares in (WANTED, UNWANTED)]
    squares = tiny.compute_input_squares(tuned, draw_text(chains, HELD_OUT, rng, UNWANTED))
    sizes_of_1 = {path: np.ones_like(square) for path, square in squares.items()}
    removals = (
        *(('important', squares, SHARE), ('random', squares, SHARE), ('random', squares, HALF)),
        *(('unimportant', squares, SHARE), ('important', sizes_of_1, SHARE)),
    )
    params = named_params(tuned)
    before, added = [tiny.compute_loss(params, tuned, rows) for rows in texts], []
    for remove, inputs, share in removals:
        pruned = prune_params(tiny.specs, params, inputs, remove, share, rng).params
        after = [tiny.compute_loss(pruned, tuned, rows) for rows in texts]
        added.append(np.subtract(after, before))
    return added
