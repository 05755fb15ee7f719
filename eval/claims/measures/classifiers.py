"""Small classifiers by the project's losses: wrong labels, a rare class, ranks and tries."""

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims import lab
from eval.claims.estimates import Estimate
from eval.claims.lab import Task, measure
from modules.kernels.matmul import direct
from modules.losses import LOSSES
from modules.losses.base import cross_entropies
from modules.products import Readout

WIDTH = 128
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2, 3e-2, 0.1)  # of Adam, falling to 0 by a cosine
SEEDS = lab.TUNING_SEEDS + 10
STAGES = 8  # equal parts of the steps, after each of which `tries` evaluates a network
TOP = 10  # words of a list
TRIES = (1, 16)
ONE_ROW = 'dco_of_one_row'

Method = tuple[str, Mapping[str, Any]]  # a row of LOSSES and its options
CROSS_ENTROPY: Method = ('comp_sum', {'tau': 1.0})
# The authors' options (arXiv:2112.14869, experiment.py).
LDR: Mapping[str, Any] = {'ldr_lambda': 10.0, 'ldr_margin': 0.1, 'ldr_scores': 'l1'}
ALDR = {**LDR, 'ldr_alpha': 2.0}
ROBUST: Mapping[str, Method] = {
    'comp_sum_1.7': ('comp_sum', {'tau': 1.7}),
    'aldr_of_l1_scores': ('aldr_kl', ALDR),
}
FOR_WRONG_LABELS: Mapping[float, Mapping[str, Method]] = {  # by the share of wrong labels
    0.0: {**ROBUST, 'absolute_error': ('comp_sum', {'tau': 2.0})},
    0.4: {
        **ROBUST,
        'ldr_of_l1_scores': ('ldr_kl', LDR),
        'comp_sum_0.7': ('comp_sum', {'tau': 0.7}),
        'aldr_of_inverse_lambda': ('aldr_kl', {**ALDR, 'ldr_lambda': 1 / LDR['ldr_lambda']}),
    },
}
FOR_A_RARE_CLASS: Mapping[str, Method] = {
    'dice_1.0': ('dice', {'dice_alpha': 1.0}),
    'dice_of_batches': ('dice_of_batches', {'alpha': 0.01, 'smooth': 1.0}),
    'dice_without_sum_of_labels': (
        'dice_of_batches',
        {'alpha': 0.01, 'smooth': 1.0, 'label_weight': 0.0},
    ),
}
SPHERICAL: Sequence[Method] = tuple(
    ('spherical_z', {'spherical_a': a, 'spherical_b': b})
    for a in (0.1, 1.0)
    for b in (5.0, 10.0, 20.0)
)


@dataclasses.dataclass(frozen=True)
class Training:
    """A task, the passes over its rows, and the rows of a batch."""

    task: Task
    passes: int
    batch: int = 64


WRONG_LABELS = Training(Task(10, 30, 0.7, n_train=1024, n_held_out=4096), passes=40)
A_RARE_CLASS = Training(
    Task(2, 32, 0.7, n_train=8192, n_held_out=65536, rare=0.01), passes=24, batch=512
)
RANKS = Training(Task(512, 512, 0.9, n_train=8192, n_held_out=4096), passes=8)
SOME_TRIES = Training(Task(64, 128, 0.9, n_train=2048, n_held_out=4096), passes=40)


@measure(
    *(
        f'accuracy_at_{wrong}_gain_of_{name}'
        for wrong, methods in FOR_WRONG_LABELS.items()
        for name in methods
    ),
    'accuracy_at_0.4_gain_of_fewer_wrong_labels',
)
def wrong_labels() -> Iterator[Estimate]:
    """Yields the gain in clean accuracy over cross-entropy, with a share of the labels wrong.

    Accuracy is a share of held-out inputs with correct labels. Networks have two hidden layers of
    WIDTH; initial weights and order of batches are the same for all losses. Each loss has the rate
    of RATES that is best on TUNING_SEEDS seeds, and is evaluated on the other seeds
    (arXiv:2304.07288, arXiv:2112.14869).

    Absolute error is known to train badly, and LDR-KL with a large lambda, which is nearly linear
    in bounded scores, to resist wrong labels. Two losses are broken: `comp_sum_0.7` has q in place
    of 1 + q, so that wrong rows weigh more, and `aldr_of_inverse_lambda` multiplies margins by
    lambda instead of dividing by it. `fewer_wrong_labels` is cross-entropy with 30% wrong labels,
    minus cross-entropy with 40%.
    """

    def tune(wrong: float, method: Method) -> lab.Tuned:
        task = dataclasses.replace(WRONG_LABELS.task, wrong=wrong)
        (tuned,) = _tune(dataclasses.replace(WRONG_LABELS, task=task), [method], lab.accuracy)
        return tuned

    rivals = {wrong: tune(wrong, CROSS_ENTROPY) for wrong in (0.0, 0.3, 0.4)}
    for wrong, methods in FOR_WRONG_LABELS.items():
        for method in methods.values():
            yield lab.estimate_difference(tune(wrong, method), rivals[wrong])
    yield lab.estimate_difference(rivals[0.3], rivals[0.4])


@measure(
    *(
        f'{score}_gain_of_{name}'
        for name in (*FOR_A_RARE_CLASS, 'fewer_rows')
        for score in ('f1', 'f1_at_half')
    )
)
def rare_class() -> Iterator[Estimate]:
    """Yields the gain in F1 over cross-entropy for a class of one input in a hundred.

    F1 = 2 hits / (2 hits + false alarms + misses). `f1_at_half` predicts the class above a
    probability of 1/2, `f1` above the threshold that is best on one half of the held-out inputs;
    both are evaluated on the other half. Networks and rates as in `wrong_labels`, with a rate for
    each of the two. `dice_of_batches` follows the authors' code and scripts (arXiv:1911.02855);
    `dice_without_sum_of_labels` mistakenly lacks a term of its denominator. `fewer_rows` is
    cross-entropy on a quarter of the rows, with as many steps.
    """
    task, passes = A_RARE_CLASS.task, A_RARE_CLASS.passes
    fewer_rows = dataclasses.replace(
        A_RARE_CLASS, task=dataclasses.replace(task, n_train=task.n_train // 4), passes=4 * passes
    )
    rivals = list(_tune(A_RARE_CLASS, [CROSS_ENTROPY], _f1_scores))
    arms = [(A_RARE_CLASS, method) for method in FOR_A_RARE_CLASS.values()]
    for training, method in (*arms, (fewer_rows, CROSS_ENTROPY)):
        yield from map(lab.estimate_difference, _tune(training, [method], _f1_scores), rivals)


@measure(f'top_{TOP}_gain_of_spherical', f'top_{TOP}_gain_of_nearest_centre')
def ranks() -> Iterator[Estimate]:
    """Yields the gain in top-TOP accuracy over cross-entropy.

    It is the share of held-out inputs with their class among the first TOP. Networks and rates as
    in `wrong_labels`; TUNING_SEEDS seeds choose among SPHERICAL too (arXiv:1604.08859,
    arXiv:1511.05042). `nearest_centre` ranks classes by the distance to their true centres, which
    is the best ranking possible.
    """
    (rival,) = _tune(RANKS, [CROSS_ENTROPY], _top_accuracy)
    (spherical,) = _tune(RANKS, SPHERICAL, _top_accuracy)
    yield lab.estimate_difference(spherical, rival)
    best_S = np.array(lab.map_seeds(_rank_by_centre, jnp.arange(lab.TUNING_SEEDS, SEEDS)))
    yield lab.estimate_difference(lab.Tuned(best_S, 0, is_at_end=False), rival)


@measure(
    f'pass_at_{TRIES[-1]}_lost',
    'pass_at_1_gained_since',
    f'pass_at_{TRIES[-1]}_of_mean_probability_lost',
    f'pass_at_{TRIES[-1]}_gain_of_dco',
    'pass_at_1_loss_of_dco',
    *(f'pass_at_{TRIES[-1]}_gain_at_best_pass_at_1_of_{name}' for name in ('dco', ONE_ROW)),
)
def tries() -> Iterator[np.ndarray | Estimate]:
    """Yields differences of pass@N, the mean of 1 - (1 - p)^N over held-out inputs of class
    probability p, for N of TRIES.

    First for cross-entropy at the rate with the best pass@1 at the end. `lost`: pass@N after the
    best of STAGES parts of the steps, minus pass@N at the end. `pass_at_1_gained_since`: how much
    pass@1 rises from there. `of_mean_probability_lost`: as `lost`, with 1 - (1 - mean(p))^N, a
    broken pass@N.

    Then direct coverage minus cross-entropy at the end (arXiv:2502.07154), both at the rate with
    the best pass@N for the last of TRIES; how much lower its pass@1 is at these rates; and the gain
    in pass@N with both at the rate with the best pass@1, for direct coverage and for
    `dco_of_one_row`, where p is mistakenly the probability of all rows of a batch together.
    TUNING_SEEDS seeds choose rates and the stage, the others count.
    """
    options = {'dco_tries': TRIES[-1]}
    ce_SRGN, *dcos_SRGN = (
        _evaluate(SOME_TRIES, method, _pass_rates, range(SEEDS), RATES, STAGES)
        for method in (CROSS_ENTROPY, ('dco', options), (ONE_ROW, options))
    )
    ce_at_1, *dcos_at_1 = (lab.tune(x_SRGN[:, :, -1, 0]) for x_SRGN in (ce_SRGN, *dcos_SRGN))
    ce_SGN = ce_at_1.select(ce_SRGN)
    peak = np.argmax(ce_SRGN[: lab.TUNING_SEEDS, ce_at_1.index, :, -1].mean(0))
    peak_SN, end_SN = ce_SGN[:, peak], ce_SGN[:, -1]
    yield peak_SN[:, -1] - end_SN[:, -1]
    yield end_SN[:, 0] - peak_SN[:, 0]
    yield (1 - end_SN[:, 0]) ** TRIES[-1] - (1 - peak_SN[:, 0]) ** TRIES[-1]
    ce, dco = (lab.tune(x_SRGN[:, :, -1, -1]) for x_SRGN in (ce_SRGN, dcos_SRGN[0]))
    yield lab.estimate_difference(dco, ce)
    yield ce.select(ce_SRGN)[:, -1, 0] - dco.select(dcos_SRGN[0])[:, -1, 0]
    yield from (
        tuned.select(x_SRGN)[:, -1, -1] - end_SN[:, -1]
        for tuned, x_SRGN in zip(dcos_at_1, dcos_SRGN, strict=True)
    )


def _tune(training: Training, methods: Sequence[Method], evaluate: Callable) -> Iterator[lab.Tuned]:
    """Yields each score of `evaluate` at the method and the rate that are best for it.

    TUNING_SEEDS seeds choose among methods and RATES; the other seeds have the chosen rate alone.

    Args:
      training: the task and its passes.
      methods: losses to choose from.
      evaluate: (logits, labels) of held-out inputs -> a score, or several.
    """
    tuning, fresh = range(lab.TUNING_SEEDS), range(lab.TUNING_SEEDS, SEEDS)
    scores_of_methods = [
        np.atleast_3d(_evaluate(training, method, evaluate, tuning, RATES)[:, :, -1])
        for method in methods
    ]
    for i in range(scores_of_methods[0].shape[-1]):
        scores_SR, method = max(
            (
                (scores_SRN[..., i], method)
                for scores_SRN, method in zip(scores_of_methods, methods, strict=True)
            ),
            key=lambda candidate: candidate[0].mean(0).max(),
        )
        tuned = lab.tune(scores_SR)
        rate = RATES[tuned.index]
        fresh_SRN = np.atleast_3d(_evaluate(training, method, evaluate, fresh, [rate])[:, :, -1])
        yield dataclasses.replace(tuned, scores=fresh_SRN[:, 0, i])


def _top_accuracy(logits_HV: jax.Array, labels_H: jax.Array) -> jax.Array:
    """Returns the share of inputs with their class among the TOP largest logits."""
    logit_H1 = jnp.take_along_axis(logits_HV, labels_H[:, None], -1)
    # Equal logits count as larger: a network that died, with logits of 0, would be perfect.
    return jnp.mean(jnp.sum(logits_HV >= logit_H1, -1) <= TOP)


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


def _evaluate(
    training: Training,
    method: Method,
    evaluate: Callable,
    seeds: Iterable[int],
    rates: Sequence[float],
    stages: int = 1,
) -> np.ndarray:
    """Returns evaluate(logits, labels) of held-out inputs, [seed, rate, stage, ...].

    Args:
      training: the task and its passes.
      method: the loss.
      evaluate: (logits [H, V], labels [H]) -> scores.
      seeds: of the rows, the initial weights and the batches.
      rates: of Adam.
      stages: equal parts of the steps, after each of which the network is evaluated.
    """
    task = training.task
    steps = training.passes * task.n_train // training.batch // stages * stages

    def prepare(seed):
        data_key, start_key, row_key = _split_seed(seed)
        start = lab.he_matrices(start_key, (task.inputs, WIDTH, WIDTH, task.classes))
        rows = lab.draw_rows(data_key, task)
        batches = lab.draw_batches(row_key, steps, training.batch, task.n_train)

        def run(rate):
            return lab.train(
                lambda params, index_B: _mean_objective(
                    method, params, rows.x[index_B], rows.labels[index_B]
                ),
                start,
                lab.cosine_adam(rate, steps),
                batches,
                observe=lambda params: evaluate(
                    lab.logits(params, rows.held_out), rows.held_out_labels
                ),
                stages=stages,
            ).history

        return run

    return lab.map_rates(prepare, jnp.array(list(seeds)), rates)


def _split_seed(seed: jax.Array) -> jax.Array:
    """Returns the keys of the rows, the initial weights and the batches."""
    return jax.random.split(jax.random.key(seed), 3)


def _rank_by_centre(seed: jax.Array) -> jax.Array:
    """Returns `_top_accuracy` of the distances to the centres of RANKS, one for each class."""
    data_key, _, _ = _split_seed(seed)
    task = RANKS.task
    rows = lab.draw_rows(data_key, task)
    centres = lab.draw_rows(data_key, dataclasses.replace(task, spread=0.0))  # rows without noise
    centre_VI = jnp.zeros((task.classes, task.inputs)).at[centres.labels].set(centres.x)
    # |x - c|^2 = |x|^2 - 2 x c + |c|^2, in which |x|^2 does not change ranks.
    logits_HV = rows.held_out @ centre_VI.T - jnp.sum(centre_VI**2, -1)[None] / 2
    return _top_accuracy(logits_HV, rows.held_out_labels)


def batch_dice(
    logits_B2: jax.Array,
    labels_B: jax.Array,
    alpha: float,
    smooth: float,
    label_weight: float = 1.0,
) -> jax.Array:
    """Returns 1 - (2 sum q y + g) / (sum q^2 + w sum y^2 + g) over a batch, q = (1 - p)^alpha p.

    As in https://github.com/ShannonAI/dice_loss_for_NLP with --dice_square and a single logit.

    Args:
      logits_B2: logits; p is the probability of class 1.
      labels_B: y, 0 or 1.
      alpha: exponent of 1 - p.
      smooth: g.
      label_weight: w, 1 in the code; 0 breaks the loss.
    """
    margin_B = logits_B2[:, 1] - logits_B2[:, 0]
    q_B = jnp.exp(alpha * jax.nn.log_sigmoid(-margin_B)) * jax.nn.sigmoid(margin_B)
    sizes = jnp.sum(jnp.square(q_B)) + label_weight * jnp.sum(labels_B)
    return 1 - (2 * jnp.sum(q_B * labels_B) + smooth) / (sizes + smooth)


def _mean_objective(method: Method, params: list, x_BI: Any, labels_B: Any) -> jax.Array:
    """Returns the mean of a row of LOSSES over rows with a single label, or `batch_dice`.

    Args:
      method: the loss; ONE_ROW is `dco` of a single row with all labels of the batch.
      params: matrices of the network.
      x_BI: inputs.
      labels_B: their classes.
    """
    name, options = method
    if name == 'dice_of_batches':
        return batch_dice(lab.logits(params, x_BI), labels_B, **options)
    readout = Readout(params[-1], None, 0.0, direct, jnp.dtype('float32'))
    axis = 0 if name == ONE_ROW else 1  # of length 1: a row per batch, or a label per row
    x, labels = (jnp.expand_dims(a, axis) for a in (lab.features(params, x_BI), labels_B))
    loss = LOSSES['dco' if name == ONE_ROW else name]
    return loss(x, readout, labels, jnp.ones(labels.shape), **options)['objective'] / len(x_BI)
