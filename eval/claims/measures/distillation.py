"""Distillation of small classifiers: two losses on one head or two, and two teachers at once."""

from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
import optax

from eval.claims import lab
from eval.claims.lab import KeyedRng, LabeledSplit, Task, TrainOutput, measure
from modules.losses.base import cross_entropies
from modules.losses.distillation import (
    balanced_temperatures,
    balanced_weights,
    entropies,
    kl_divergence,
    log_cosh,
)

CLASSES, CLUSTERS = 20, 3  # of each class
BATCH, STEPS = 64, 1000
TEACHER, STUDENT = 256, 24  # units of both hidden layers
LR, MOMENTUM, DECAY = 0.05, 0.9, 5e-4  # of the authors' code
T_LOGITS, T_PROBABILITIES = 2.0, 4.0  # likewise
EASY, HARD = (  # by deviations within a cluster
    Task(CLASSES, CLASSES * CLUSTERS, spread, n_train=2048, n_held_out=4096)
    for spread in (0.5, 0.8)
)
# The authors' steps of temperatures are 100 times smaller, in 117 times as many steps of training.
WEIGHT_RATE, TEMPERATURE_RATE = 0.025, 0.1
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
BALANCES = {  # rates of weights and temperatures, and the first weight of the easy domain
    'equal': (0.0, 0.0, 1 / 2),
    'balanced': (WEIGHT_RATE, TEMPERATURE_RATE, 1 / 2),
    'fixed': (0.0, 0.0, 1 / 3),
    'inverted': (WEIGHT_RATE, -TEMPERATURE_RATE, 1 / 2),
    'weights_alone': (WEIGHT_RATE, 0.0, 1 / 2),
}


@measure(
    *(f'loss_of_two_heads_less_{method}' for method in ('one_head', 'probabilities')),
    *(f'accuracy_of_one_head_less_{method}' for method in ('ce', 'logits')),
    *('cosine_in_the_head', 'cosine_in_the_body'),
    *('cosine_in_the_head_at_the_end', 'accuracy_of_probabilities_less_ce'),
    *(f'loss_of_ce_less_{method}' for method in ('one_head', 'probabilities')),
    'cosine_in_the_body_of_shuffled_teacher',
)
def heads_of_students() -> Iterable[jax.Array]:
    """Returns the effects of a loss on logits beside cross-entropy, on one head and on two.

    loss, accuracy: of the first head on held-out inputs, in nats and as a share, by METHODS.
    Students share initial weights, teacher and order of batches. cosine: of the gradients of both
    losses of `one_head` on all training data, in its head and in the layers below, mean over LOOKS
    moments of its training (arXiv:2411.08937).

    Then the cosine in the head at the last moment, and the gain in accuracy from distilled
    probabilities. Two heads whose second head does not train the layers below are cross-entropy
    alone; the last cosine is that with the teacher's logits of other rows. Over SEEDS.
    """
    return lab.map_seeds(_compare_students, jax.random.split(jax.random.key(0), SEEDS))


@measure(
    *('gain_in_the_worse_domain', 'gain_in_the_mean'),
    *(f'gain_in_the_worse_domain_of_{balance}' for balance in ('fixed', 'inverted')),
    *('gain_in_the_mean_of_inverted', 'gain_in_the_worse_domain_of_weights_alone'),
)
def balance_of_teachers() -> Iterable[jax.Array]:
    """Returns the gain in a student's accuracy from balancing its two teachers.

    Each teacher knows one of two domains with clusters EASY and HARD. The student learns both: its
    loss is the weighted sum of the divergences from each teacher on the teacher's domain. The gain
    is over equal weights and temperature 1, in the domain with the lower accuracy and in the mean
    of both (arXiv:2306.16170). Then the gain of a fixed weight of 2/3 on the domain HARD, of
    temperatures with an inverted sign, and of a temperature of 1. By BALANCES, over SEEDS.
    """
    return lab.map_seeds(_compare_balances, jax.random.split(jax.random.key(1), SEEDS))


def _draw_domain(key: jax.Array, task: Task) -> LabeledSplit:
    centre_key, label_key, cluster_key, noise_key = jax.random.split(key, 4)

    def assign_clusters(rng, rows):
        labels = rng.integers(CLASSES, size=(rows,))
        return CLUSTERS * labels + rng.integers(CLUSTERS, size=(rows,))

    rng = KeyedRng([centre_key, label_key, cluster_key, noise_key])
    x, place_M = lab.draw_clusters(rng, task, assign_clusters)
    return lab.split_rows(task, x, place_M // CLUSTERS)


def _init_params(key: jax.Array, width: int) -> Params:
    shapes = {'first': (HARD.inputs, width), 'second': (width, width)}
    shapes |= {head: (width, CLASSES) for head in ('head', 'other_head')}
    rng = KeyedRng(jax.random.split(key, len(shapes)))
    return {
        name: (lab.he_matrix(rng, shape), jnp.zeros(shape[1])) for name, shape in shapes.items()
    }


def _logits(params: Params, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Returns the logits of both heads."""

    def layer(name, x):
        weight, bias = params[name]
        return x @ weight + bias[None]

    for name in ('first', 'second'):
        x = jax.nn.relu(layer(name, x))
    return layer('head', x), layer('other_head', x)


def _train(
    loss: Callable, params: Params, key: jax.Array, loss_state: Any = None, **options: Any
) -> TrainOutput:
    """Trains by `lab.train` on random rows; options are passed on."""
    schedule = optax.cosine_decay_schedule(LR, STEPS)
    optimizer = optax.chain(optax.add_decayed_weights(DECAY), optax.sgd(schedule, MOMENTUM))

    def batch_loss(params, key, *state):
        return loss(params, jax.random.randint(key, (BATCH,), 0, HARD.n_train), *state)

    return lab.train(
        batch_loss, params, optimizer, jax.random.split(key, STEPS), loss_state, **options
    )


def _teacher_logits(x: jax.Array, labels: jax.Array, key: jax.Array) -> jax.Array:
    """Trains a teacher, and returns its logits of its training inputs."""

    def loss(params, rows):
        return jnp.mean(cross_entropies(_logits(params, x[rows])[0], labels[rows]))

    start_key, row_key = jax.random.split(key)
    return _logits(_train(loss, _init_params(start_key, TEACHER), row_key).params, x)[0]


def _loss_parts(params: Params, x: jax.Array, teacher: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns the means of all PARTS of the loss."""
    logits_BV, other_logits_BV = _logits(params, x)
    losses = (
        cross_entropies(logits_BV, labels),
        log_cosh(logits_BV, teacher, T_LOGITS),
        log_cosh(other_logits_BV, teacher, T_LOGITS),
        kl_divergence(logits_BV, teacher, T_PROBABILITIES),
    )
    return jnp.stack([jnp.mean(part) for part in losses])


def _compare_students(key: jax.Array) -> list[jax.Array]:
    domain_key, teacher_key, start_key, row_key = jax.random.split(key, 4)
    x, labels, held_out, held_out_labels = _draw_domain(domain_key, HARD)
    teacher = _teacher_logits(x, labels, teacher_key)

    def train_student(shares):
        def loss(params, rows):
            return jnp.vdot(shares, _loss_parts(params, x[rows], teacher[rows], labels[rows]))

        trained = _train(
            loss,
            _init_params(start_key, STUDENT),
            row_key,
            observe=lambda params: params,
            stages=LOOKS,
        )
        logits, _ = _logits(trained.params, held_out)
        mean = jnp.mean(cross_entropies(logits, held_out_labels))
        return mean, lab.accuracy(logits, held_out_labels), trained.history

    *statistics, history = jax.lax.map(train_student, jnp.float32(list(METHODS.values())))
    losses, accuracies = (dict(zip(METHODS, by_method, strict=True)) for by_method in statistics)
    one_head = jax.tree.map(lambda leaf: leaf[list(METHODS).index('one_head')], history)
    head_cosines_L, body_cosines_L = _gradient_cosines(one_head, x, teacher, labels)
    return [
        *(losses['two_heads'] - losses[method] for method in ('one_head', 'probabilities')),
        *(accuracies['one_head'] - accuracies[method] for method in ('ce', 'logits')),
        *(jnp.mean(cosines_L) for cosines_L in (head_cosines_L, body_cosines_L)),
        head_cosines_L[-1],
        accuracies['probabilities'] - accuracies['ce'],
        *(losses['ce'] - losses[method] for method in ('one_head', 'probabilities')),
        jnp.mean(_gradient_cosines(one_head, x, jnp.roll(teacher, 1, 0), labels)[1]),
    ]


def _gradient_cosines(history: Params, x: jax.Array, teacher: jax.Array, labels: jax.Array):
    """Returns cosines of the gradients of cross-entropy and of the loss on logits.

    Args:
      history: parameters at LOOKS moments.
      x: all training inputs.
      teacher: logits of the teacher.
      labels: classes.

    Returns:
      The cosines [L] in the head and in the body.
    """

    def compute_cosines(params):
        grads = jax.jacrev(lambda p: _loss_parts(p, x, teacher, labels)[:2])(params)
        first, second = (jax.tree.map(lambda g, i=i: g[i], grads) for i in range(2))
        return [
            _cosine({n: first[n] for n in names}, {n: second[n] for n in names})
            for names in (('head',), ('first', 'second'))
        ]

    return jax.lax.map(compute_cosines, history)


def _cosine(a: Any, b: Any) -> jax.Array:
    return optax.tree.vdot(a, b) / (optax.tree.norm(a) * optax.tree.norm(b))


def _compare_balances(key: jax.Array) -> list[jax.Array]:
    domain_key, teacher_key, start_key, row_key = jax.random.split(key, 4)
    keys = jax.random.split(domain_key)
    domains = [_draw_domain(key, task) for key, task in zip(keys, (EASY, HARD), strict=True)]
    x, labels, held_out, held_out_labels = map(jnp.stack, zip(*domains, strict=True))
    inputs = (x, labels, jax.random.split(teacher_key))
    teachers = jax.lax.map(lambda x_labels_key: _teacher_logits(*x_labels_key), inputs)

    def accuracies(balance):
        weight_rate, temperature_rate, weight = balance

        def loss(params, rows, loss_state):
            temperatures, weights, first = loss_state
            tempered = teachers[:, rows] / temperatures[:, None, None]
            students, _ = jax.vmap(_logits, (None, 0))(params, x[:, rows])
            losses = jnp.mean(jax.vmap(kl_divergence, (0, 0, None))(students, tempered, 1.0), -1)
            fixed = jax.lax.stop_gradient(losses)
            first = jnp.where(first > 0, first, fixed)  # 0 until the first batch
            weights = balanced_weights(weights, fixed, first, weight_rate)
            entropy = jnp.mean(jax.vmap(entropies, (0, None))(tempered, 1.0), -1)
            temperatures = balanced_temperatures(temperatures, entropy, temperature_rate)
            return jnp.vdot(weights, losses), (temperatures, weights, first)

        initial_state = jnp.ones(2), jnp.array([weight, 1 - weight]), jnp.zeros(2)
        last = _train(loss, _init_params(start_key, STUDENT), row_key, initial_state).params
        logits, _ = jax.vmap(_logits, (None, 0))(last, held_out)
        return jnp.mean(jnp.argmax(logits, -1) == held_out_labels, -1)

    by_balance = jax.lax.map(accuracies, jnp.array(list(BALANCES.values())))
    worse, mean = (
        dict(zip(BALANCES, by_domain - by_domain[0], strict=True))
        for by_domain in (jnp.min(by_balance, -1), jnp.mean(by_balance, -1))
    )
    return [
        *(worse['balanced'], mean['balanced'], worse['fixed']),
        *(worse['inverted'], mean['inverted'], worse['weights_alone']),
    ]
