"""The laws: their constants, the columns that they read, and their values in numbers near 1.

Laws of the final loss, or of a score, are in N parameters (N1 and N2 of two parts), D tokens, U
tokens that differ, the share p of a domain in them, or the loss L in nats a token. No published
constant is used: these hold for one tokenizer, one text and one way to count parameters. Runs have
`parameters` with the embeddings, as arXiv:2203.15556 counts; arXiv:2001.08361 leaves them out.

Laws of loss curves are in the learning rate eta_i at each step i of a run, from 1; s is a step at
which the loss is known, w the first one at the peak. S1(s) = sum_{i <= s} eta_i counts the warm-up
too, and falling rates count from w on; points before w are left out. These laws are of one model
and one way to train it, and predict schedules like those they were fitted to. A rate held at 0
still lowers the loss that `annealing` predicts, and no update is so large that either finds it
harmful, so that neither may be minimised over schedules without a bound.

The forms, and the grid and delta of arXiv:2203.15556, are as the papers or later ones quote them.
What the papers of curves say of warm-up was not checked against their text, nor whether their sum
counts rates that rise; here it does.
"""

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

Columns = Mapping[str, np.ndarray]  # each [points, ...]
Units = Mapping[str, float]
LOSS, SCORE = 'loss', 'score'
N, D, U = 'parameters', 'tokens', 'unique_tokens'
N1, N2, SHARE = 'first_parameters', 'second_parameters', 'share'
MIN_SPREAD_RATIO = (
    1e-3  # least ratio of the spreads of log N1 and log N2 along and across their common line
)
MIN_LOSS = 1e-12  # what a loss that a start makes negative counts as, so that its logarithm exists
MOMENTUM = 0.999  # lambda, usual for arXiv:2408.11029, where it is not fitted either
SEGMENTS = 64  # of a falling schedule: more steps than that are joined


class Law:
    """One law, fitted in coordinates theta [P] in which its columns are divided by their `units`,
    so that constants which differ by orders of magnitude are found to the last digit. Each has

    value(theta, x): the log of the loss where `target` is LOSS, and else the score itself, of
        theta [P] scalars or [P, K, 1] for K at once, real or complex (`eval.fit.fitting.jacobian`);
    starts(x, y, units): the grid [S, P] from which the law is fitted;
    solved(theta, units): the values of `constants`, or of `named`, in the units of the columns;
    size(columns): by which the largest runs are held out;
    curve(rates, steps, momentum), for laws of loss curves: the columns at some steps (from 1) of a
        run, from the learning rate at each of its steps.
    """

    name: str
    equation: str
    source: str
    constants: tuple[str, ...]
    reported_constants: tuple[str, ...] = ()  # constants and what follows from them
    columns: tuple[str, ...]
    min_distinct = 1  # different values of each column without which constants are not determined
    target = LOSS
    delta = 1e-3  # where Huber's loss turns linear: of log losses, arXiv:2203.15556
    curve = None
    axes: tuple[str, str] | None = None  # columns that the figures are over, if there are two

    def size(self, columns: Columns) -> np.ndarray:
        return columns[N] * columns[D]

    def units(self, columns: Columns) -> dict[str, float]:
        return {name: geometric_mean(x) for name, x in columns.items()}

    def inputs(self, columns: Columns, units: Units) -> dict[str, np.ndarray]:
        """The columns in units, as `value` takes them: log(column / unit)."""
        return {name: np.log(x / units[name]) for name, x in columns.items()}

    def named_constants(self, theta: Sequence[Any], units: Units) -> dict[str, Any]:
        """`solve_constants` by name."""
        names = self.reported_constants or self.constants
        return dict(zip(names, self.solve_constants(theta, units), strict=True))

    def from_target(self, target: np.ndarray) -> np.ndarray:
        """The observed loss or score in the form of `value`."""
        return np.log(target) if self.target == LOSS else target

    def to_target(self, value: np.ndarray) -> np.ndarray:
        """The loss, or the score, of a value."""
        return np.exp(value) if self.target == LOSS else value


def geometric_mean(x: np.ndarray) -> float:
    return float(np.exp(np.mean(np.log(x))))


def log_sum_exp(*terms: Any) -> np.ndarray:
    """log sum exp, also of complex terms: the largest real part is taken out."""
    terms = np.broadcast_arrays(*terms)
    largest = np.max([term.real for term in terms], axis=0)
    return largest + np.log(sum(np.exp(term - largest) for term in terms))


def log_positive(loss: np.ndarray) -> np.ndarray:
    """log(loss), that of LEAST where it is no loss."""
    return np.log(np.where(loss.real > MIN_LOSS, loss, MIN_LOSS))


def grid(*axes: Sequence[float]) -> np.ndarray:
    """Every combination, [S, P]."""
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

    def value(self, theta, x):
        a, b, e, alpha, beta = theta
        return log_sum_exp(a - alpha * x[N], b - beta * x[D], e)

    def starts(self, x, y, units):
        """The grid of arXiv:2203.15556, appendix D.3: 4,500 of log A and log B at N = D = 1."""
        logs, exponents = np.arange(0, 26, 5.0), np.arange(0, 2.1, 0.5)
        found = grid(logs, logs, np.arange(-1, 1.1, 0.5), exponents, exponents)
        found[:, 0] -= found[:, 3] * np.log(units[N])
        found[:, 1] -= found[:, 4] * np.log(units[D])
        return found

    def solve_constants(self, theta, units):
        a, b, e, alpha, beta = theta
        a, b = np.exp(a + alpha * np.log(units[N])), np.exp(b + beta * np.log(units[D]))
        return np.exp(e), a, b, alpha, beta, beta / (alpha + beta)


class Kaplan(Law):
    """theta = log of the loss that N alone, and D alone, would leave at the unit, log exponents."""

    name = 'kaplan'
    equation = 'L = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D'
    source = 'arXiv:2001.08361, equation 1.5'
    constants = ('N_c', 'D_c', 'alpha_N', 'alpha_D')
    columns = axes = (N, D)
    min_distinct = 2

    def value(self, theta, x):
        of_n, of_d, log_alpha_n, log_alpha_d = theta
        alpha_n, alpha_d = np.exp(log_alpha_n), np.exp(log_alpha_d)
        terms = (of_n - alpha_n * x[N]) / alpha_d, (of_d - alpha_d * x[D]) / alpha_d
        return alpha_d * log_sum_exp(*terms)

    def starts(self, x, y, units):
        """Loss by N alone or D alone of 0.3 to 1 of the mean one, exponents 0.03 to 1."""
        shares = y.mean() + np.log([0.3, 0.6, 0.9, 1.0])
        exponents = np.log([0.03, 0.06, 0.12, 0.25, 0.5, 1.0])
        return grid(shares, shares, exponents, exponents)

    def solve_constants(self, theta, units):
        of_n, of_d, log_alpha_n, log_alpha_d = theta
        alpha_n, alpha_d = np.exp(log_alpha_n), np.exp(log_alpha_d)
        n_c, d_c = np.log(units[N]) + of_n / alpha_n, np.log(units[D]) + of_d / alpha_d
        return np.exp(n_c), np.exp(d_c), alpha_n, alpha_d


class DataConstrained(Chinchilla):
    """The law with what repetition leaves of data and parameters:

        D' = U (1 + R_D (1 - exp(-r_D / R_D))),   r_D = max(D / U - 1, 0)
        N' = V (1 + R_N (1 - exp(-r_N / R_N))),   r_N = max(N / V - 1, 0)

    V = min(N, N_opt(U)) are the parameters that U tokens alone would be best spent on: N_opt(U) =
    G (G U)^(beta / alpha) with G = (alpha A / (beta B))^(1 / (alpha + beta)). The paper fits the
    first five constants to runs without repetition and then the last two; here all at once.
    """

    name = 'data_constrained'
    equation = "L = E + A / N'^alpha + B / D'^beta, N' and D' by repetition"
    source = 'arXiv:2305.16264'
    constants = ('E', 'A', 'B', 'alpha', 'beta', 'R_D', 'R_N')
    reported_constants = (*Chinchilla.reported_constants, 'R_D', 'R_N')
    columns = (N, D, U)

    def inputs(self, columns, units):
        """Tokens that differ in the unit of tokens, so that their ratio stays."""
        return super().inputs(columns, {**units, U: units[D]})

    def value(self, theta, x):
        a, b, e, log_alpha, log_beta, log_r_d, log_r_n = theta
        alpha, beta = np.exp(log_alpha), np.exp(log_beta)
        log_g = (log_alpha + a - log_beta - b) / (alpha + beta)
        best = log_g + beta / alpha * (log_g + x[U])
        own = np.where(best.real < x[N], best, x[N])
        log_n = own + log_effective_repeats(x[N] - own, np.exp(log_r_n))
        unique = np.minimum(x[U], x[D])
        log_d = unique + log_effective_repeats(x[D] - unique, np.exp(log_r_d))
        return log_sum_exp(a - alpha * log_n, b - beta * log_d, e)

    def starts(self, x, y, units):
        """Each term 0.1 to 0.6 of the mean loss at the unit, one exponent, and R of 3 to 30."""
        shares = y.mean() + np.log([0.1, 0.3, 0.6])
        exponents, decays = np.log([0.2, 0.35, 0.6]), np.log([3.0, 10.0, 30.0])
        return grid(shares, shares, shares, exponents, exponents, decays, decays)

    def solve_constants(self, theta, units):
        a, b, e, log_alpha, log_beta, log_r_d, log_r_n = theta
        found = super().solve_constants((a, b, e, np.exp(log_alpha), np.exp(log_beta)), units)
        return *found, np.exp(log_r_d), np.exp(log_r_n)


def log_effective_repeats(log_ratio, decay) -> np.ndarray:
    """log(1 + R (1 - exp(-(ratio - 1) / R))): 0 without repetition, log(1 + R) after very much."""
    return np.log1p(-decay * np.expm1(-np.expm1(log_ratio) / decay))


class MixtureLaw(Law):
    """The loss of one domain, of which the text has the share p:

        f(p) = p + c1 p^c2 (1 - p)^c3

    N f(p) are the parameters that serve the domain, so that its factor beta_p = A f(p)^-alpha moves
    with the mixture and its exponent does not. The term of its own p D tokens is not the paper's,
    whose runs have all the data that they need; theta has the logs of all constants.
    """

    name = 'mixture'
    equation = 'L = E + A / (N f(p))^alpha + B / (p D)^beta, f(p) = p + c1 p^c2 (1 - p)^c3'
    source = 'arXiv:2302.09650, with a term of the tokens'
    constants = ('E', 'A', 'B', 'alpha', 'beta', 'c1', 'c2', 'c3')
    columns = (N, D, SHARE)
    axes = (N, D)
    min_distinct = 4

    def units(self, columns):
        share = columns[SHARE]
        if share.max() > 1:
            raise ValueError(
                f'{self.name} has the share of the domain in the text, above 0 and at most 1; got '
                f'{share.max():g}. Divide weights by their sum'
            )
        return {**super().units(columns), SHARE: 1.0}

    def value(self, theta, x):
        a, b, e, log_alpha, log_beta, log_c1, log_c2, log_c3 = theta
        log_f = log_effective_share(x[SHARE], log_c1, np.exp(log_c2), np.exp(log_c3))
        of_model = a - np.exp(log_alpha) * (x[N] + log_f)
        return log_sum_exp(of_model, b - np.exp(log_beta) * (x[D] + x[SHARE]), e)

    def starts(self, x, y, units):
        """Each term 0.1 to 0.6 of the mean loss at the unit, exponents around the paper's."""
        shares, exponents = y.mean() + np.log([0.1, 0.6]), np.log([0.2, 0.5])
        powers = np.log([0.5, 1.5])
        firsts = np.log([0.1, 0.5, 2.0])
        return grid(shares, shares, shares, exponents, exponents, firsts, powers, powers)

    def solve_constants(self, theta, units):
        a, b, e, log_alpha, log_beta, *logs = theta
        alpha, beta = np.exp(log_alpha), np.exp(log_beta)
        a, b = np.exp(a + alpha * np.log(units[N])), np.exp(b + beta * np.log(units[D]))
        return np.exp(e), a, b, alpha, beta, *map(np.exp, logs)


def log_effective_share(log_p, log_c1, c2, c3) -> np.ndarray:
    """log(p + c1 p^c2 (1 - p)^c3), which is 0 at p = 1."""
    is_part = log_p < 0
    rest = np.log(np.where(is_part, -np.expm1(log_p), 1.0))
    more = np.where(is_part, np.exp(log_c1 + (c2 - 1) * log_p + c3 * rest), 0.0)
    return log_p + np.log1p(more)


class TwoParts(Law):
    """The loss in the parameters of two parts, such as attention and MLPs; of encoder and decoder
    in the paper. a, M1 and M2 are not determined together: any other M1 is as good with an a that
    makes up for it. Here M1 and M2 are the geometric means of the runs, where a is the loss above
    L0. Theta has the logs of the others.
    """

    name = 'two_parts'
    equation = 'L = L0 + a (M1 / N1)^p1 (M2 / N2)^p2'
    source = 'arXiv:2109.07740'
    constants = ('L0', 'a', 'p1', 'p2')
    reported_constants = (*constants, 'M1', 'M2')
    columns = axes = (N1, N2)
    min_distinct = 3

    def size(self, columns):
        return columns[N1] + columns[N2]

    def units(self, columns):
        """Raises ValueError where one column follows from the other."""
        logs = np.log([columns[N1], columns[N2]])
        across, along = np.linalg.eigvalsh(np.cov(logs))
        if across <= MIN_SPREAD_RATIO**2 * along:
            raise ValueError(
                f'{self.name}: {N1} and {N2} grow together in all runs, so that p1 and p2 are not '
                'told apart. Add runs in which one of them grows alone, or fit chinchilla'
            )
        return super().units(columns)

    def value(self, theta, x):
        e, a, log_p1, log_p2 = theta
        return log_sum_exp(a - np.exp(log_p1) * x[N1] - np.exp(log_p2) * x[N2], e)

    def starts(self, x, y, units):
        """Both terms 0.1 to 0.9 of the mean loss at the unit."""
        shares, exponents = y.mean() + np.log([0.1, 0.3, 0.6, 0.9]), np.log([0.05, 0.15, 0.5, 1])
        return grid(shares, shares, exponents, exponents)

    def solve_constants(self, theta, units):
        e, a, log_p1, log_p2 = theta
        means = (units[name] + 0.0 * e for name in (N1, N2))  # one for each fit, as the others are
        return np.exp(e), np.exp(a), np.exp(log_p1), np.exp(log_p2), *means


class Downstream(Law):
    """A score in the loss; theta has log slope in the place of slope."""

    name = 'downstream'
    equation = 'score = floor + (top - floor) / (1 + exp(slope (L - middle)))'
    source = 'a logistic function of the loss, as arXiv:2407.21783 has it'
    constants = ('floor', 'top', 'slope', 'middle')
    columns = (LOSS,)
    min_distinct = 5
    target = SCORE
    delta = 0.01  # not published: a score of some hundred questions is not known better

    def size(self, columns):
        return -columns[LOSS]

    def units(self, columns):
        return {}

    def inputs(self, columns, units):
        return dict(columns)

    def value(self, theta, x):
        floor, top, log_slope, middle = theta
        height = 0.5 * (1 - np.tanh(np.exp(log_slope) * (x[LOSS] - middle) / 2))
        return floor + (top - floor) * height

    def starts(self, x, y, units):
        """Ends at the scores there are and beyond, the middle anywhere between the losses."""
        low, high, losses = y.min(), y.max(), x[LOSS]
        wide = high - low
        slopes = np.log(np.array([1.0, 3.0, 10.0, 30.0]) / max(np.ptp(losses), 1e-6))
        middles = np.linspace(losses.min(), losses.max(), 5)
        floors, tops = [low - wide / 2, low], [high, high + wide / 2, high + 2 * wide]
        return grid(floors, tops, slopes, middles)

    def solve_constants(self, theta, units):
        floor, top, log_slope, middle = theta
        return floor, top, np.exp(log_slope), middle


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


class Annealing(Law):
    """theta has log L0, log A and C in units, and log alpha."""

    name = 'annealing'
    equation = 'L(s) = L0 + A S1^-alpha - C S2'
    source = 'arXiv:2408.11029'
    constants = ('L0', 'A', 'C', 'alpha')
    columns = ('S1', 'S2')
    curve = staticmethod(annealing_curve)

    def units(self, columns):
        largest = float(np.abs(columns['S2']).max())
        return {'S1': geometric_mean(columns['S1']), 'S2': largest or 1.0}

    def inputs(self, columns, units):
        return {'S1': np.log(columns['S1'] / units['S1']), 'S2': columns['S2'] / units['S2']}

    def value(self, theta, x):
        log_l0, log_a, c, log_alpha = theta
        loss = np.exp(log_l0) + np.exp(log_a - np.exp(log_alpha) * x['S1']) - c * x['S2']
        return log_positive(loss)

    def starts(self, x, y, units):
        """Each term a share of the loss at the unit."""
        level = float(np.mean(y))
        shares = level + np.log([0.1, 0.3, 0.6, 0.9])
        drops = np.exp(level) * np.array([0.0, 0.03, 0.1, 0.3])
        return grid(shares, shares, drops, np.log([0.1, 0.3, 0.6, 1.2]))

    def solve_constants(self, theta, units):
        log_l0, log_a, c, log_alpha = theta
        alpha = np.exp(log_alpha)
        a = np.exp(log_a + alpha * np.log(units['S1']))
        return np.exp(log_l0), a, c / units['S2'], alpha


def multi_power_curve(rates: np.ndarray, steps: np.ndarray, momentum: float) -> Columns:
    """S1 [n]; for each fall of the rate up to s [n, SEGMENTS] its size, the rate that it led to,
    and the sum of rates from there to s. A rate that rises is a fall below 0. Falls that are joined
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


class MultiPower(Law):
    """G(x) = 1 - (1 + C x)^-beta, and S_k(s) is the sum of rates from k to s; theta has logs."""

    name = 'multi_power'
    equation = 'L(s) = L0 + A S1^-alpha - B sum_k (eta_{k-1} - eta_k) G(eta_k^-gamma S_k(s))'
    source = 'arXiv:2503.12811'
    constants = ('L0', 'A', 'alpha', 'B', 'C', 'beta', 'gamma')
    columns = ('S1', 'fall', 'rate', 'since')
    curve = staticmethod(multi_power_curve)

    def units(self, columns):
        return {'S1': geometric_mean(columns['S1']), 'rate': float(columns['rate'].max())}

    def inputs(self, columns, units):
        """With log since, that of 1e-30 where it is 0, which makes the factor of its fall 0."""
        return {
            'S1': np.log(columns['S1'] / units['S1']),
            'fall': columns['fall'] / units['rate'],
            'rate': np.log(columns['rate'] / units['rate']),
            'since': np.log(np.maximum(columns['since'] / units['S1'], 1e-30)),
        }

    def value(self, theta, x):
        log_l0, log_a, log_alpha, log_b, log_c, log_beta, log_gamma = theta
        deep = [np.asarray(t)[..., None] for t in (log_c, log_beta, log_gamma)]
        powers = deep[0] - np.exp(deep[2]) * x['rate'] + x['since']
        reached = -np.expm1(-np.exp(deep[1]) * np.log1p(np.exp(powers)))
        drop = np.exp(log_b) * np.sum(x['fall'] * reached, axis=-1)
        loss = np.exp(log_l0) + np.exp(log_a - np.exp(log_alpha) * x['S1']) - drop
        return log_positive(loss)

    def starts(self, x, y, units):
        """Terms that are shares of the loss at the unit, and exponents around the paper's."""
        level, exponents = float(np.mean(y)), np.log([0.3, 0.6])
        l0, a = level + np.log([0.3, 0.6, 0.9]), level + np.log([0.1, 0.3])
        b, c = level + np.log([0.03, 0.1, 0.3]), np.log([1.0, 10.0, 100.0])
        return grid(l0, a, exponents, b, c, exponents, exponents)

    def solve_constants(self, theta, units):
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
