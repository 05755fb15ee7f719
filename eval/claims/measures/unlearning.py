"""Unlearning of memorised strings: what it costs those that are to be kept."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims.estimates import Estimate, over_seeds
from eval.claims.measures.starts import small
from lm.training.state import Learner, State, build_learner, hyper_from, init_state
from lm.training.step import Batch, activations, make_train_step, target_weights
from modules.losses.unlearning import DIVERGENCES, answer_losses, flat, mean_probabilities, npo

VOCAB, BOS, KEY, VALUE = 64, 0, 4, 4  # tokens of keys and values
TEMPLATE = (1, 2, 3, 4)  # the value of keys that the model knows nothing of; of no other
STRINGS, UNKNOWN, FORGOTTEN = 100, 20, 10
STEPS, LR = 300, 3e-3  # of memorising
RATES, MOST_STEPS, MATCHED = (1e-4, 3e-4, 1e-3), 300, 0.05  # of forgetting
SEEDS = 5
METHODS = ('ascent', 'npo', *(f'flat_{name}' for name in DIVERGENCES))


class Strings(NamedTuple):
    """Batches of rows BOS, key, value; the values are the targets.

    template: the keys of those to forget with TEMPLATE in place of their values.
    """

    whole: Batch
    kept: Batch
    forgotten: Batch
    template: Batch


def forgetting() -> dict[str, Estimate]:
    """Returns what it costs the kept strings that a tenth is forgotten, by METHODS.

    A model of two blocks of configs/studies/small.py memorises STRINGS of random keys and values,
    and to answer UNKNOWN keys with TEMPLATE. Each method goes on by Adam until fewer than MATCHED
    of the values to forget are given in full. cost: the loss on the kept values then, less that
    before, in nats a token, at the rate of RATES at which the mean cost is least; infinite where
    MOST_STEPS do not suffice. matched: the share of kept values that are given in full. The ratio
    to ascent (arXiv:2410.11143) is that of each of the SEEDS.
    """
    changes = {'model.n_layers': 2, 'optim.lr': LR, 'train.steps': STEPS}
    learner = build_learner(small(changes), VOCAB, BOS, jax.default_backend())

    strings = [_strings(np.random.default_rng(seed)) for seed in range(SEEDS)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *strings)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    each = jax.jit(lambda *given: jax.lax.map(lambda one: _forget(learner, *one), given))
    return _at_the_best_rates(*(np.float64(found) for found in each(stacked, keys)))


def _strings(rng: np.random.Generator) -> Strings:
    first = max(TEMPLATE) + 1
    keys = rng.integers(first, VOCAB, (STRINGS + UNKNOWN, KEY))
    template = np.broadcast_to(TEMPLATE, (STRINGS + UNKNOWN, VALUE))
    values = np.concatenate([rng.integers(first, VOCAB, (STRINGS, VALUE)), template[STRINGS:]])
    forgotten, kept = np.s_[:FORGOTTEN], np.s_[FORGOTTEN:STRINGS]
    return Strings(
        _batch(keys, values),
        _batch(keys[kept], values[kept]),
        _batch(keys[forgotten], values[forgotten]),
        _batch(keys[forgotten], template[forgotten]),
    )


def _batch(keys: np.ndarray, values: np.ndarray) -> Batch:
    begins = np.full((len(keys), 1), BOS)
    tokens = np.concatenate([begins, keys, values], 1).astype(np.int32)
    targets = np.arange(tokens.shape[1]) > KEY
    return {
        'tokens': tokens,
        'segments': np.ones_like(tokens),
        'targets': np.broadcast_to(targets, tokens.shape).astype(np.int32),
    }


class Answers(NamedTuple):
    """Values as a model has them: -log p summed over tokens, mean probabilities, whether each is
    the likeliest at every token, as it is where the model gives it in full; all [R].
    """

    losses_R: jax.Array
    probabilities_R: jax.Array
    matched_R: jax.Array


def _answers(learner: Learner, state: State, batch: Batch) -> Answers:
    variables = learner.variables(state.weights)
    hyper = hyper_from(learner.recipe)
    (x_RTD, readout), _ = activations(learner, variables, batch, (), hyper)
    logits_RTV, labels_RT = readout(x_RTD), batch['tokens'][:, 1:]
    weights_RT = target_weights(batch, learner.bos_id)
    right_RT = (jnp.argmax(logits_RTV, -1) == labels_RT) | (weights_RT == 0)
    return Answers(
        jnp.sum(weights_RT * answer_losses(logits_RTV, labels_RT), -1),
        mean_probabilities(logits_RTV, labels_RT, weights_RT),
        jnp.all(right_RT, -1),
    )


def _forget(learner: Learner, strings: Strings, key: jax.Array) -> tuple[jax.Array, ...]:
    """Returns (cost, matched, matched before), each [method, rate], of one model."""
    hyper, step = hyper_from(learner.recipe), make_train_step(learner)

    def memorise(state, _):
        return step(state, strings.whole, hyper)[0], None

    start, _ = jax.lax.scan(memorise, init_state(learner, hyper, key), length=STEPS)
    before = _answers(learner, start, strings.kept)
    losses_before_R = _answers(learner, start, strings.forgotten).losses_R

    def after(given):
        chosen, rate = given
        transform = optax.adam(rate)

        def loss(params):
            state = start.replace(params=params)
            forgotten = _answers(learner, state, strings.forgotten)
            template = _answers(learner, state, strings.template)
            probabilities = (jnp.mean(answers.probabilities_R) for answers in (template, forgotten))
            each = _objectives(forgotten.losses_R, losses_before_R, *probabilities)
            return each[chosen], jnp.mean(forgotten.matched_R)

        def forget(carry):
            params, kept, count, _ = carry
            # of the parameters before the update, so that the first below MATCHED are kept
            grads, matched = jax.grad(loss, has_aux=True)(params)
            updates, kept = transform.update(grads, kept)
            done = matched < MATCHED
            moved = optax.apply_updates(params, updates)
            params = jax.tree.map(lambda old, new: jnp.where(done, old, new), params, moved)
            return params, kept, count + 1, done

        def goes_on(carry):
            *_, count, done = carry
            return ~done & (count <= MOST_STEPS)

        first = start.params, transform.init(start.params), 0, False
        params, _, _, done = jax.lax.while_loop(goes_on, forget, first)
        found = _answers(learner, start.replace(params=params), strings.kept)
        cost = (jnp.mean(found.losses_R) - jnp.mean(before.losses_R)) / VALUE
        return jnp.where(done, cost, jnp.inf), jnp.mean(found.matched_R)

    chosen, rates = np.indices((len(METHODS), len(RATES))).reshape(2, -1)
    found = jax.lax.map(after, (jnp.array(chosen), jnp.float32(RATES)[rates]))
    every = (*found, jnp.full(len(chosen), jnp.mean(before.matched_R)))
    return tuple(each.reshape(len(METHODS), len(RATES)) for each in every)


def _objectives(
    losses_R: jax.Array, before_R: jax.Array, template: jax.Array, forgotten: jax.Array
) -> jax.Array:
    """The objectives of METHODS."""
    ascent = -jnp.mean(losses_R) / VALUE
    preferred = (flat(template, forgotten, name) for name in DIVERGENCES)
    return jnp.stack([ascent, jnp.mean(npo(losses_R, before_R)), *preferred])


def _at_the_best_rates(
    costs_SMR: np.ndarray, matched_SMR: np.ndarray, before_SMR: np.ndarray
) -> dict[str, Estimate]:
    best_M = np.argmin(costs_SMR.mean(0), -1)
    costs, matched = (
        dict(zip(METHODS, np.take_along_axis(x, best_M[None, :, None], -1)[..., 0].T, strict=True))
        for x in (costs_SMR, matched_SMR)
    )
    found = {'matched_before': over_seeds(before_SMR[:, 0, 0])}
    for name in METHODS:
        found[f'cost_of_{name}'] = over_seeds(costs[name])
        found[f'matched_of_{name}'] = over_seeds(matched[name])
    for name in METHODS[1:]:
        found[f'cost_of_{name}_over_ascent'] = over_seeds(costs[name] / costs['ascent'])
    return found
