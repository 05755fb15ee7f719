"""Steps of a small model up to the radius of convergence of its cross-entropy, and beyond it."""

from collections.abc import Callable, Iterator
from typing import NamedTuple, cast

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from lm.training.state import Hyper, Learner, State, init_state
from lm.training.step import (
    Batch,
    batch_functions,
    make_train_step,
    split_microbatches,
    target_weights,
)
from modules.optim.stages import measure_ghost_radius

VOCAB, BOS, ROWS, LENGTH = 64, 0, 16, 32
LIKELY = 0.8  # share of the tokens that are the one successor of the token before
CHECKPOINTS, SEEDS = (10, 20, 40, 160), 5
BELOW_1 = (0.25, 0.5, 0.75, 0.95)
LENGTHS_R = (*BELOW_1, *2 ** (np.arange(29) / 4))  # in radii
FAR = 16.0  # radii, one of LENGTHS_R
TOLERATED = 0.05  # share of the accuracy that may be lost
SPIKE = 1e4  # times the learning rate
RADIUS = {'clipping': 1e30, 'the_controller': 1.0}  # of optim.ghost_radius; both clip gradients
LIMITS = (*RADIUS, 'a_limited_deviation')
CHANGES = {
    'model.n_layers': 2,
    'model.scan_layers': True,
    'kernels.attention': 'reference',
    'train.steps': 10_000,  # the rate stays near its peak
}


class Model(NamedTuple):
    """A learner, its traced options, and its programs, each compiled once."""

    learner: Learner
    hyper: Hyper
    step: Callable  # (state, batch, hyper) -> (state, metrics)
    gradient: Callable  # (state, batch) -> like the parameters
    radius: Callable  # (state, direction, batch) -> r of the whole direction
    deviation: Callable  # likewise, with the standard deviation in place of the range, mistakenly
    accuracy: Callable  # (state, params, batch) -> share of the tokens that are the likeliest

    @classmethod
    def build(cls) -> 'Model':
        changes = CHANGES | {'optim.ghost_radius': RADIUS['clipping']}
        learner, hyper = lab.build_small_learner(changes, VOCAB, BOS)

        def build_functions(state, batch):
            total = jnp.sum(target_weights(batch, learner.bos_id))
            return batch_functions(learner, state, hyper, split_microbatches(batch, 1), total)

        def logits(state, params, batch):
            variables = learner.variables(state.weights.replace(params=params))
            return cast(jax.Array, learner.model.apply(variables, batch['tokens'][:, :-1]))

        def accuracy(state, params, batch):
            return jnp.mean(jnp.argmax(logits(state, params, batch), -1) == batch['tokens'][:, 1:])

        def deviation(state, direction, batch):
            _, a_BTV = jax.jvp(
                lambda params: logits(state, params, batch), (state.params,), (direction,)
            )
            return jnp.max(jnp.std(a_BTV, -1)) / jnp.pi

        return cls(
            learner,
            hyper,
            jax.jit(make_train_step(learner)),
            jax.jit(
                lambda state, batch: jax.grad(build_functions(state, batch).value_fn)(state.params)
            ),
            jax.jit(
                lambda state, u, batch: measure_ghost_radius(
                    build_functions(state, batch), state.params, u
                )
            ),
            jax.jit(deviation),
            jax.jit(accuracy),
        )


@jax.jit
def draw_text(key: jax.Array, successors_V: jax.Array) -> Batch:
    """Draws a batch of a chain with a likely successor for each token."""
    first_key, likely_key, noise_key = jax.random.split(key, 3)

    def step(token_B, draws):
        likely_B, noise_B = draws
        return jnp.where(likely_B, successors_V[token_B], noise_B), token_B

    likely = jax.random.bernoulli(likely_key, LIKELY, (LENGTH + 1, ROWS))
    noise = jax.random.randint(noise_key, (LENGTH + 1, ROWS), 1, VOCAB)
    start = jax.random.randint(first_key, (ROWS,), 1, VOCAB)
    tokens = jax.lax.scan(step, start, (likely, noise))[1].T
    return {'tokens': tokens, 'segments': jnp.ones_like(tokens)}


@measure(
    'largest_share_of_accuracy_lost_below_1',
    'median_r_at_which_accuracy_falls',
    'deviation_of_log_r_over_that_of_log_length',
    'median_share_of_accuracy_lost_far_beyond_1',
    *(f'accuracy_kept_over_a_spike_with_{limit}' for limit in LIMITS),
)
def steps_around_the_radius() -> Iterator[Estimate]:
    """Yields the accuracy lost by a step of r radii.

    At r = 1 the series of the cross-entropy along the step stops converging (arXiv:2603.13552;
    `modules.optim.stages.measure_ghost_radius`).

    A model of two layers is trained on chains of tokens. At CHECKPOINTS it takes a step of each of
    LENGTHS_R along the negative gradient, along the update of its optimizer and along a random
    direction. Of these twelve curves: the largest share of the batch accuracy that is lost below 1;
    the median of the first r at which more than TOLERATED is lost; the deviation of log r there
    over the deviation of the log step length; and the median share that is lost by FAR radii.

    Then the share of accuracy that is left after an update with SPIKE times the learning rate: with
    gradient clipping, with optim.ghost_radius=1 in addition, and with the same limit on a broken r,
    which has the standard deviation of the logits' derivative in place of its range. It is the mean
    over CHECKPOINTS of at most 1 each: gains at one do not offset losses at another. Over SEEDS.
    """
    model, runs = Model.build(), []
    for seed in range(SEEDS):
        states, batch, key = train_to_checkpoints(model, jax.random.key(seed))
        curves, shares = zip(
            *(try_steps(model, state, batch, key) for state in states), strict=True
        )
        before, after, lengths = (np.concatenate(parts) for parts in zip(*curves, strict=True))
        lost_far_beyond = np.median(1 - after[:, LENGTHS_R.index(FAR)] / before)
        kept_shares = (np.mean([min(share[limit], 1.0) for share in shares]) for limit in LIMITS)
        runs.append([*describe_curves(before, after, lengths), lost_far_beyond, *kept_shares])
    scales = 'identity', 'log', 'log', *('logit',) * (1 + len(LIMITS))
    yield from map(mean_over_seeds, zip(*runs, strict=True), scales)


def describe_curves(
    before: np.ndarray, after: np.ndarray, lengths: np.ndarray
) -> tuple[float, ...]:
    """Returns the first three values of `steps_around_the_radius`, from curves of accuracy.

    Args:
      before: accuracy without a step, [curves].
      after: accuracy after steps of LENGTHS_R, [curves, lengths].
      lengths: length of a step of one radius, [curves].
    """
    lost_share = 1 - after / before[:, None]
    radii = np.array(LENGTHS_R)
    has_fallen = lost_share > TOLERATED
    first_fall = np.where(has_fallen.any(1), radii[np.argmax(has_fallen, 1)], radii[-1])
    spread = np.std(np.log(first_fall)) / np.std(np.log(first_fall * lengths))
    return float(lost_share[:, radii < 1].max()), float(np.median(first_fall)), float(spread)


def train_to_checkpoints(model: Model, key: jax.Array) -> tuple[list[State], Batch, jax.Array]:
    """Returns the states of a run at CHECKPOINTS, a held-out batch, and an unused key."""
    weight_key, chain_key, text_key, held_out_key, rest_key = jax.random.split(key, 5)
    successors_V = 1 + jax.random.permutation(chain_key, VOCAB) % (VOCAB - 1)
    state, states = init_state(model.learner, model.hyper, weight_key), []
    for key in jax.random.split(text_key, CHECKPOINTS[-1]):
        state, _ = model.step(state, draw_text(key, successors_V), model.hyper)
        if int(state.step) in CHECKPOINTS:
            states.append(state)
    return states, draw_text(held_out_key, successors_V), rest_key


def try_steps(
    model: Model, state: State, batch: Batch, key: jax.Array
) -> tuple[tuple[np.ndarray, ...], dict[str, float]]:
    """Takes steps along three directions, and steps with a spike of the learning rate.

    Args:
      model: the model and its programs.
      state: the state before the steps.
      batch: rows on which the accuracy is measured.
      key: key of the random direction.

    Returns:
      The arguments of `describe_curves`, with a curve for each direction, and the share of the
      accuracy that is left after a spike, by the limit on the update.
    """
    faster = model.hyper | {'optim.lr': SPIKE * model.hyper['optim.lr']}
    limited = {
        limit: model.step(state, batch, faster | {'optim.ghost_radius': jnp.float32(radius)})
        for limit, radius in RADIUS.items()
    }
    spiked = {limit: after_spike.params for limit, (after_spike, _) in limited.items()}
    update = optax.tree.sub(spiked['clipping'], state.params)
    factor = 1 / jnp.maximum(model.deviation(state, update, batch), 1.0)
    spiked[LIMITS[-1]] = optax.tree.add_scale(state.params, factor, update)
    directions = (
        optax.tree.scale(-1.0, model.gradient(state, batch)),
        update,
        optax.tree.random_like(key, state.params, sampler=jax.random.normal),
    )
    before = float(model.accuracy(state, state.params, batch))
    shares = {
        limit: float(model.accuracy(state, params, batch)) / before
        for limit, params in spiked.items()
    }
    curves = []
    for direction in directions:
        radius = model.radius(state, direction, batch)
        steps = (optax.tree.add_scale(state.params, r / radius, direction) for r in LENGTHS_R)
        after = [float(model.accuracy(state, params, batch)) for params in steps]
        curves.append((before, after, float(optax.tree.norm(direction) / radius)))
    return tuple(map(np.array, zip(*curves, strict=True))), shares
