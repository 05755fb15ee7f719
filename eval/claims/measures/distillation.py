"""Distillation of small classifiers: two losses on one head or two, and two teachers at once."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from eval.claims.estimates import Estimate, over_seeds
from modules.losses.base import cross_entropies
from modules.losses.distillation import (
    balanced_temperatures,
    balanced_weights,
    divergence,
    entropies,
    log_cosh,
)

CLASSES, CLUSTERS, INPUTS = 20, 3, 16  # each class is some Gaussians
TRAINED, HELD_OUT, BATCH, STEPS = 2048, 4096, 64, 1000
TEACHER, STUDENT = 256, 24  # units of both hidden layers
LR, MOMENTUM, DECAY = 0.05, 0.9, 5e-4  # of the authors' code
T_LOGITS, T_PROBABILITIES = 2.0, 4.0  # likewise
EASY, HARD = 0.5, 0.8  # deviations within a cluster, whose centres are N(0, 1)
RATES = 0.025, 0.001  # of weights and temperatures, likewise
SEEDS, LOOKS = 10, 20

Params = dict[str, tuple[jax.Array, jax.Array]]
PARTS = ('ce', 'logits', 'logits_of_the_other_head', 'probabilities')  # of a student's loss
METHODS = {  # what each student's loss is the sum of
    'ce': (1, 0, 0, 0),
    'logits': (0, 1, 0, 0),
    'one_head': (1, 1, 0, 0),
    'two_heads': (1, 0, 1, 0),
    'probabilities': (1, 0, 0, 1),
}


def heads_of_students() -> dict[str, Estimate]:
    """Returns what a loss on logits does beside cross-entropy, on one head and on two.

    loss, accuracy: of the first head on held-out inputs, in nats and as a share, by METHODS;
    differences are of students with one start, one teacher and one order of batches. cosine: of the
    gradients of both losses of `one_head` on all that is trained on, in its head and in the layers
    below, the mean of LOOKS moments of its training (arXiv:2411.08937). Over SEEDS.
    """
    return _over_seeds(jax.lax.map(jax.jit(_students), jax.random.split(jax.random.key(0), SEEDS)))


def balance_of_teachers() -> dict[str, Estimate]:
    """Returns what both balances of two teachers add to the accuracy of their student.

    Each teacher knows one of two domains, whose clusters are EASY and HARD; the student learns
    both, its loss being the weighted divergences from either teacher on its own domain. A gain is
    that over equal weights and temperature 1: in the domain in which the student is worse, and in
    the mean of both (arXiv:2306.16170). Over SEEDS.
    """
    return _over_seeds(jax.lax.map(jax.jit(_balances), jax.random.split(jax.random.key(1), SEEDS)))


def _over_seeds(found: dict[str, jax.Array]) -> dict[str, Estimate]:
    return {name: over_seeds(float(x) for x in by_seed) for name, by_seed in found.items()}


def _domain(key: jax.Array, spread: float) -> tuple[jax.Array, ...]:
    """Inputs and labels, to train on and held out."""
    of_centres, of_labels, of_clusters, of_noise = jax.random.split(key, 4)
    centres = jax.random.normal(of_centres, (CLASSES, CLUSTERS, INPUTS))
    count = TRAINED + HELD_OUT
    labels = jax.random.randint(of_labels, (count,), 0, CLASSES)
    clusters = jax.random.randint(of_clusters, (count,), 0, CLUSTERS)
    x = centres[labels, clusters] + spread * jax.random.normal(of_noise, (count, INPUTS))
    return x[:TRAINED], labels[:TRAINED], x[TRAINED:], labels[TRAINED:]


def _start(key: jax.Array, width: int) -> Params:
    sizes = {'first': (INPUTS, width), 'second': (width, width)}
    sizes |= {head: (width, CLASSES) for head in ('head', 'other_head')}
    keys = jax.random.split(key, len(sizes))
    return {
        name: (jax.random.normal(k, size) * (2 / size[0]) ** 0.5, jnp.zeros(size[1]))
        for k, (name, size) in zip(keys, sizes.items(), strict=True)
    }


def _logits(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The logits of both heads."""

    def layer(name, x):
        weight, bias = params[name]
        return x @ weight + bias[None]

    for name in ('first', 'second'):
        x = jax.nn.relu(layer(name, x))
    return layer('head', x), layer('other_head', x)


def _trained(loss: Callable, params: Params, kept: Any, key: jax.Array) -> tuple[Params, Params]:
    """Trains by loss(params, kept, rows) -> (loss, kept), rows being places in a domain.

    Returns (the last parameters, those of LOOKS moments).
    """
    schedule = optax.cosine_decay_schedule(LR, STEPS)
    transform = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(schedule, MOMENTUM))

    def step(carry, key):
        params, state, kept = carry
        rows = jax.random.randint(key, (BATCH,), 0, TRAINED)
        grads, kept = jax.grad(loss, has_aux=True)(params, kept, rows)
        updates, state = transform.update(grads, state, params)
        return (optax.apply_updates(params, updates), state, kept), None

    def between_looks(carry, keys):
        carry, _ = jax.lax.scan(step, carry, keys)
        return carry, carry[0]

    keys = jax.random.split(key, STEPS).reshape(LOOKS, STEPS // LOOKS)
    (last, *_), seen = jax.lax.scan(between_looks, (params, transform.init(params), kept), keys)
    return last, seen


def _teacher(x: jax.Array, labels: jax.Array, key: jax.Array) -> Params:
    def loss(params, kept, rows):
        one, _ = _logits(params, x[rows])
        return jnp.mean(cross_entropies(one, labels[rows])), kept

    of_start, of_rows = jax.random.split(key)
    return _trained(loss, _start(of_start, TEACHER), None, of_rows)[0]


def _parts(params: Params, x: jax.Array, teacher: jax.Array, labels: jax.Array) -> jax.Array:
    """The means of all PARTS of the loss."""
    one, other = _logits(params, x)
    each = (
        cross_entropies(one, labels),
        log_cosh(one, teacher, T_LOGITS),
        log_cosh(other, teacher, T_LOGITS),
        divergence(one, teacher, T_PROBABILITIES),
    )
    return jnp.stack([jnp.mean(part) for part in each])


def _students(key: jax.Array) -> dict[str, jax.Array]:
    of_domain, of_teacher, of_start, of_rows = jax.random.split(key, 4)
    x, labels, held_out, held_out_labels = _domain(of_domain, HARD)
    teacher, _ = _logits(_teacher(x, labels, of_teacher), x)

    def student(shares):
        def loss(params, kept, rows):
            return jnp.vdot(shares, _parts(params, x[rows], teacher[rows], labels[rows])), kept

        last, seen = _trained(loss, _start(of_start, STUDENT), None, of_rows)
        logits, _ = _logits(last, held_out)
        right = jnp.argmax(logits, -1) == held_out_labels
        return jnp.mean(cross_entropies(logits, held_out_labels)), jnp.mean(right), seen

    made, rights, seen = jax.lax.map(student, jnp.float32(list(METHODS.values())))
    losses, right = (dict(zip(METHODS, each, strict=True)) for each in (made, rights))
    found = {f'accuracy_of_{name}': share for name, share in right.items()}
    for other in ('one_head', 'ce', 'probabilities'):
        found[f'loss_of_two_heads_less_{other}'] = losses['two_heads'] - losses[other]
    for other in ('ce', 'logits'):
        found[f'accuracy_of_one_head_less_{other}'] = right['one_head'] - right[other]
    of_one_head = jax.tree.map(lambda leaf: leaf[list(METHODS).index('one_head')], seen)
    return found | _cosines(of_one_head, x, teacher, labels)


def _cosines(seen: Params, x: jax.Array, teacher: jax.Array, labels: jax.Array):
    """Cosines of the gradients of cross-entropy and of that on logits: in the head, below it."""

    def one(params):
        grads = jax.jacrev(lambda p: _parts(p, x, teacher, labels)[:2])(params)
        first, second = (jax.tree.map(lambda g, i=i: g[i], grads) for i in range(2))
        return [
            _cosine({n: first[n] for n in names}, {n: second[n] for n in names})
            for names in (('head',), ('first', 'second'))
        ]

    head, body = jax.lax.map(one, seen)
    return {'cosine_in_the_head': jnp.mean(head), 'cosine_in_the_body': jnp.mean(body)}


def _cosine(a: Any, b: Any) -> jax.Array:
    return optax.tree.vdot(a, b) / (optax.tree.norm(a) * optax.tree.norm(b))


def _balances(key: jax.Array) -> dict[str, jax.Array]:
    of_domains, of_teachers, of_start, of_rows = jax.random.split(key, 4)
    domains = jax.vmap(_domain)(jax.random.split(of_domains), jnp.array([EASY, HARD]))
    x, labels, held_out, held_out_labels = domains

    def teacher(given):
        x, labels, key = given
        return _logits(_teacher(x, labels, key), x)[0]

    teachers = jax.lax.map(teacher, (x, labels, jax.random.split(of_teachers)))

    def accuracies(rates):
        of_weights, of_temperatures = rates

        def loss(params, kept, rows):
            temperatures, weights, first = kept
            tempered = teachers[:, rows] / temperatures[:, None, None]
            students, _ = jax.vmap(_logits, (None, 0))(params, x[:, rows])
            losses = jnp.mean(jax.vmap(divergence, (0, 0, None))(students, tempered, 1.0), -1)
            fixed = jax.lax.stop_gradient(losses)
            first = jnp.where(first > 0, first, fixed)  # 0 until the first batch
            weights = balanced_weights(weights, fixed, first, of_weights)
            entropy = jnp.mean(jax.vmap(entropies, (0, None))(tempered, 1.0), -1)
            temperatures = balanced_temperatures(temperatures, entropy, of_temperatures)
            return jnp.vdot(weights, losses), (temperatures, weights, first)

        kept = jnp.ones(2), jnp.full(2, 0.5), jnp.zeros(2)
        last, _ = _trained(loss, _start(of_start, STUDENT), kept, of_rows)
        logits, _ = jax.vmap(_logits, (None, 0))(last, held_out)
        return jnp.mean(jnp.argmax(logits, -1) == held_out_labels, -1)

    equal, balanced = jax.lax.map(accuracies, jnp.array([(0.0, 0.0), RATES]))
    return {
        'accuracy_in_the_worse_domain': jnp.min(equal),
        'gain_in_the_worse_domain': jnp.min(balanced) - jnp.min(equal),
        'gain_in_the_mean': jnp.mean(balanced) - jnp.mean(equal),
    }
