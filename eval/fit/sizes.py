"""Laws of the final loss, or of a score, in the size of the model and of the data.

N parameters, D tokens, U tokens that differ, L loss in nats a token. The published constants, of
which none is used here, hold for one tokenizer, one text and one way to count parameters: runs
have `parameters` with the embeddings, as arXiv:2203.15556 counts; arXiv:2001.08361 leaves them out.
The forms, and the grid and delta of arXiv:2203.15556, are as several later papers quote them.
"""

import numpy as np

from eval.fit.law import (
    LOSS,
    SCORE,
    Columns,
    Law,
    Units,
    geometric_means,
    grid,
    log_inputs,
    log_sum_exp,
)

N, D, U = 'parameters', 'tokens', 'unique_tokens'


def chinchilla_value(theta, x: Columns) -> np.ndarray:
    """log(E + A / N^alpha + B / D^beta), theta = log A, log B at the unit, log E, alpha, beta."""
    a, b, e, alpha, beta = theta
    return log_sum_exp(a - alpha * x[N], b - beta * x[D], e)


def chinchilla_starts(x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
    """The grid of arXiv:2203.15556, appendix D.3: 4,500 starts, of log A and log B at N = D = 1."""
    del x, y
    logs, exponents = np.arange(0, 26, 5.0), np.arange(0, 2.1, 0.5)
    found = grid(logs, logs, np.arange(-1, 1.1, 0.5), exponents, exponents)
    found[:, 0] -= found[:, 3] * np.log(units[N])
    found[:, 1] -= found[:, 4] * np.log(units[D])
    return found


def chinchilla_constants(theta, units: Units) -> dict:
    """And N_opt_exponent, beta / (alpha + beta): N grows with compute^it where C = 6 N D."""
    a, b, e, alpha, beta = theta
    return {
        'E': np.exp(e),
        'A': np.exp(a + alpha * np.log(units[N])),
        'B': np.exp(b + beta * np.log(units[D])),
        'alpha': alpha,
        'beta': beta,
        'N_opt_exponent': beta / (alpha + beta),
    }


CHINCHILLA = Law(
    name='chinchilla',
    equation='L = E + A / N^alpha + B / D^beta',
    source='arXiv:2203.15556, approach 3',
    constants=('E', 'A', 'B', 'alpha', 'beta'),
    columns=(N, D),
    inputs=log_inputs,
    value=chinchilla_value,
    starts=chinchilla_starts,
    constants_of=chinchilla_constants,
    units=geometric_means,
    distinct=3,
)


def kaplan_value(theta, x: Columns) -> np.ndarray:
    """log of ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D.

    theta = log of the loss that N alone, and D alone, would leave at the unit, and log exponents.
    """
    of_n, of_d, log_alpha_n, log_alpha_d = theta
    alpha_n, alpha_d = np.exp(log_alpha_n), np.exp(log_alpha_d)
    return alpha_d * log_sum_exp(
        (of_n - alpha_n * x[N]) / alpha_d, (of_d - alpha_d * x[D]) / alpha_d
    )


def kaplan_starts(x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
    """Loss by N alone or D alone of 0.3 to 1 of the mean one, exponents 0.03 to 1."""
    del x, units
    shares = y.mean() + np.log([0.3, 0.6, 0.9, 1.0])
    exponents = np.log([0.03, 0.06, 0.12, 0.25, 0.5, 1.0])
    return grid(shares, shares, exponents, exponents)


def kaplan_constants(theta, units: Units) -> dict:
    of_n, of_d, log_alpha_n, log_alpha_d = theta
    alpha_n, alpha_d = np.exp(log_alpha_n), np.exp(log_alpha_d)
    return {
        'N_c': np.exp(np.log(units[N]) + of_n / alpha_n),
        'D_c': np.exp(np.log(units[D]) + of_d / alpha_d),
        'alpha_N': alpha_n,
        'alpha_D': alpha_d,
    }


KAPLAN = Law(
    name='kaplan',
    equation='L = ((N_c / N)^(alpha_N / alpha_D) + D_c / D)^alpha_D',
    source='arXiv:2001.08361, equation 1.5',
    constants=('N_c', 'D_c', 'alpha_N', 'alpha_D'),
    columns=(N, D),
    inputs=log_inputs,
    value=kaplan_value,
    starts=kaplan_starts,
    constants_of=kaplan_constants,
    units=geometric_means,
    distinct=2,
)


def data_constrained_value(theta, x: Columns) -> np.ndarray:
    """log(E + A / N'^alpha + B / D'^beta), with what repetition leaves of data and parameters:

        D' = U (1 + R_D (1 - exp(-r_D / R_D))),   r_D = max(D / U - 1, 0)
        N' = V (1 + R_N (1 - exp(-r_N / R_N))),   r_N = max(N / V - 1, 0)

    V = min(N, N_opt(U)) are the parameters that U tokens alone would be best spent on: N_opt(U) =
    G (G U)^(beta / alpha) with G = (alpha A / (beta B))^(1 / (alpha + beta)).
    """
    a, b, e, log_alpha, log_beta, log_r_d, log_r_n = theta
    alpha, beta = np.exp(log_alpha), np.exp(log_beta)
    log_g = (log_alpha + a - log_beta - b) / (alpha + beta)
    best = log_g + beta / alpha * (log_g + x[U])
    own = np.where(best.real < x[N], best, x[N])
    log_n = own + effective(x[N] - own, np.exp(log_r_n))
    unique = np.minimum(x[U], x[D])
    log_d = unique + effective(x[D] - unique, np.exp(log_r_d))
    return log_sum_exp(a - alpha * log_n, b - beta * log_d, e)


def effective(log_ratio, decay) -> np.ndarray:
    """log(1 + R (1 - exp(-(ratio - 1) / R))): 0 without repetition, log(1 + R) after very much."""
    return np.log1p(-decay * np.expm1(-np.expm1(log_ratio) / decay))


def data_constrained_inputs(columns: Columns, units: Units) -> dict[str, np.ndarray]:
    """Tokens that differ in the unit of tokens, so that their ratio stays."""
    return log_inputs(columns, {**units, U: units[D]})


def data_constrained_starts(x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
    """Each term 0.1 to 0.6 of the mean loss at the unit, one exponent, and R of 3 to 30."""
    del x, units
    shares = y.mean() + np.log([0.1, 0.3, 0.6])
    exponents, decays = np.log([0.2, 0.35, 0.6]), np.log([3.0, 10.0, 30.0])
    return grid(shares, shares, shares, exponents, exponents, decays, decays)


def data_constrained_constants(theta, units: Units) -> dict:
    a, b, e, log_alpha, log_beta, log_r_d, log_r_n = theta
    five = (a, b, e, np.exp(log_alpha), np.exp(log_beta))
    found = chinchilla_constants(five, units)
    return found | {'R_D': np.exp(log_r_d), 'R_N': np.exp(log_r_n)}


# The paper fits the first five to runs without repetition and then the last two; here all at once.
DATA_CONSTRAINED = Law(
    name='data_constrained',
    equation="L = E + A / N'^alpha + B / D'^beta, N' and D' by repetition",
    source='arXiv:2305.16264',
    constants=('E', 'A', 'B', 'alpha', 'beta', 'R_D', 'R_N'),
    columns=(N, D, U),
    inputs=data_constrained_inputs,
    value=data_constrained_value,
    starts=data_constrained_starts,
    constants_of=data_constrained_constants,
    units=geometric_means,
    distinct=3,
)


def downstream_value(theta, x: Columns) -> np.ndarray:
    """floor + (top - floor) / (1 + exp(slope (L - middle))); theta has log slope."""
    floor, top, log_slope, middle = theta
    return floor + (top - floor) * 0.5 * (1 - np.tanh(np.exp(log_slope) * (x[LOSS] - middle) / 2))


def downstream_starts(x: Columns, y: np.ndarray, units: Units) -> np.ndarray:
    """Ends at the scores there are and beyond, the middle anywhere between the losses."""
    del units
    low, high, losses = y.min(), y.max(), x[LOSS]
    wide = high - low
    slopes = np.log(np.array([1.0, 3.0, 10.0, 30.0]) / max(np.ptp(losses), 1e-6))
    middles = np.linspace(losses.min(), losses.max(), 5)
    return grid([low - wide / 2, low], [high, high + wide / 2, high + 2 * wide], slopes, middles)


DOWNSTREAM = Law(
    name='downstream',
    equation='score = floor + (top - floor) / (1 + exp(slope (L - middle)))',
    source='a logistic function of the loss, as arXiv:2407.21783 has it',
    constants=('floor', 'top', 'slope', 'middle'),
    columns=(LOSS,),
    inputs=lambda columns, units: dict(columns),
    value=downstream_value,
    starts=downstream_starts,
    constants_of=lambda theta, units: {
        'floor': theta[0],
        'top': theta[1],
        'slope': np.exp(theta[2]),
        'middle': theta[3],
    },
    units=lambda columns: {},
    distinct=5,
    target=SCORE,
    delta=0.01,  # not published: a score of some hundred questions is not known better
)
