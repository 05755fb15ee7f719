"""Laws of the loss along a run, given the learning rate at each of its steps.

eta_i is the learning rate of step i, from 1; s a step at which the loss is known, w the first one
at the peak. S1(s) = sum_{i <= s} eta_i counts the warm-up too, and what is said of falling rates
begins at w; points before w are left out. Both laws are of one model and one way to train it: all
that differs between the runs is the schedule. They predict schedules like those they were fitted
to. A rate held at 0 still lowers the loss that `annealing` predicts, and no update is so large
that either finds it harmful, so that neither may be minimised over schedules without a bound.

The forms are those of the papers. What they say of warm-up was not checked against their text, nor
whether their sum counts rates that rise; here it does.
"""

import itertools

import numpy as np

from eval.fit.law import Columns, Law, Units, grid, log_positive

MOMENTUM = 0.999  # lambda, usual for arXiv:2408.11029, where it is not fitted either
SEGMENTS = 64  # of a falling schedule: more steps than that are joined


def peak_step(rates: np.ndarray) -> int:
    """w, from 1: the first step at the highest rate, but for rounding."""
    return int(np.argmax(rates >= rates.max() * (1 - 1e-6))) + 1


def annealing_curve(rates: np.ndarray, steps: np.ndarray, momentum: float) -> Columns:
    """S1 and S2 = sum_{i <= s} m_i with m_i = lambda m_{i-1} + (eta_{i-1} - eta_i), m_w = 0."""
    falls = np.zeros_like(rates)
    falls[peak_step(rates) :] = -np.diff(rates)[peak_step(rates) - 1 :]
    m = itertools.accumulate(falls, lambda m, fall: momentum * m + fall)
    annealed = np.cumsum(np.fromiter(m, float))
    return {'S1': np.cumsum(rates)[steps - 1], 'S2': annealed[steps - 1]}


def annealing_units(columns: Columns) -> dict[str, float]:
    largest = float(np.abs(columns['S2']).max())
    return {'S1': float(np.exp(np.mean(np.log(columns['S1'])))), 'S2': largest or 1.0}


def annealing_inputs(columns: Columns, units: Units) -> dict[str, np.ndarray]:
    return {'S1': np.log(columns['S1'] / units['S1']), 'S2': columns['S2'] / units['S2']}


def annealing_value(theta, x: Columns) -> np.ndarray:
    """log(L0 + A S1^-alpha - C S2); theta has log L0, log A and C in units, and log alpha."""
    log_l0, log_a, c, log_alpha = theta
    loss = np.exp(log_l0) + np.exp(log_a - np.exp(log_alpha) * x['S1']) - c * x['S2']
    return log_positive(loss)


def annealing_starts(x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
    """Each term a share of the loss at the unit."""
    del x, units
    level = float(np.mean(y))
    shares = level + np.log([0.1, 0.3, 0.6, 0.9])
    drops = np.exp(level) * np.array([0.0, 0.03, 0.1, 0.3])
    return grid(shares, shares, drops, np.log([0.1, 0.3, 0.6, 1.2]))


def annealing_constants(theta, units: Units) -> dict:
    log_l0, log_a, c, log_alpha = theta
    alpha = np.exp(log_alpha)
    return {
        'L0': np.exp(log_l0),
        'A': np.exp(log_a + alpha * np.log(units['S1'])),
        'C': c / units['S2'],
        'alpha': alpha,
    }


ANNEALING = Law(
    name='annealing',
    equation='L(s) = L0 + A S1^-alpha - C S2',
    source='arXiv:2408.11029',
    constants=('L0', 'A', 'C', 'alpha'),
    columns=('S1', 'S2'),
    inputs=annealing_inputs,
    value=annealing_value,
    starts=annealing_starts,
    constants_of=annealing_constants,
    units=annealing_units,
    curve=annealing_curve,
)


def multi_power_curve(rates: np.ndarray, steps: np.ndarray, momentum: float) -> Columns:
    """S1 [n]; of each fall of the rate up to s [n, SEGMENTS] its size, the rate that it led to, and
    the sum of rates from there to s. A rate that rises is a fall below 0. Falls that are joined
    count as one, at the mean of those up to s.
    """
    del momentum
    total, falls = np.cumsum(rates), -np.diff(rates)
    falls[: peak_step(rates) - 1] = 0.0
    (at,) = np.nonzero(falls)  # falls[i] led to the rate of step i + 2
    ends = np.unique(np.linspace(0, len(at), SEGMENTS + 1).astype(int))
    fallen, led_to, begun = (
        np.append(0.0, np.cumsum(x)) for x in (falls[at], rates[at + 1], total[at])
    )
    happened = np.searchsorted(at, steps - 1)
    shape = (len(steps), SEGMENTS)
    fall, rate, since = np.zeros(shape), np.full(shape, rates.max()), np.zeros(shape)
    for k, (start, end) in enumerate(itertools.pairwise(ends)):
        (seen,) = np.nonzero(happened > start)
        last = np.minimum(happened[seen], end)
        count = last - start
        fall[seen, k] = fallen[last] - fallen[start]
        rate[seen, k] = (led_to[last] - led_to[start]) / count
        since[seen, k] = total[steps[seen] - 1] - (begun[last] - begun[start]) / count
    rate = np.maximum(rate, 1e-9 * rates.max())  # 0 has no such power
    return {'S1': total[steps - 1], 'fall': fall, 'rate': rate, 'since': since}


def multi_power_units(columns: Columns) -> dict[str, float]:
    unit = float(np.exp(np.mean(np.log(columns['S1']))))
    return {'S1': unit, 'rate': float(columns['rate'].max())}


def multi_power_inputs(columns: Columns, units: Units) -> dict[str, np.ndarray]:
    """With log since, that of LEAST where it is 0, which makes the factor of its fall 0."""
    return {
        'S1': np.log(columns['S1'] / units['S1']),
        'fall': columns['fall'] / units['rate'],
        'rate': np.log(columns['rate'] / units['rate']),
        'since': np.log(np.maximum(columns['since'] / units['S1'], 1e-30)),
    }


def multi_power_value(theta, x: Columns) -> np.ndarray:
    """log of L0 + A S1^-alpha - B sum_k (eta_{k-1} - eta_k) G(eta_k^-gamma S_k(s)), where G(x) =
    1 - (1 + C x)^-beta and S_k(s) is the sum of rates from k to s.
    """
    log_l0, log_a, log_alpha, log_b, log_c, log_beta, log_gamma = theta
    deep = [np.asarray(t)[..., None] for t in (log_c, log_beta, log_gamma)]
    powers = deep[0] - np.exp(deep[2]) * x['rate'] + x['since']
    reached = -np.expm1(-np.exp(deep[1]) * np.log1p(np.exp(powers)))
    drop = np.exp(log_b) * np.sum(x['fall'] * reached, axis=-1)
    loss = np.exp(log_l0) + np.exp(log_a - np.exp(log_alpha) * x['S1']) - drop
    return log_positive(loss)


def multi_power_starts(x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
    """Terms that are shares of the loss at the unit, and exponents around those of the paper."""
    del x, units
    level = float(np.mean(y))
    return grid(
        level + np.log([0.3, 0.6, 0.9]),
        level + np.log([0.1, 0.3]),
        np.log([0.3, 0.6]),
        level + np.log([0.03, 0.1, 0.3]),
        np.log([1.0, 10.0, 100.0]),
        np.log([0.3, 0.6]),
        np.log([0.3, 0.6]),
    )


def multi_power_constants(theta, units: Units) -> dict:
    log_l0, log_a, log_alpha, log_b, log_c, log_beta, log_gamma = theta
    alpha, gamma = np.exp(log_alpha), np.exp(log_gamma)
    return {
        'L0': np.exp(log_l0),
        'A': np.exp(log_a + alpha * np.log(units['S1'])),
        'alpha': alpha,
        'B': np.exp(log_b) / units['rate'],
        'C': np.exp(log_c + gamma * np.log(units['rate'])) / units['S1'],
        'beta': np.exp(log_beta),
        'gamma': gamma,
    }


MULTI_POWER = Law(
    name='multi_power',
    equation='L(s) = L0 + A S1^-alpha - B sum_k (eta_{k-1} - eta_k) G(eta_k^-gamma S_k(s))',
    source='arXiv:2503.12811',
    constants=('L0', 'A', 'alpha', 'B', 'C', 'beta', 'gamma'),
    columns=('S1', 'fall', 'rate', 'since'),
    inputs=multi_power_inputs,
    value=multi_power_value,
    starts=multi_power_starts,
    constants_of=multi_power_constants,
    units=multi_power_units,
    curve=multi_power_curve,
)
