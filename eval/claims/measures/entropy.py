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
    """Returns the least entropy of attention over `tokens`, in nats, if |W| |X X^T| = norm.

        log(1 + (T - 1) b) + norm sqrt(T (T - 1)) b / (1 + (T - 1) b), b = exp(-norm sqrt(T/(T-1)))

    The logits are X W X^T (arXiv:2303.06296, theorem 3.1).
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
    """Yields entropies of attention against the paper's bound, and as stored matrices grow.

    least_over_bound: the least entropy of a row over the bound, for Gaussian X and W_K, W_Q under
    sigmaReparam with gammas of product NORMS; the least of all.
    most_over_bound_of_the_construction: the same for the paper's worst case; the largest of all.
    share_of_grown: the mean entropy over log TOKENS, with rows of X of norm sqrt(WIDTH) and logits
    divided by sqrt(WIDTH), after both stored matrices have grown GROWTH times, with and without
    sigmaReparam. Over SEEDS.
    """
    reparam = REPARAMS['sigma'](SPECS, {name: (WIDTH, WIDTH) for name in QK})
    yield [min_entropy_over_bound(reparam, seed) for seed in range(SEEDS)]
    yield [worst_case_over_bound(seed) for seed in range(SEEDS)]
    for mapping in (reparam, None):
        yield [grown_entropy_share(mapping, seed) for seed in range(SEEDS)]


def draw_matrices(rng: np.random.Generator) -> Matrices:
    """Draws matrices as in an untrained model."""
    return {name: jnp.float32(rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)) for name in QK}


def qk_product(used: Matrices) -> np.ndarray:
    """Returns W_Q W_K^T in float64."""
    return np.asarray(used['query'], np.float64) @ np.asarray(used['key'], np.float64).T


def min_entropy_over_bound(reparam: Reparam, seed: int) -> float:
    """Returns the least entropy over the bound of the gammas, over all NORMS and rows."""
    rng = np.random.default_rng(seed)
    x_TD = rng.standard_normal((TOKENS, WIDTH))
    x_norm = np.linalg.norm(x_TD, 2) ** 2
    stored, state = reparam.init(draw_matrices(rng))
    ratios = []
    for norm in NORMS:
        gamma = jnp.float32(np.sqrt(norm / x_norm))
        scaled = {name: tensors | {'gain': gamma} for name, tensors in stored.items()}
        used, _ = reparam.apply(scaled, state, True)
        logits_TS = x_TD @ qk_product(used) @ x_TD.T
        ratios.append(entropies(logits_TS).min() / entropy_bound(norm, TOKENS))
    return min(ratios)


def worst_case_over_bound(seed: int) -> float:
    """Returns the entropy of the first row over the bound in the worst case, maximum over NORMS.

    X is orthogonal, and W gives its first token one key with a larger logit than all others, which
    are equal.
    """
    rng = np.random.default_rng(seed)
    x_TD = np.linalg.qr(rng.standard_normal((TOKENS, TOKENS)))[0]
    key_logits_T = np.full(TOKENS, -1 / TOKENS)
    key_logits_T[0] += 1
    key_logits_T /= np.linalg.norm(key_logits_T)
    ratios = []
    for norm in NORMS:
        w_DD = norm * np.outer(x_TD[0], key_logits_T @ x_TD)
        first_entropy = entropies(x_TD @ w_DD @ x_TD.T)[0]
        ratios.append(first_entropy / entropy_bound(np.linalg.norm(w_DD, 2), TOKENS))
    return max(ratios)


def grown_entropy_share(reparam: Reparam | None, seed: int) -> float:
    """Returns the mean entropy over log TOKENS, its maximum, for matrices that have grown."""
    rng = np.random.default_rng(seed)
    x_TD = rng.standard_normal((TOKENS, WIDTH))
    x_TD *= np.sqrt(WIDTH) / np.linalg.norm(x_TD, axis=-1, keepdims=True)
    used = draw_matrices(rng)
    if reparam is None:
        used = {name: GROWTH * matrix for name, matrix in used.items()}
    else:
        stored, state = reparam.init(used)
        grown = {
            name: tensors | {'matrix': GROWTH * tensors['matrix']}
            for name, tensors in stored.items()
        }
        used, _ = reparam.apply(grown, state, True)
    logits_TS = x_TD @ qk_product(used) @ x_TD.T / np.sqrt(WIDTH)
    return float(entropies(logits_TS).mean() / np.log(TOKENS))
