"""The entropy of attention, and the spectral norms that bound it from below."""

from collections.abc import Iterator

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.lab import measure
from modules.params import ParamSpec
from modules.reparam import REPARAMS, Reparam

TOKENS, WIDTH, SEEDS = 16, 16, 10
NORMS = (0.5, 2.0, 4.0, 8.0)  # of W_K W_Q^T times X X^T
GROWTH = 10.0  # of both stored matrices, whose product is the logits'
QK = ('query', 'key')
SPECS = {name: ParamSpec('hidden', ('embed', 'mlp'), ('embed',)) for name in QK}

Matrices = dict[str, jax.Array]


def entropy_bound(norm: float, tokens: int) -> float:
    """Returns the least entropy of attention over `tokens` in nats, whose logits X W X^T have
    |W| |X X^T| = norm (arXiv:2303.06296, theorem 3.1).

        log(1 + (T - 1) b) + norm sqrt(T (T - 1)) b / (1 + (T - 1) b), b = exp(-norm sqrt(T/(T-1)))
    """
    b = np.exp(-norm * np.sqrt(tokens / (tokens - 1)))
    total = 1 + (tokens - 1) * b
    return np.log(total) + norm * np.sqrt(tokens * (tokens - 1)) * b / total


def entropies(logits_TS: np.ndarray) -> np.ndarray:
    """Returns the entropy of each row of softmax(logits), in nats."""
    shifted_TS = logits_TS - logits_TS.max(-1, keepdims=True)
    total_T1 = np.exp(shifted_TS).sum(-1, keepdims=True)
    p_TS = np.exp(shifted_TS) / total_T1
    return np.log(total_T1[:, 0]) - np.sum(p_TS * shifted_TS, -1)


@measure(
    *('least_over_bound', 'most_over_bound_of_the_construction'),
    *('share_of_grown_with_sigma', 'share_of_grown_without'),
    trains=False,
)
def attention_entropy() -> Iterator[list[float]]:
    """Returns entropies of attention against the paper's bound, and as stored matrices grow.

    least_over_bound: the least row's entropy over the bound, of Gaussian X and W_K, W_Q under
    sigmaReparam, whose gammas have each of NORMS as a product, the least of all;
    most_over_bound_of_the_construction: the same of the paper's worst case, the most of all.
    share_of_grown: the mean entropy over log TOKENS, of rows of X with norm sqrt(WIDTH) and
    logits over sqrt(WIDTH), where both stored matrices have grown GROWTH times, with the map and
    without. Over SEEDS.
    """
    reparam = REPARAMS['sigma'](SPECS, {name: (WIDTH, WIDTH) for name in QK})
    yield [min_entropy_over_bound(reparam, seed) for seed in range(SEEDS)]
    yield [worst_case_over_bound(seed) for seed in range(SEEDS)]
    for one in (reparam, None):
        yield [grown_entropy_share(one, seed) for seed in range(SEEDS)]


def draw_matrices(rng: np.random.Generator) -> Matrices:
    """Draws matrices as a model starts with them."""
    return {name: jnp.float32(rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)) for name in QK}


def qk_product(used: Matrices) -> np.ndarray:
    """Returns W_Q W_K^T in float64."""
    return np.float64(used['query']) @ np.float64(used['key']).T


def min_entropy_over_bound(reparam: Reparam, seed: int) -> float:
    """Returns the least entropy over the bound of the gammas, of all NORMS and rows."""
    rng = np.random.default_rng(seed)
    x_TD = rng.standard_normal((TOKENS, WIDTH))
    of_x = np.linalg.norm(x_TD, 2) ** 2
    stored, state = reparam.init(draw_matrices(rng))
    found = []
    for norm in NORMS:
        gamma = jnp.float32(np.sqrt(norm / of_x))
        given = {name: one | {'gain': gamma} for name, one in stored.items()}
        used, _ = reparam.apply(given, state, True)
        logits_TS = x_TD @ qk_product(used) @ x_TD.T
        found.append(entropies(logits_TS).min() / entropy_bound(norm, TOKENS))
    return min(found)


def worst_case_over_bound(seed: int) -> float:
    """Returns the first row's entropy over the bound where X is orthogonal and W takes its first
    token to the logits of one key against all others alike; the most of all NORMS.
    """
    rng = np.random.default_rng(seed)
    x_TD = np.linalg.qr(rng.standard_normal((TOKENS, TOKENS)))[0]
    of_keys_T = np.full(TOKENS, -1 / TOKENS)
    of_keys_T[0] += 1
    of_keys_T /= np.linalg.norm(of_keys_T)
    found = []
    for norm in NORMS:
        w_DD = norm * np.outer(x_TD[0], of_keys_T @ x_TD)
        of_first = entropies(x_TD @ w_DD @ x_TD.T)[0]
        found.append(of_first / entropy_bound(np.linalg.norm(w_DD, 2), TOKENS))
    return max(found)


def grown_entropy_share(reparam: Reparam | None, seed: int) -> float:
    """Returns the mean entropy over the most, log TOKENS, of matrices that have grown."""
    rng = np.random.default_rng(seed)
    x_TD = rng.standard_normal((TOKENS, WIDTH))
    x_TD *= np.sqrt(WIDTH) / np.linalg.norm(x_TD, axis=-1, keepdims=True)
    used = draw_matrices(rng)
    if reparam is None:
        used = {name: GROWTH * matrix for name, matrix in used.items()}
    else:
        stored, state = reparam.init(used)
        grown = {name: one | {'matrix': GROWTH * one['matrix']} for name, one in stored.items()}
        used, _ = reparam.apply(grown, state, True)
    logits_TS = x_TD @ qk_product(used) @ x_TD.T / np.sqrt(WIDTH)
    return float(entropies(logits_TS).mean() / np.log(TOKENS))
