"""Small classifiers by losses of the project: wrong labels, a rare class, ranks and tries."""

import dataclasses
import functools
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims.estimates import Estimate, over_seeds
from eval.claims.measures.gaussians import Task, drawn, features_of, logits_of, matrices
from modules.kernels.matmul import direct
from modules.losses import LOSSES
from modules.losses.base import cross_entropies
from modules.products import Readout

WIDTH = 128
RATES = (1e-4, 3e-4, 1e-3, 3e-3, 1e-2)  # of Adam, falling to 0 by a cosine
STAGES = 8  # equal parts of the steps, after each of which a network is judged
SEEDS = 10
SHARES_WRONG = (0.0, 0.4)
TOP = 10  # words of a list
TRIES = (1, 4, 16)

Numbers = Mapping[str, Any]
Method = tuple[str, Numbers]  # a row of LOSSES and its numbers
CROSS_ENTROPY: Method = ('comp_sum', {'tau': 1.0})
FOR_WRONG_LABELS: Mapping[str, Method] = {
    'cross_entropy': CROSS_ENTROPY,
    **{f'comp_sum_{tau}': ('comp_sum', {'tau': tau}) for tau in (0.5, 1.3, 1.7)},
    'ldr': ('ldr_kl', {}),
    'aldr': ('aldr_kl', {}),
    'aldr_of_l1_scores': ('aldr_kl', {'ldr_scores': 'l1'}),
}
FOR_A_RARE_CLASS: Mapping[str, Method] = {
    'cross_entropy': CROSS_ENTROPY,
    'focal': ('focal', {}),
    **{f'dice_{alpha}': ('dice', {'dice_alpha': alpha}) for alpha in (0.0, 0.6, 1.0)},
    'dice_of_batches': ('dice_of_batches', {'alpha': 0.01, 'smooth': 1.0}),
}
FOR_RANKS: Mapping[str, Method] = {
    'cross_entropy': CROSS_ENTROPY,
    'taylor_softmax': ('taylor_softmax', {}),
}
SPHERICAL: tuple[Numbers, ...] = tuple(
    {'spherical_a': a, 'spherical_b': b} for a in (0.1, 1.0) for b in (5.0, 10.0, 20.0)
)
FOR_TRIES: Mapping[str, Method] = {
    'cross_entropy': CROSS_ENTROPY,
    'dco': ('dco', {'dco_tries': TRIES[-1]}),
}


WRONG_LABELS = Task(10, 30, 0.7, trained=1024, held_out=4096, passes=40)
A_RARE_CLASS = Task(2, 32, 0.7, trained=8192, held_out=65536, passes=24, batch=512, rare=0.01)
RANKS = Task(512, 512, 0.9, trained=8192, held_out=4096, passes=8)
SOME_TRIES = Task(64, 128, 0.9, trained=2048, held_out=4096, passes=40)


def wrong_labels() -> dict[str, Estimate]:
    """Returns the clean accuracy of classifiers by losses, with SHARES_WRONG of their labels wrong.

    It is a share of held-out inputs with right labels, and `gain` what it is above that by
    cross-entropy. A network has two hidden layers of WIDTH, with one start and order of batches for
    all losses, each at the rate of RATES at which its mean over the SEEDS is best
    (arXiv:2304.07288, arXiv:2112.14869).
    """
    found = {}
    for wrong in SHARES_WRONG:
        task = dataclasses.replace(WRONG_LABELS, wrong=wrong)
        right = {
            name: _best(_judged(task, method, _accuracy))
            for name, method in FOR_WRONG_LABELS.items()
        }
        found |= _with_gains(f'accuracy_at_{wrong}', right)
    return found


def rare_class() -> dict[str, Estimate]:
    """Returns F1 = 2 hits / (2 hits + false alarms + misses) of a class of one input in a hundred.

    `f1_at_half` takes the inputs whose probability of it is above 1/2, `f1` those above the
    threshold that is best for one half of the held-out inputs, and is of the other half. `gain` is
    over cross-entropy, judged alike. Networks and RATES are those of `wrong_labels`, and each value
    is of the rate at which its mean is best. `dice_of_batches` is of the authors' code and scripts
    (arXiv:1911.02855).
    """
    both = {name: _judged(A_RARE_CLASS, one, _f1) for name, one in FOR_A_RARE_CLASS.items()}
    found = {}
    for i, what in enumerate(('f1', 'f1_at_half')):
        found |= _with_gains(what, {name: _best(f1_SR2[..., i]) for name, f1_SR2 in both.items()})
    return found


def ranks() -> dict[str, Estimate]:
    """Returns the share of held-out inputs whose class is the first, and among the first TOP.

    Each is of the rate at which its mean over the SEEDS is best, of the networks and RATES of
    `wrong_labels`, and for `spherical` of the best of SPHERICAL; `gain` is over cross-entropy
    (arXiv:1604.08859, arXiv:1511.05042).
    """
    shares = {name: _judged(RANKS, method, _among_first) for name, method in FOR_RANKS.items()}
    each = [_judged(RANKS, ('spherical_z', numbers), _among_first) for numbers in SPHERICAL]
    shares['spherical'] = np.concatenate(each, 1)
    found = {}
    for i, count in enumerate((1, TOP)):
        of_count = {name: _best(share_SR2[..., i]) for name, share_SR2 in shares.items()}
        found |= _with_gains(f'top_{count}', of_count)
    return found


def tries() -> dict[str, Estimate]:
    """Returns pass@N, the mean of 1 - (1 - p)^N over held-out inputs, p their class's probability.

    Cross-entropy has the rate at which pass@1 is best at the end, and direct coverage for the last
    N of TRIES that at which pass@N is. `lost` is what pass@N by cross-entropy is at the end below
    what it is after the best of STAGES parts of the steps, and `pass_at_1_gained_since` what pass@1
    rises from there; `gain_of_dco` is at the end, and `over_the_best` over that best stage
    (arXiv:2502.07154).
    """
    ce_SRGN, dco_SRGN = (
        _judged(SOME_TRIES, method, _passes, every_stage=True) for method in FOR_TRIES.values()
    )
    ce_SGN = ce_SRGN[:, ce_SRGN[:, :, -1, 0].mean(0).argmax()]
    dco_SGN = dco_SRGN[:, dco_SRGN[:, :, -1, -1].mean(0).argmax()]
    peak_SN = ce_SGN[:, ce_SGN[:, :, -1].mean(0).argmax()]
    end_SN, dco_SN = ce_SGN[:, -1], dco_SGN[:, -1]
    most = f'pass_at_{TRIES[-1]}'
    found = {
        f'{most}_lost': peak_SN[:, -1] - end_SN[:, -1],
        'pass_at_1_gained_since': end_SN[:, 0] - peak_SN[:, 0],
        f'{most}_gain_of_dco': dco_SN[:, -1] - end_SN[:, -1],
        f'{most}_gain_of_dco_over_the_best': dco_SN[:, -1] - peak_SN[:, -1],
    }
    for i, n in enumerate(TRIES):
        found[f'pass_at_{n}_by_cross_entropy'] = end_SN[:, i]
        found[f'pass_at_{n}_by_dco'] = dco_SN[:, i]
    return {name: over_seeds(values) for name, values in found.items()}


def _with_gains(what: str, values: Mapping[str, np.ndarray]) -> dict[str, Estimate]:
    """Estimates of the values of each loss, and of those of others less those of cross-entropy."""
    found = {f'{what}_by_{name}': over_seeds(values_S) for name, values_S in values.items()}
    for name, values_S in values.items():
        if name != 'cross_entropy':
            gain_S = values_S - values['cross_entropy']
            found[f'{what}_gain_of_{name}'] = over_seeds(gain_S)
    return found


def _best(values_SR: np.ndarray) -> np.ndarray:
    """The values of each seed at the rate at which their mean is largest."""
    return values_SR[:, np.argmax(values_SR.mean(0))]


def _accuracy(logits_HV: jax.Array, labels_H: jax.Array) -> jax.Array:
    return jnp.mean(jnp.argmax(logits_HV, -1) == labels_H)


def _among_first(logits_HV: jax.Array, labels_H: jax.Array) -> jax.Array:
    """Shares of inputs whose class has the largest logit, and one of the TOP largest."""
    own_H1 = jnp.take_along_axis(logits_HV, labels_H[:, None], -1)
    rank_H = jnp.sum(logits_HV > own_H1, -1)
    return jnp.stack([jnp.mean(rank_H < 1), jnp.mean(rank_H < TOP)])


def _passes(logits_HV: jax.Array, labels_H: jax.Array) -> jax.Array:
    """pass@N for N of TRIES."""
    wrong_H = -jnp.expm1(-cross_entropies(logits_HV, labels_H))
    return jnp.stack([jnp.mean(1 - wrong_H**n) for n in TRIES])


def _f1(logits_H2: jax.Array, labels_H: jax.Array) -> jax.Array:
    """F1 of class 1 in the second half of the inputs, with the threshold that is best for the
    first half and with that of 1/2.
    """
    leads_2H = (logits_H2[:, 1] - logits_H2[:, 0]).reshape(2, -1)
    labels_2H = labels_H.reshape(2, -1)
    order = jnp.argsort(-leads_2H[0])
    hits_H = jnp.cumsum(labels_2H[0, order])  # with as many inputs taken as there are up to each
    f1_H = 2 * hits_H / (jnp.arange(1, len(order) + 1) + jnp.sum(labels_2H[0]))
    threshold = leads_2H[0, order[jnp.argmax(f1_H)]]

    def judged(is_taken_H):
        return 2 * jnp.sum(is_taken_H * labels_2H[1]) / (jnp.sum(is_taken_H) + labels_2H[1].sum())

    return jnp.stack([judged(leads_2H[1] >= threshold), judged(leads_2H[1] > 0)])


def _judged(
    task: Task, method: Method, judge: Callable[..., jax.Array], every_stage: bool = False
) -> np.ndarray:
    """Values by a judge of the networks of every seed and rate, [seed, rate, ...], at the end or
    after each of STAGES, [seed, rate, stage, ...].
    """
    name, numbers = method
    words = tuple((key, value) for key, value in numbers.items() if isinstance(value, str))
    traced = {key: value for key, value in numbers.items() if not isinstance(value, str)}
    found = np.float64(_program(task, name, words, judge)(jnp.arange(SEEDS), traced))
    return found if every_stage else found[:, :, -1]


@functools.cache
def _program(task: Task, name: str, words: tuple, judge: Callable[..., jax.Array]) -> Callable:
    """The program of all seeds and rates by a row of LOSSES, whose numbers are traced."""

    @jax.jit
    def judged(seeds, numbers):
        objective = functools.partial(_objective, name, dict(words) | numbers)

        def of_seed(seed):
            of_data, of_start, of_rows = jax.random.split(jax.random.key(seed), 3)
            params = matrices(of_start, (task.inputs, WIDTH, WIDTH, task.classes))
            given = drawn(task, of_data), params, of_rows
            trained = functools.partial(_trained, task, objective, judge, *given)
            return jax.lax.map(trained, jnp.float32(RATES))

        return jax.lax.map(of_seed, seeds)

    return judged


def _trained(task, objective, judge, rows, params, key, rate) -> jax.Array:
    """Values by the judge after each of STAGES parts of the steps, whose rates fall to 0."""
    x, labels, held_out, held_out_labels = rows
    in_a_stage = task.passes * task.trained // task.batch // STAGES
    steps = in_a_stage * STAGES
    transform = optax.adam(optax.cosine_decay_schedule(1.0, steps))

    def step(carry, at_B):
        params, state = carry
        grads = jax.grad(objective)(params, x[at_B], labels[at_B])
        updates, state = transform.update(grads, state)
        updates = jax.tree.map(lambda u: rate * u, updates)
        return (optax.apply_updates(params, updates), state), None

    def stage(carry, at_TB):
        carry, _ = jax.lax.scan(step, carry, at_TB)
        return carry, judge(logits_of(carry[0], held_out), held_out_labels)

    at_GTB = jax.random.randint(key, (STAGES, in_a_stage, task.batch), 0, task.trained)
    _, judged_G = jax.lax.scan(stage, (params, transform.init(params)), at_GTB)
    return judged_G


def dice_of_batches(
    logits_B2: jax.Array, labels_B: jax.Array, alpha: float, smooth: float
) -> jax.Array:
    """Returns 1 - (2 sum q y + g) / (sum q^2 + sum y^2 + g), q = (1 - p)^alpha p, over a batch.

    p is the probability of class 1, y its labels and g = smooth. As in
    https://github.com/ShannonAI/dice_loss_for_NLP with --dice_square and one logit.
    """
    lead_B = logits_B2[:, 1] - logits_B2[:, 0]
    q_B = jnp.exp(alpha * jax.nn.log_sigmoid(-lead_B)) * jax.nn.sigmoid(lead_B)
    sizes = jnp.sum(jnp.square(q_B)) + jnp.sum(labels_B)
    return 1 - (2 * jnp.sum(q_B * labels_B) + smooth) / (sizes + smooth)


def _objective(name: str, numbers: Numbers, params: list, x_BI: Any, labels_B: Any) -> jax.Array:
    """The mean of a row of LOSSES over rows of one label each, or `dice_of_batches`."""
    if name == 'dice_of_batches':
        return dice_of_batches(logits_of(params, x_BI), labels_B, **numbers)
    readout = Readout(params[-1], None, 0.0, direct, jnp.dtype('float32'))
    x_B1D, labels_B1 = features_of(params, x_BI)[:, None], labels_B[:, None]
    sums = LOSSES[name](x_B1D, readout, labels_B1, jnp.ones(labels_B1.shape), **numbers)
    return sums['objective'] / len(x_BI)
