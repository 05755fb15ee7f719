"""The laws: their constants, the columns that they read, and their values in numbers near 1.

Laws of the final loss, or of a score, are functions of N parameters (N1 and N2 of two parts), D
tokens, U distinct tokens, the share p of a domain in them, or the loss L in nats per token. They
use no published constants, which hold only for the same tokenizer, text and way to count
parameters. `parameters` of runs include embeddings, as in arXiv:2203.15556; arXiv:2001.08361
excludes them.

Laws of loss curves are functions of the learning rate eta_i at each step i of a run, from 1; s is a
step with a known loss, w the first step at the peak. S1(s) = sum_{i <= s} eta_i includes the
warm-up; falling rates count from w on, and points before w are left out. These laws hold for a
single model and way to train it, and predict schedules similar to the fitted schedules. Do not
minimise them over schedules without a bound: a rate held at 0 still lowers the loss that
`annealing` predicts, and neither law finds any update too large.

The forms, and the grid and delta of arXiv:2203.15556, are quoted from the papers or from later
papers. Two points were not checked against the papers of curves: their treatment of the warm-up,
and whether their sum counts rising rates; here it does.
"""

import itertools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import numpy.typing as npt

Columns = Mapping[str, np.ndarray]  # each [points, ...]
Units = Mapping[str, float]
LOSS, SCORE = 'loss', 'score'
N, D, U = 'parameters', 'tokens', 'unique_tokens'
N1, N2, SHARE = 'first_parameters', 'second_parameters', 'share'
# Least ratio of the spreads of log N1 and log N2 across and along their common line.
MIN_SPREAD_RATIO = 1e-3
MIN_LOSS = 1e-12  # starts may make a loss negative, and its logarithm has to exist
MOMENTUM = 0.999  # lambda, usual for arXiv:2408.11029, where it is not fitted either
SEGMENTS = 64  # of a falling schedule: more steps than that are joined


class Law:
    """A law. Its coordinates theta [P] are for columns divided by their `units`.

    In these units the fit finds constants of different orders of magnitude to the last digit.

    curve: for laws of loss curves, (rates, steps, momentum) -> columns: the columns at some steps
    (from 1) of a run, from the learning rate at each of its steps.
    """

    name: str
    equation: str
    source: str
    constants: tuple[str, ...]
    reported_constants: tuple[str, ...] = ()  # constants and values computed from them
    columns: tuple[str, ...]
    min_distinct = 1  # different values of each column without which constants are not determined
    target = LOSS
    delta = 1e-3  # where Huber's loss turns linear: of log losses, arXiv:2203.15556
    curve: Callable[[np.ndarray, np.ndarray, float], Columns] | None = None
    axes: tuple[str, str] | None = None  # columns that the figures are over, if there are two

    def size(self, columns: Columns) -> np.ndarray:
        """Returns the size of each point; the largest runs are held out."""
        return columns[N] * columns[D]

    def units(self, columns: Columns) -> dict[str, float]:
        """Returns the unit of each column."""
        return {name: geometric_mean(x) for name, x in columns.items()}

    def inputs(self, columns: Columns, units: Units) -> dict[str, np.ndarray]:
        """Returns the columns as `value` takes them: log(column / unit)."""
        return {name: np.log(x / units[name]) for name, x in columns.items()}

    def value(self, theta: Any, x: Columns) -> np.ndarray:
        """Returns the log of the loss if `target` is LOSS, and else the score itself.

        theta: P scalars, or [P, K, 1] for K fits at once, real or complex (`eval.fit.fitting`).
        """
        raise NotImplementedError

    def starts(self, x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
        """Returns the grid [S, P] of starts of the fit.

        Args:
            x: inputs of the points.
            y: their values.
            units: units of the columns.
        """
        raise NotImplementedError

    def solve_constants(self, theta: Any, units: Units) -> tuple[Any, ...]:
        """Returns the reported constants, or else `constants`, in the units of the columns."""
        raise NotImplementedError

    def named_constants(self, theta: Any, units: Units) -> dict[str, Any]:
        """Returns `solve_constants` by name."""
        names = self.reported_constants or self.constants
        return dict(zip(names, self.solve_constants(theta, units), strict=True))

    def from_target(self, target: np.ndarray) -> np.ndarray:
        """Returns the observed loss or score in the form of `value`."""
        return np.log(target) if self.target == LOSS else target

    def to_target(self, value: np.ndarray) -> np.ndarray:
        """Returns the loss, or the score, of a value."""
        return np.exp(value) if self.target == LOSS else value


def geometric_mean(x: np.ndarray) -> float:
    """Returns exp(mean(log x))."""
    return float(np.exp(np.mean(np.log(x))))


def log_sum_exp(*terms: Any) -> np.ndarray:
    """Returns log sum exp, also of complex terms: the largest real part is taken out."""
    terms = np.broadcast_arrays(*terms)
    largest = np.max([term.real for term in terms], axis=0)
    return largest + np.log(sum(np.exp(term - largest) for term in terms))


def log_positive(loss: np.ndarray) -> np.ndarray:
    """Returns log(loss), with at least MIN_LOSS."""
    return np.log(np.where(loss.real > MIN_LOSS, loss, MIN_LOSS))


def grid(*axes: npt.ArrayLike) -> np.ndarray:
    """Returns every combination of the axes' values, [S, P]."""
    return np.stack([axis.ravel() for axis in np.meshgrid(*axes, indexing='ij')], axis=-1)


class Chinchilla(Law):
    """theta = log A, log B at the unit, log E, alpha, beta."""

    name = 'chinchilla'
    equation = 'L = E + A / N^alpha + B / D^beta'
    source = 'arXiv:2203.15556, approach 3'
    constants = ('E', 'A', 'B', 'alpha', 'beta')
    reported_constants = (*constants, 'N_opt_exponent')  # N grows with compute^it where C = 6 N D
    columns = axes = (N, D)
    min_distinct = 3

    def value(self, theta: Any, x: Columns) -> np.ndarray:
        a, b, e, alpha, beta = theta
        return log_sum_exp(a - alpha * x[N], b - beta * x[D], e)

    def starts(self, x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
        """Returns the grid of arXiv:2203.15556, appendix D.3: 4,500 of log A and log B at N = D =
        1.
        """
        logs, exponents = np.arange(0, 26, 5.0), np.arange(0, 2.1, 0.5)
        starts_SP = grid(logs, logs, np.arange(-1, 1.1, 0.5), exponents, exponents)
        starts_SP[:, 0] -= starts_SP[:, 3] * np.log(units[N])
        starts_SP[:, 1] -= starts_SP[:, 4] * np.log(units[D])
        return starts_SP

    def solve_constants(self, theta: Any, units: Units) -> tuple[Any, ...]:
        a, b, e, alpha, beta = theta
        a, b = np.exp(a + alpha * np.log(units[N])), np.exp(b + beta * np.log(units[D]))
        return np.exp(e), a, b, alpha, beta, beta / (alpha + beta)


class Kaplan(Law):
    """theta = log of the loss that N alone, and D alone, would leave at the unit, and log
    exponents.
    """

    name = 'kaplan'
    equation = 'L = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D'
    source = 'arXiv:2001.08361, equation 1.5'
    constants = ('N_c', 'D_c', 'alpha_N', 'alpha_D')
    columns = axes = (N, D)
    min_distinct = 2

    def value(self, theta: Any, x: Columns) -> np.ndarray:
        log_loss_n, log_loss_d, log_alpha_n, log_alpha_d = theta
        alpha_n, alpha_d = np.exp(log_alpha_n), np.exp(log_alpha_d)
        terms = (log_loss_n - alpha_n * x[N]) / alpha_d, (log_loss_d - alpha_d * x[D]) / alpha_d
        return alpha_d * log_sum_exp(*terms)

    def starts(self, x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
        """Returns losses by N or D alone of 0.3 to 1 times the mean, and exponents 0.03 to 1."""
        shares = y.mean() + np.log([0.3, 0.6, 0.9, 1.0])
        exponents = np.log([0.03, 0.06, 0.12, 0.25, 0.5, 1.0])
        return grid(shares, shares, exponents, exponents)

    def solve_constants(self, theta: Any, units: Units) -> tuple[Any, ...]:
        log_loss_n, log_loss_d, log_alpha_n, log_alpha_d = theta
        alpha_n, alpha_d = np.exp(log_alpha_n), np.exp(log_alpha_d)
        n_c, d_c = np.log(units[N]) + log_loss_n / alpha_n, np.log(units[D]) + log_loss_d / alpha_d
        return np.exp(n_c), np.exp(d_c), alpha_n, alpha_d


class DataConstrained(Chinchilla):
    """Chinchilla's law with effective data and parameters under repetition:

        D' = U (1 + R_D (1 - exp(-r_D / R_D))),   r_D = max(D / U - 1, 0)
        N' = V (1 + R_N (1 - exp(-r_N / R_N))),   r_N = max(N / V - 1, 0)

    V = min(N, N_opt(U)) are the best parameters for U tokens alone: N_opt(U) = G (G U)^(beta /
    alpha) with G = (alpha A / (beta B))^(1 / (alpha + beta)). The paper fits the first five
    constants to runs without repetition and then the last two; here all are fitted at once.
    """

    name = 'data_constrained'
    equation = "L = E + A / N'^alpha + B / D'^beta, with N' and D' effective under repetition"
    source = 'arXiv:2305.16264'
    constants = ('E', 'A', 'B', 'alpha', 'beta', 'R_D', 'R_N')
    reported_constants = (*Chinchilla.reported_constants, 'R_D', 'R_N')
    columns = (N, D, U)

    def inputs(self, columns: Columns, units: Units) -> dict[str, np.ndarray]:
        """Returns different tokens in the unit of tokens, so that their ratio is preserved."""
        return super().inputs(columns, {**units, U: units[D]})

    def value(self, theta: Any, x: Columns) -> np.ndarray:
        a, b, e, log_alpha, log_beta, log_r_d, log_r_n = theta
        alpha, beta = np.exp(log_alpha), np.exp(log_beta)
        log_g = (log_alpha + a - log_beta - b) / (alpha + beta)
        best = log_g + beta / alpha * (log_g + x[U])
        useful = np.where(best.real < x[N], best, x[N])
        log_n = useful + log_effective_repeats(x[N] - useful, np.exp(log_r_n))
        unique = np.minimum(x[U], x[D])
        log_d = unique + log_effective_repeats(x[D] - unique, np.exp(log_r_d))
        return log_sum_exp(a - alpha * log_n, b - beta * log_d, e)

    def starts(self, x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
        """Returns terms of 0.1 to 0.6 of the mean loss at the unit, equal exponents, and R of 3 to
        30.
        """
        shares = y.mean() + np.log([0.1, 0.3, 0.6])
        exponents, decays = np.log([0.2, 0.35, 0.6]), np.log([3.0, 10.0, 30.0])
        return grid(shares, shares, shares, exponents, exponents, decays, decays)

    def solve_constants(self, theta: Any, units: Units) -> tuple[Any, ...]:
        a, b, e, log_alpha, log_beta, log_r_d, log_r_n = theta
        solved = super().solve_constants((a, b, e, np.exp(log_alpha), np.exp(log_beta)), units)
        return *solved, np.exp(log_r_d), np.exp(log_r_n)


def log_effective_repeats(log_ratio: Any, decay: Any) -> np.ndarray:
    """Returns log(1 + R (1 - exp(-(ratio - 1) / R))): 0 without repetition, below log(1 + R)."""
    return np.log1p(-decay * np.expm1(-np.expm1(log_ratio) / decay))


class MixtureLaw(Law):
    """The loss of a domain with the share p of the text:

        f(p) = p + c1 p^c2 (1 - p)^c3

    N f(p) parameters serve the domain, so that its factor beta_p = A f(p)^-alpha depends on the
    mixture and its exponent does not. The term of the domain's p D tokens is not in the paper,
    because its runs have all the data that they need. theta has the logs of all constants.
    """

    name = 'mixture'
    equation = 'L = E + A / (N f(p))^alpha + B / (p D)^beta, f(p) = p + c1 p^c2 (1 - p)^c3'
    source = 'arXiv:2302.09650, with a term for the tokens'
    constants = ('E', 'A', 'B', 'alpha', 'beta', 'c1', 'c2', 'c3')
    columns = (N, D, SHARE)
    axes = (N, D)
    min_distinct = 4

    def units(self, columns: Columns) -> dict[str, float]:
        """Returns the units; the share has the unit 1. Raises ValueError for shares above 1."""
        share = columns[SHARE]
        if share.max() > 1:
            raise ValueError(
                f'{self.name} needs shares above 0 and at most 1; got {share.max():g}. Divide the '
                'weights of the domains by their sum.'
            )
        return {**super().units(columns), SHARE: 1.0}

    def value(self, theta: Any, x: Columns) -> np.ndarray:
        a, b, e, log_alpha, log_beta, log_c1, log_c2, log_c3 = theta
        log_f = log_effective_share(x[SHARE], log_c1, np.exp(log_c2), np.exp(log_c3))
        model_term = a - np.exp(log_alpha) * (x[N] + log_f)
        return log_sum_exp(model_term, b - np.exp(log_beta) * (x[D] + x[SHARE]), e)

    def starts(self, x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
        """Returns terms of 0.1 to 0.6 of the mean loss at the unit, and exponents around the
        paper's.
        """
        shares, exponents = y.mean() + np.log([0.1, 0.6]), np.log([0.2, 0.5])
        powers = np.log([0.5, 1.5])
        firsts = np.log([0.1, 0.5, 2.0])
        return grid(shares, shares, shares, exponents, exponents, firsts, powers, powers)

    def solve_constants(self, theta: Any, units: Units) -> tuple[Any, ...]:
        a, b, e, log_alpha, log_beta, *logs = theta
        alpha, beta = np.exp(log_alpha), np.exp(log_beta)
        a, b = np.exp(a + alpha * np.log(units[N])), np.exp(b + beta * np.log(units[D]))
        return np.exp(e), a, b, alpha, beta, *map(np.exp, logs)


def log_effective_share(log_p: Any, log_c1: Any, c2: Any, c3: Any) -> np.ndarray:
    """Returns log(p + c1 p^c2 (1 - p)^c3), which is 0 at p = 1.

    Args:
      log_p: log of the share.
      log_c1: log of the factor.
      c2: exponent of the share.
      c3: exponent of the other share.
    """
    is_mixed = log_p < 0
    log_others = np.log(np.where(is_mixed, -np.expm1(log_p), 1.0))
    gain = np.where(is_mixed, np.exp(log_c1 + (c2 - 1) * log_p + c3 * log_others), 0.0)
    return log_p + np.log1p(gain)


class TwoParts(Law):
    """The loss in the parameters of two parts, such as attention and MLPs; in the paper, encoder
    and decoder.

    a, M1 and M2 are not determined together: another a makes up for any other M1. Here M1 and M2
    are the geometric means of the runs, and a is the loss above L0 there. theta has the logs of the
    others.
    """

    name = 'two_parts'
    equation = 'L = L0 + a (M1 / N1)^p1 (M2 / N2)^p2'
    source = 'arXiv:2109.07740'
    constants = ('L0', 'a', 'p1', 'p2')
    reported_constants = (*constants, 'M1', 'M2')
    columns = axes = (N1, N2)
    min_distinct = 3

    def size(self, columns: Columns) -> np.ndarray:
        return columns[N1] + columns[N2]

    def units(self, columns: Columns) -> dict[str, float]:
        """Returns the units. Raises ValueError if the columns are not independent."""
        logs = np.log([columns[N1], columns[N2]])
        across, along = np.linalg.eigvalsh(np.cov(logs))
        if across <= MIN_SPREAD_RATIO**2 * along:
            raise ValueError(
                f'{self.name}: {N1} and {N2} grow together in all runs, so p1 and p2 cannot be '
                'separated. Add runs in which only one of them grows, or fit chinchilla.'
            )
        return super().units(columns)

    def value(self, theta: Any, x: Columns) -> np.ndarray:
        e, a, log_p1, log_p2 = theta
        return log_sum_exp(a - np.exp(log_p1) * x[N1] - np.exp(log_p2) * x[N2], e)

    def starts(self, x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
        """Returns both terms of 0.1 to 0.9 of the mean loss at the unit."""
        shares, exponents = y.mean() + np.log([0.1, 0.3, 0.6, 0.9]), np.log([0.05, 0.15, 0.5, 1])
        return grid(shares, shares, exponents, exponents)

    def solve_constants(self, theta: Any, units: Units) -> tuple[Any, ...]:
        e, a, log_p1, log_p2 = theta
        means = (units[name] + 0.0 * e for name in (N1, N2))  # one for each fit, as the others are
        return np.exp(e), np.exp(a), np.exp(log_p1), np.exp(log_p2), *means


class Downstream(Law):
    """A score in the loss; theta has the log of the slope."""

    name = 'downstream'
    equation = 'score = floor + (top - floor) / (1 + exp(slope (L - middle)))'
    source = 'logistic in the loss, as in arXiv:2407.21783'
    constants = ('floor', 'top', 'slope', 'middle')
    columns = (LOSS,)
    min_distinct = 5
    target = SCORE
    delta = 0.01  # not published: a score of some hundred questions is not known better

    def size(self, columns: Columns) -> np.ndarray:
        return -columns[LOSS]

    def units(self, columns: Columns) -> dict[str, float]:
        return {}

    def inputs(self, columns: Columns, units: Units) -> dict[str, np.ndarray]:
        return dict(columns)

    def value(self, theta: Any, x: Columns) -> np.ndarray:
        floor, top, log_slope, middle = theta
        height = 0.5 * (1 - np.tanh(np.exp(log_slope) * (x[LOSS] - middle) / 2))
        return floor + (top - floor) * height

    def starts(self, x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
        """Returns ends at the scores of the points and beyond, and middles between their losses."""
        low, high, losses = y.min(), y.max(), x[LOSS]
        wide = high - low
        slopes = np.log(np.array([1.0, 3.0, 10.0, 30.0]) / max(np.ptp(losses), 1e-6))
        middles = np.linspace(losses.min(), losses.max(), 5)
        floors, tops = [low - wide / 2, low], [high, high + wide / 2, high + 2 * wide]
        return grid(floors, tops, slopes, middles)

    def solve_constants(self, theta: Any, units: Units) -> tuple[Any, ...]:
        floor, top, log_slope, middle = theta
        return floor, top, np.exp(log_slope), middle


def peak_step(rates: np.ndarray) -> int:
    """Returns w, from 1: the first step at the highest rate, up to rounding."""
    return int(np.argmax(rates >= rates.max() * (1 - 1e-6))) + 1


def annealing_curve(rates: np.ndarray, steps: np.ndarray, momentum: float) -> Columns:
    """Returns S1 and S2 = sum_{i <= s} m_i, m_i = lambda m_{i-1} + (eta_{i-1} - eta_i), m_w = 0.

    Args:
      rates: eta, the learning rate at each step of the run.
      steps: s, the steps to return, from 1.
      momentum: lambda.
    """
    falls = np.zeros_like(rates)
    falls[peak_step(rates) :] = -np.diff(rates)[peak_step(rates) - 1 :]
    m = itertools.accumulate(falls, lambda m, fall: momentum * m + fall)
    annealed = np.cumsum(np.fromiter(m, float))
    return {'S1': np.cumsum(rates)[steps - 1], 'S2': annealed[steps - 1]}


class Annealing(Law):
    """theta has log L0, log A and C in units, and log alpha."""

    name = 'annealing'
    equation = 'L(s) = L0 + A S1^-alpha - C S2'
    source = 'arXiv:2408.11029'
    constants = ('L0', 'A', 'C', 'alpha')
    columns = ('S1', 'S2')
    curve = staticmethod(annealing_curve)

    def units(self, columns: Columns) -> dict[str, float]:
        largest = float(np.abs(columns['S2']).max())
        return {'S1': geometric_mean(columns['S1']), 'S2': largest or 1.0}

    def inputs(self, columns: Columns, units: Units) -> dict[str, np.ndarray]:
        return {'S1': np.log(columns['S1'] / units['S1']), 'S2': columns['S2'] / units['S2']}

    def value(self, theta: Any, x: Columns) -> np.ndarray:
        log_l0, log_a, c, log_alpha = theta
        loss = np.exp(log_l0) + np.exp(log_a - np.exp(log_alpha) * x['S1']) - c * x['S2']
        return log_positive(loss)

    def starts(self, x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
        """Returns terms that are shares of the loss at the unit."""
        level = float(np.mean(y))
        shares = level + np.log([0.1, 0.3, 0.6, 0.9])
        drops = np.exp(level) * np.array([0.0, 0.03, 0.1, 0.3])
        return grid(shares, shares, drops, np.log([0.1, 0.3, 0.6, 1.2]))

    def solve_constants(self, theta: Any, units: Units) -> tuple[Any, ...]:
        log_l0, log_a, c, log_alpha = theta
        alpha = np.exp(log_alpha)
        a = np.exp(log_a + alpha * np.log(units['S1']))
        return np.exp(log_l0), a, c / units['S2'], alpha


def multi_power_curve(rates: np.ndarray, steps: np.ndarray, momentum: float) -> Columns:
    """Returns S1 [n], and for each fall of the rate up to s its size, the next rate, and a sum of
    rates.

    All have the shape [n, SEGMENTS]; the sum is over the rates from the fall to s. A rise is a
    negative fall. Falls that are joined count as a single fall, at the mean of those up to s.

    Args:
      rates: the learning rate at each step of the run.
      steps: s, the steps to return, from 1.
      momentum: unused.
    """
    del momentum
    total, falls = np.cumsum(rates), -np.diff(rates)
    falls[: peak_step(rates) - 1] = 0.0
    (fall_steps,) = np.nonzero(falls)  # falls[i] led to the rate of step i + 2
    ends = np.unique(np.linspace(0, len(fall_steps), SEGMENTS + 1).astype(int))
    sizes, rates_after, totals = (
        np.append(0.0, np.cumsum(x))
        for x in (falls[fall_steps], rates[fall_steps + 1], total[fall_steps])
    )
    n_falls = np.searchsorted(fall_steps, steps - 1)
    shape = (len(steps), SEGMENTS)
    fall, rate, since = np.zeros(shape), np.full(shape, rates.max()), np.zeros(shape)
    for k, (start, end) in enumerate(itertools.pairwise(ends)):
        (rows,) = np.nonzero(n_falls > start)
        last = np.minimum(n_falls[rows], end)
        count = last - start
        fall[rows, k] = sizes[last] - sizes[start]
        rate[rows, k] = (rates_after[last] - rates_after[start]) / count
        since[rows, k] = total[steps[rows] - 1] - (totals[last] - totals[start]) / count
    rate = np.maximum(rate, 1e-9 * rates.max())  # 0 has no such power
    return {'S1': total[steps - 1], 'fall': fall, 'rate': rate, 'since': since}


class MultiPower(Law):
    """G(x) = 1 - (1 + C x)^-beta, and S_k(s) is the sum of rates from k to s; theta has logs."""

    name = 'multi_power'
    equation = 'L(s) = L0 + A S1^-alpha - B sum_k (eta_{k-1} - eta_k) G(eta_k^-gamma S_k(s))'
    source = 'arXiv:2503.12811'
    constants = ('L0', 'A', 'alpha', 'B', 'C', 'beta', 'gamma')
    columns = ('S1', 'fall', 'rate', 'since')
    curve = staticmethod(multi_power_curve)

    def units(self, columns: Columns) -> dict[str, float]:
        return {'S1': geometric_mean(columns['S1']), 'rate': float(columns['rate'].max())}

    def inputs(self, columns: Columns, units: Units) -> dict[str, np.ndarray]:
        """Returns inputs with log since; since = 0 becomes 1e-30, which makes the factor of its
        fall 0.
        """
        return {
            'S1': np.log(columns['S1'] / units['S1']),
            'fall': columns['fall'] / units['rate'],
            'rate': np.log(columns['rate'] / units['rate']),
            'since': np.log(np.maximum(columns['since'] / units['S1'], 1e-30)),
        }

    def value(self, theta: Any, x: Columns) -> np.ndarray:
        log_l0, log_a, log_alpha, log_b, log_c, log_beta, log_gamma = theta
        deep = [np.asarray(t)[..., None] for t in (log_c, log_beta, log_gamma)]
        powers = deep[0] - np.exp(deep[2]) * x['rate'] + x['since']
        reached = -np.expm1(-np.exp(deep[1]) * np.log1p(np.exp(powers)))
        drop = np.exp(log_b) * np.sum(x['fall'] * reached, axis=-1)
        loss = np.exp(log_l0) + np.exp(log_a - np.exp(log_alpha) * x['S1']) - drop
        return log_positive(loss)

    def starts(self, x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
        """Returns shares of the loss at the unit, and exponents around the paper's."""
        level, exponents = float(np.mean(y)), np.log([0.3, 0.6])
        l0, a = level + np.log([0.3, 0.6, 0.9]), level + np.log([0.1, 0.3])
        b, c = level + np.log([0.03, 0.1, 0.3]), np.log([1.0, 10.0, 100.0])
        return grid(l0, a, exponents, b, c, exponents, exponents)

    def solve_constants(self, theta: Any, units: Units) -> tuple[Any, ...]:
        log_l0, log_a, log_alpha, log_b, log_c, log_beta, log_gamma = theta
        alpha, gamma, b = np.exp(log_alpha), np.exp(log_gamma), np.exp(log_b) / units['rate']
        a = np.exp(log_a + alpha * np.log(units['S1']))
        c = np.exp(log_c + gamma * np.log(units['rate'])) / units['S1']
        return np.exp(log_l0), a, alpha, b, c, np.exp(log_beta), gamma


LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        *(Chinchilla(), Kaplan(), DataConstrained(), MixtureLaw(), TwoParts()),
        *(Annealing(), MultiPower(), Downstream()),
    )
}
