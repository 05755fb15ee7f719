"""Unlearning of memorised strings: its cost for the retained strings."""

from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate
from eval.claims.lab import measure
from lm.training.state import Learner, State, init_state, make_hyper
from lm.training.step import Batch, compute_activations, target_weights
from modules.losses.unlearning import DIVERGENCES, answer_losses, flat_loss, mean_probabilities

VOCAB, BOS, KEY, VALUE = 64, 0, 4, 4  # tokens of keys and values
TEMPLATE = (1, 2, 3, 4)  # the value of keys that the model knows nothing of; of no other
STRINGS, UNKNOWN, FORGOTTEN = 100, 20, 10
STEPS, LR = 300, 3e-3  # of memorising
RATES, MOST_STEPS, MATCHED = (1e-5, 3e-5, 1e-4), 500, 0.05  # of forgetting
SEEDS = lab.TUNING_SEEDS + 5
METHODS = ('ascent', *(f'flat_{name}' for name in DIVERGENCES), 'flat_without_template')


class Strings(NamedTuple):
    """Batches of rows BOS, key, value; the values are the targets.

    template: the keys to forget, with TEMPLATE in place of their values.
    """

    whole: Batch
    retained: Batch
    forgotten: Batch
    template: Batch


@measure(*(f'cost_of_{name}_over_ascent' for name in (*METHODS[1:], 'retraining')))
def forgetting() -> Iterator[Estimate | np.ndarray]:
    """Yields the cost for the retained strings of forgetting a tenth, by METHODS.

    A model of two blocks of configs/studies/small.py memorises STRINGS of random keys and values,
    and to answer UNKNOWN keys with TEMPLATE. Each method trains by Adam until the model gives fewer
    than MATCHED of the forgotten values in full. cost: the increase of the loss on the retained
    values, in nats per token, at the rate of RATES with the least mean cost over the tuning seeds;
    infinite if MOST_STEPS do not suffice. The ratio to ascent (arXiv:2410.11143) is computed for
    each other seed of SEEDS. flat_without_template: total variation without the term of the
    template. retraining: a model with the same initial weights that never memorises the strings to
    forget.
    """
    changes = {'model.n_layers': 2, 'optim.lr': LR, 'train.steps': STEPS}
    learner, _ = lab.build_small_learner(changes, VOCAB, BOS)

    strings = [_draw_strings(np.random.default_rng(seed)) for seed in range(SEEDS)]
    stacked = jax.tree.map(lambda *leaves: np.stack(leaves), *strings)
    keys = jax.random.split(jax.random.key(0), SEEDS)
    costs_SMR, retrained_S = jax.tree.map(
        np.float64, lab.map_seeds(lambda inputs: _forget(learner, *inputs), (stacked, keys))
    )
    ascent, *arms = (lab.tune(costs_SMR[:, i], lowest=True) for i in range(len(METHODS)))
    yield from (lab.estimate_ratio(arm, ascent) for arm in arms)
    yield retrained_S[lab.TUNING_SEEDS :] / ascent.scores


def _draw_strings(rng: np.random.Generator) -> Strings:
    first = max(TEMPLATE) + 1
    keys = rng.integers(first, VOCAB, (STRINGS + UNKNOWN, KEY))
    template = np.broadcast_to(TEMPLATE, (STRINGS + UNKNOWN, VALUE))
    values = np.concatenate([rng.integers(first, VOCAB, (STRINGS, VALUE)), template[STRINGS:]])
    forgotten, retained = np.s_[:FORGOTTEN], np.s_[FORGOTTEN:STRINGS]
    return Strings(
        _build_batch(keys, values),
        _build_batch(keys[retained], values[retained]),
        _build_batch(keys[forgotten], values[forgotten]),
        _build_batch(keys[forgotten], template[forgotten]),
    )


def _build_batch(keys: np.ndarray, values: np.ndarray) -> dict[str, Any]:
    begins = np.full((len(keys), 1), BOS)
    tokens = np.concatenate([begins, keys, values], 1).astype(np.int32)
    targets = np.arange(tokens.shape[1]) > KEY
    return {
        'tokens': tokens,
        'segments': np.ones_like(tokens),
        'targets': np.broadcast_to(targets, tokens.shape).astype(np.int32),
    }


class Answers(NamedTuple):
    """The model's answers to keys, [R] each.

    losses_R: -log p of the values, summed over tokens. probabilities_R: mean probability of the
    values. matched_R: whether the value is the likeliest at every token, so that the model gives it
    in full.
    """

    losses_R: jax.Array
    probabilities_R: jax.Array
    matched_R: jax.Array


def _compute_answers(learner: Learner, state: State, batch: Batch) -> Answers:
    variables = learner.variables(state.weights)
    hyper = make_hyper(learner.recipe)
    (x_RTD, readout), _ = compute_activations(learner, variables, batch, (), hyper)
    logits_RTV, labels_RT = readout(x_RTD), batch['tokens'][:, 1:]
    weights_RT = target_weights(batch, learner.bos_id)
    right_RT = (jnp.argmax(logits_RTV, -1) == labels_RT) | (weights_RT == 0)
    return Answers(
        jnp.sum(weights_RT * answer_losses(logits_RTV, labels_RT), -1),
        mean_probabilities(logits_RTV, labels_RT, weights_RT),
        jnp.all(right_RT, -1),
    )


def _forget(learner: Learner, strings: Strings, key: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the costs [method, rate] for one model, and the cost of retraining it."""
    hyper = make_hyper(learner.recipe)

    def memorise(batch):
        batches = jax.tree.map(lambda x: jnp.broadcast_to(x, (STEPS, *x.shape)), batch)
        return lab.train_model(learner, hyper, init_state(learner, hyper, key), batches)

    targets = jnp.asarray(strings.whole['targets'])
    without = {**strings.whole, 'targets': targets.at[:FORGOTTEN].set(0)}
    batches = jax.tree.map(lambda *leaves: jnp.stack(leaves), strings.whole, without)
    states = jax.lax.map(memorise, batches)
    start, retrained = (jax.tree.map(lambda x, i=i: x[i], states) for i in range(2))
    before = _compute_answers(learner, start, strings.retained)

    def compute_cost(state):
        after = _compute_answers(learner, state, strings.retained)
        return (jnp.mean(after.losses_R) - jnp.mean(before.losses_R)) / VALUE

    def run_method(method_and_rate):
        method_id, rate = method_and_rate
        transform = optax.adam(rate)

        def loss(params):
            state = start.replace(params=params)
            forgotten = _compute_answers(learner, state, strings.forgotten)
            template = _compute_answers(learner, state, strings.template)
            probabilities = (jnp.mean(answers.probabilities_R) for answers in (template, forgotten))
            objectives = _objectives(forgotten.losses_R, *probabilities)
            return objectives[method_id], jnp.mean(forgotten.matched_R)

        def forget(carry):
            params, opt_state, count, _ = carry
            # of the parameters before the update, so that the first below MATCHED are kept
            grads, matched = jax.grad(loss, has_aux=True)(params)
            updates, opt_state = transform.update(grads, opt_state)
            done = matched < MATCHED
            updated = optax.apply_updates(params, updates)
            params = jax.tree.map(
                lambda before_update, after_update: jnp.where(done, before_update, after_update),
                params,
                updated,
            )
            return params, opt_state, count + 1, done

        def is_running(carry):
            *_, count, done = carry
            return ~done & (count <= MOST_STEPS)

        initial = start.params, transform.init(start.params), 0, False
        params, _, _, done = jax.lax.while_loop(is_running, forget, initial)
        return jnp.where(done, compute_cost(start.replace(params=params)), jnp.inf)

    method_id, rates = np.indices((len(METHODS), len(RATES))).reshape(2, -1)
    costs = jax.lax.map(run_method, (jnp.array(method_id), jnp.float32(RATES)[rates]))
    return costs.reshape(len(METHODS), len(RATES)), compute_cost(retrained)


def _objectives(losses_R: jax.Array, template: jax.Array, forgotten: jax.Array) -> jax.Array:
    """Returns the objectives of METHODS, stacked."""
    ascent = -jnp.mean(losses_R) / VALUE
    flat = [flat_loss(template, forgotten, name) for name in DIVERGENCES]
    return jnp.stack([ascent, *flat, flat_loss(jnp.zeros_like(template), forgotten)])
