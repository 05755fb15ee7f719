"""Small classifiers by losses of the project: wrong labels, a rare class, ranks and tries."""

import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims import lab
from eval.claims.lab import Task, measure
from modules.kernels.matmul import direct
from modules.losses import LOSSES
from modules.losses.base import cross_entropies
from modules.products import Readout

WIDTH = 128
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # of Adam, falling to 0 by a cosine
STAGES = 8  # equal parts of the steps, after each of which a network is judged
SEEDS = 10
TOP = 10  # words of a list
TRIES = (1, 16)

LossOptions = Mapping[str, Any]
Method = tuple[str, LossOptions]  # a row of LOSSES and its numbers
CROSS_ENTROPY: Method = ('comp_sum', {'tau': 1.0})
FOR_WRONG_LABELS: Mapping[str, Method] = {
    'comp_sum_1.7': ('comp_sum', {'tau': 1.7}),
    'aldr_of_l1_scores': ('aldr_kl', {'ldr_scores': 'l1'}),
}
FOR_A_RARE_CLASS: Mapping[str, Method] = {
    'dice_1.0': ('dice', {'dice_alpha': 1.0}),
    'dice_of_batches': ('dice_of_batches', {'alpha': 0.01, 'smooth': 1.0}),
}
SPHERICAL: tuple[LossOptions, ...] = tuple(
    {'spherical_a': a, 'spherical_b': b} for a in (0.1, 1.0) for b in (5.0, 10.0, 20.0)
)


@dataclasses.dataclass(frozen=True)
class Training:
    """A task, and how often its rows are seen, in batches."""

    task: Task
    passes: int
    batch: int = 64


SHARES_WRONG = (0.0, 0.4)
WRONG_LABELS = Training(Task(10, 30, 0.7, n_train=1024, n_held_out=4096), passes=40)
A_RARE_CLASS = Training(
    Task(2, 32, 0.7, n_train=8192, n_held_out=65536, rare=0.01), passes=24, batch=512
)
RANKS = Training(Task(512, 512, 0.9, n_train=8192, n_held_out=4096), passes=8)
SOME_TRIES = Training(Task(64, 128, 0.9, n_train=2048, n_held_out=4096), passes=40)


@measure(
    *(f'accuracy_at_{wrong}_gain_of_{name}' for wrong in SHARES_WRONG for name in FOR_WRONG_LABELS)
)
def wrong_labels() -> Iterator[np.ndarray]:
    """Clean accuracy of classifiers by losses, over cross-entropy, with SHARES_WRONG of their
    labels wrong.

    It is a share of held-out inputs with right labels. A network has two hidden layers of WIDTH,
    with one start and order of batches for all losses, each at the rate of RATES at which its mean
    over the SEEDS is best (arXiv:2304.07288, arXiv:2112.14869).
    """
    for wrong in SHARES_WRONG:
        task = dataclasses.replace(WRONG_LABELS.task, wrong=wrong)
        training = dataclasses.replace(WRONG_LABELS, task=task)
        plain_S, *others = (
            _select_best_rate(_evaluate_final(training, method, lab.accuracy))
            for method in (CROSS_ENTROPY, *FOR_WRONG_LABELS.values())
        )
        yield from (right_S - plain_S for right_S in others)


@measure(*(f'{what}_gain_of_{name}' for what in ('f1', 'f1_at_half') for name in FOR_A_RARE_CLASS))
def rare_class() -> Iterator[np.ndarray]:
    """F1 = 2 hits / (2 hits + false alarms + misses) of a class of one input in a hundred, over
    that by cross-entropy.

    `f1_at_half` takes the inputs whose probability of it is above 1/2, `f1` those above the
    threshold that is best for one half of the held-out inputs, and is of the other half. Networks
    and RATES are those of `wrong_labels`, and each value is of the rate at which its mean is best.
    `dice_of_batches` is of the authors' code and scripts (arXiv:1911.02855).
    """
    plain_SR2, *others = (
        _evaluate_final(A_RARE_CLASS, method, _f1_scores)
        for method in (CROSS_ENTROPY, *FOR_A_RARE_CLASS.values())
    )
    for i in range(2):
        plain_S = _select_best_rate(plain_SR2[..., i])
        yield from (_select_best_rate(f1_SR2[..., i]) - plain_S for f1_SR2 in others)


@measure(f'top_{TOP}_gain_of_spherical')
def ranks() -> Iterator[np.ndarray]:
    """The share of held-out inputs whose class is among the first TOP, over that by cross-entropy.

    Each is of the rate at which its mean over the SEEDS is best, of the networks and RATES of
    `wrong_labels`, and for `spherical_loss` of the best of SPHERICAL (arXiv:1604.08859,
    arXiv:1511.05042).
    """
    plain_SR = _evaluate_final(RANKS, CROSS_ENTROPY, _top_accuracy)
    each = [
        _evaluate_final(RANKS, ('spherical_z', numbers), _top_accuracy) for numbers in SPHERICAL
    ]
    yield _select_best_rate(np.concatenate(each, 1)) - _select_best_rate(plain_SR)


@measure(f'pass_at_{TRIES[-1]}_lost', 'pass_at_1_gained_since', f'pass_at_{TRIES[-1]}_gain_of_dco')
def tries() -> Iterator[np.ndarray]:
    """pass@N, the mean of 1 - (1 - p)^N over held-out inputs, p their class's probability.

    Cross-entropy has the rate at which pass@1 is best at the end, and direct coverage for the last
    N of TRIES that at which pass@N is. `lost` is what pass@N by cross-entropy is at the end below
    what it is after the best of STAGES parts of the steps, and `pass_at_1_gained_since` what pass@1
    rises from there; `gain_of_dco` is at the end (arXiv:2502.07154).
    """
    dco = 'dco', {'dco_tries': TRIES[-1]}
    ce_SRGN, dco_SRGN = (
        _evaluate_stages(SOME_TRIES, method, _pass_rates) for method in (CROSS_ENTROPY, dco)
    )
    ce_SGN = ce_SRGN[:, lab.best_rate_index(ce_SRGN[:, :, -1, 0])]
    dco_SN = dco_SRGN[:, lab.best_rate_index(dco_SRGN[:, :, -1, -1]), -1]
    peak_SN = ce_SGN[:, lab.best_rate_index(ce_SGN[:, :, -1])]
    end_SN = ce_SGN[:, -1]
    yield peak_SN[:, -1] - end_SN[:, -1]
    yield end_SN[:, 0] - peak_SN[:, 0]
    yield dco_SN[:, -1] - end_SN[:, -1]


def _select_best_rate(values_SR: np.ndarray) -> np.ndarray:
    """The values of each seed at the rate at which their mean is largest."""
    return values_SR[:, lab.best_rate_index(values_SR)]


def _top_accuracy(logits_HV: jax.Array, labels_H: jax.Array) -> jax.Array:
    """The share of inputs whose class has one of the TOP largest logits."""
    logit_H1 = jnp.take_along_axis(logits_HV, labels_H[:, None], -1)
    return jnp.mean(jnp.sum(logits_HV > logit_H1, -1) < TOP)


def _pass_rates(logits_HV: jax.Array, labels_H: jax.Array) -> jax.Array:
    """pass@N for N of TRIES."""
    wrong_H = -jnp.expm1(-cross_entropies(logits_HV, labels_H))
    return jnp.stack([jnp.mean(1 - wrong_H**n) for n in TRIES])


def _f1_scores(logits_H2: jax.Array, labels_H: jax.Array) -> jax.Array:
    """F1 of class 1 in the second half of the inputs, with the threshold that is best for the
    first half and with that of 1/2.
    """
    leads_2H = (logits_H2[:, 1] - logits_H2[:, 0]).reshape(2, -1)
    labels_2H = labels_H.reshape(2, -1)
    order = jnp.argsort(-leads_2H[0])
    hits_H = jnp.cumsum(labels_2H[0, order])  # with as many inputs taken as there are up to each
    f1_H = 2 * hits_H / (jnp.arange(1, len(order) + 1) + jnp.sum(labels_2H[0]))
    threshold = leads_2H[0, order[jnp.argmax(f1_H)]]

    def f1_of_prediction(is_taken_H):
        return 2 * jnp.sum(is_taken_H * labels_2H[1]) / (jnp.sum(is_taken_H) + labels_2H[1].sum())

    return jnp.stack(
        [f1_of_prediction(leads_2H[1] >= threshold), f1_of_prediction(leads_2H[1] > 0)]
    )


def _evaluate_final(training: Training, method: Method, evaluate: Callable) -> np.ndarray:
    """`_evaluate_stages` at the end of training, [seed, rate, ...]."""
    return _evaluate_stages(training, method, evaluate)[:, :, -1]


def _evaluate_stages(training: Training, method: Method, evaluate: Callable) -> np.ndarray:
    """Values by judge(logits, labels) of the networks of every seed and rate after each of STAGES,
    [seed, rate, stage, ...]. Numbers of a loss are traced, words are not.
    """
    task, (name, numbers) = training.task, method
    words = {key: value for key, value in numbers.items() if isinstance(value, str)}
    traced = {key: jnp.full(SEEDS, x) for key, x in numbers.items() if key not in words}

    def prepare(given):
        seed, traced = given
        of_data, of_start, of_rows = jax.random.split(jax.random.key(seed), 3)
        start = lab.he_matrices(of_start, (task.inputs, WIDTH, WIDTH, task.classes))
        rows = lab.draw_rows(of_data, task)
        objective = functools.partial(_mean_objective, name, words | traced)
        steps = training.passes * task.n_train // training.batch // STAGES * STAGES
        batches = lab.draw_batches(of_rows, steps, training.batch, task.n_train)

        def run(rate):
            return lab.train(
                lambda params, at_B: objective(params, rows.x[at_B], rows.labels[at_B]),
                start,
                lab.cosine_adam(rate, steps),
                batches,
                observe=lambda params: evaluate(
                    lab.logits(params, rows.held_out), rows.held_out_labels
                ),
                stages=STAGES,
            ).history

        return run

    return lab.map_rates(prepare, (jnp.arange(SEEDS), traced), RATES)


def batch_dice(logits_B2: jax.Array, labels_B: jax.Array, alpha: float, smooth: float) -> jax.Array:
    """Returns 1 - (2 sum q y + g) / (sum q^2 + sum y^2 + g), q = (1 - p)^alpha p, over a batch.

    p is the probability of class 1, y its labels and g = smooth. As in
    https://github.com/ShannonAI/dice_loss_for_NLP with --dice_square and one logit.
    """
    lead_B = logits_B2[:, 1] - logits_B2[:, 0]
    q_B = jnp.exp(alpha * jax.nn.log_sigmoid(-lead_B)) * jax.nn.sigmoid(lead_B)
    sizes = jnp.sum(jnp.square(q_B)) + jnp.sum(labels_B)
    return 1 - (2 * jnp.sum(q_B * labels_B) + smooth) / (sizes + smooth)


def _mean_objective(
    name: str, numbers: LossOptions, params: list, x_BI: Any, labels_B: Any
) -> jax.Array:
    """The mean of a row of LOSSES over rows of one label each, or `dice_of_batches`."""
    if name == 'dice_of_batches':
        return batch_dice(lab.logits(params, x_BI), labels_B, **numbers)
    readout = Readout(params[-1], None, 0.0, direct, jnp.dtype('float32'))
    x_B1D, labels_B1 = lab.features(params, x_BI)[:, None], labels_B[:, None]
    sums = LOSSES[name](x_B1D, readout, labels_B1, jnp.ones(labels_B1.shape), **numbers)
    return sums['objective'] / len(x_BI)
