"""Small classifiers by the project's losses: wrong labels, a rare class, ranks and tries."""

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
    """A task, the passes over its rows, and the rows of a batch."""

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
    """Yields the gain in clean accuracy over cross-entropy, with SHARES_WRONG of the labels wrong.

    Accuracy is a share of held-out inputs with correct labels. Networks have two hidden layers of
    WIDTH; initial weights and order of batches are the same for all losses. Each loss has the rate
    of RATES with the best mean over SEEDS (arXiv:2304.07288, arXiv:2112.14869).
    """
    for wrong in SHARES_WRONG:
        task = dataclasses.replace(WRONG_LABELS.task, wrong=wrong)
        training = dataclasses.replace(WRONG_LABELS, task=task)
        plain_S, *accuracies = (
            _select_best_rate(_evaluate_final(training, method, lab.accuracy))
            for method in (CROSS_ENTROPY, *FOR_WRONG_LABELS.values())
        )
        yield from (accuracy_S - plain_S for accuracy_S in accuracies)


@measure(*(f'{what}_gain_of_{name}' for what in ('f1', 'f1_at_half') for name in FOR_A_RARE_CLASS))
def rare_class() -> Iterator[np.ndarray]:
    """Yields the gain in F1 over cross-entropy for a class of one input in a hundred.

    F1 = 2 hits / (2 hits + false alarms + misses). `f1_at_half` predicts the class above a
    probability of 1/2, `f1` above the threshold that is best on one half of the held-out inputs;
    both are evaluated on the other half. Networks and RATES as in `wrong_labels`; each value has
    the rate with the best mean. `dice_of_batches` follows the authors' code and scripts
    (arXiv:1911.02855).
    """
    plain_SR2, *scores = (
        _evaluate_final(A_RARE_CLASS, method, _f1_scores)
        for method in (CROSS_ENTROPY, *FOR_A_RARE_CLASS.values())
    )
    for i in range(2):
        plain_S = _select_best_rate(plain_SR2[..., i])
        yield from (_select_best_rate(f1_SR2[..., i]) - plain_S for f1_SR2 in scores)


@measure(f'top_{TOP}_gain_of_spherical')
def ranks() -> Iterator[np.ndarray]:
    """Yields the gain in top-TOP accuracy over cross-entropy.

    It is the share of held-out inputs with their class among the first TOP. Networks and RATES as
    in `wrong_labels`, each at the rate with the best mean over SEEDS; `spherical` has the best of
    SPHERICAL too (arXiv:1604.08859, arXiv:1511.05042).
    """
    plain_SR = _evaluate_final(RANKS, CROSS_ENTROPY, _top_accuracy)
    candidates_SR = [
        _evaluate_final(RANKS, ('spherical_z', options), _top_accuracy) for options in SPHERICAL
    ]
    yield _select_best_rate(np.concatenate(candidates_SR, 1)) - _select_best_rate(plain_SR)


@measure(f'pass_at_{TRIES[-1]}_lost', 'pass_at_1_gained_since', f'pass_at_{TRIES[-1]}_gain_of_dco')
def tries() -> Iterator[np.ndarray]:
    """Yields differences of pass@N, the mean of 1 - (1 - p)^N over held-out inputs of class
    probability p.

    Cross-entropy has the rate with the best pass@1 at the end, direct coverage the rate with the
    best pass@N for the last N of TRIES. `lost`: pass@N of cross-entropy after the best of STAGES
    parts of the steps, minus pass@N at the end. `pass_at_1_gained_since`: how much pass@1 rises
    from there. `gain_of_dco`: direct coverage minus cross-entropy at the end (arXiv:2502.07154).
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
    """Returns the values of each seed at the rate with the largest mean."""
    return values_SR[:, lab.best_rate_index(values_SR)]


def _top_accuracy(logits_HV: jax.Array, labels_H: jax.Array) -> jax.Array:
    """Returns the share of inputs with their class among the TOP largest logits."""
    logit_H1 = jnp.take_along_axis(logits_HV, labels_H[:, None], -1)
    return jnp.mean(jnp.sum(logits_HV > logit_H1, -1) < TOP)


def _pass_rates(logits_HV: jax.Array, labels_H: jax.Array) -> jax.Array:
    """Returns pass@N for each N of TRIES."""
    wrong_H = -jnp.expm1(-cross_entropies(logits_HV, labels_H))
    return jnp.stack([jnp.mean(1 - wrong_H**n) for n in TRIES])


def _f1_scores(logits_H2: jax.Array, labels_H: jax.Array) -> jax.Array:
    """Returns F1 of class 1 on the second half of the inputs, [2].

    The thresholds are the best of the first half, and a probability of 1/2.
    """
    margins_2H = (logits_H2[:, 1] - logits_H2[:, 0]).reshape(2, -1)
    labels_2H = labels_H.reshape(2, -1)
    order = jnp.argsort(-margins_2H[0])
    hits_H = jnp.cumsum(labels_2H[0, order])  # with as many inputs taken as there are up to each
    f1_H = 2 * hits_H / (jnp.arange(1, len(order) + 1) + jnp.sum(labels_2H[0]))
    threshold = margins_2H[0, order[jnp.argmax(f1_H)]]

    def f1_score(is_predicted_H):
        return (
            2
            * jnp.sum(is_predicted_H * labels_2H[1])
            / (jnp.sum(is_predicted_H) + labels_2H[1].sum())
        )

    return jnp.stack([f1_score(margins_2H[1] >= threshold), f1_score(margins_2H[1] > 0)])


def _evaluate_final(training: Training, method: Method, evaluate: Callable) -> np.ndarray:
    """Returns `_evaluate_stages` at the end of training, [seed, rate, ...]."""
    return _evaluate_stages(training, method, evaluate)[:, :, -1]


def _evaluate_stages(training: Training, method: Method, evaluate: Callable) -> np.ndarray:
    """Returns evaluate(logits, labels) of held-out inputs, [seed, rate, stage, ...].

    Numeric options of a loss are traced, strings are static.
    """
    task, (name, options) = training.task, method
    static = {key: value for key, value in options.items() if isinstance(value, str)}
    traced = {key: jnp.full(SEEDS, x) for key, x in options.items() if key not in static}

    def prepare(seed_and_options):
        seed, traced = seed_and_options
        data_key, start_key, row_key = jax.random.split(jax.random.key(seed), 3)
        start = lab.he_matrices(start_key, (task.inputs, WIDTH, WIDTH, task.classes))
        rows = lab.draw_rows(data_key, task)
        objective = functools.partial(_mean_objective, name, static | traced)
        steps = training.passes * task.n_train // training.batch // STAGES * STAGES
        batches = lab.draw_batches(row_key, steps, training.batch, task.n_train)

        def run(rate):
            return lab.train(
                lambda params, index_B: objective(params, rows.x[index_B], rows.labels[index_B]),
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
    """Returns 1 - (2 sum q y + g) / (sum q^2 + sum y^2 + g) over a batch, q = (1 - p)^alpha p.

    As in https://github.com/ShannonAI/dice_loss_for_NLP with --dice_square and a single logit.

    Args:
      logits_B2: logits; p is the probability of class 1.
      labels_B: y, 0 or 1.
      alpha: exponent of 1 - p.
      smooth: g.
    """
    margin_B = logits_B2[:, 1] - logits_B2[:, 0]
    q_B = jnp.exp(alpha * jax.nn.log_sigmoid(-margin_B)) * jax.nn.sigmoid(margin_B)
    sizes = jnp.sum(jnp.square(q_B)) + jnp.sum(labels_B)
    return 1 - (2 * jnp.sum(q_B * labels_B) + smooth) / (sizes + smooth)


def _mean_objective(
    name: str, options: LossOptions, params: list, x_BI: Any, labels_B: Any
) -> jax.Array:
    """Returns the mean of a row of LOSSES over rows with a single label, or `batch_dice`."""
    if name == 'dice_of_batches':
        return batch_dice(lab.logits(params, x_BI), labels_B, **options)
    readout = Readout(params[-1], None, 0.0, direct, jnp.dtype('float32'))
    x_B1D, labels_B1 = lab.features(params, x_BI)[:, None], labels_B[:, None]
    sums = LOSSES[name](x_B1D, readout, labels_B1, jnp.ones(labels_B1.shape), **options)
    return sums['objective'] / len(x_BI)
