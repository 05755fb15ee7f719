"""The entropy of attention, and the spectral norms that bound it from below."""

from collections.abc import Iterable, Iterator

import jax
import jax.numpy as jnp
import numpy as np

from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure
from modules.params import ParamSpec
from modules.reparam import REPARAMS, Reparam

TOKENS, WIDTH, SEEDS = 16, 16, 10
NORMS = (0.5, 2.0, 4.0, 8.0)  # of W_K W_Q^T times X X^T
NOISE = (0.001, 0.01, 0.1, 1.0)  # added to the worst case, relative to its norm
SMALLER = 0.99  # norms of a bound that some rows violate
GROWTH = 10.0  # of both stored matrices, whose product is the logits'
QK = ('query', 'key')
SPECS = {name: ParamSpec('hidden', ('embed', 'mlp'), ('embed',)) for name in QK}

Matrices = dict[str, jax.Array]


def entropy_bound(norm: float, tokens: int, power: float = 0.5) -> float:
    """Returns the least entropy of attention over `tokens`, in nats, if |W| |X X^T| = norm.

        log(1 + (T - 1) b) + norm sqrt(T (T - 1)) b / (1 + (T - 1) b), b = exp(-norm sqrt(T/(T-1)))

    The logits are X W X^T (arXiv:2303.06296, theorem 3.1).

    Args:
      norm: |W| |X X^T|, both spectral norms.
      tokens: T.
      power: of T / (T - 1) in b; 0 leaves the factor out.
    """
    b = np.exp(-norm * (tokens / (tokens - 1)) ** power)
    total = 1 + (tokens - 1) * b
    return np.log(total) + norm * np.sqrt(tokens * (tokens - 1)) * b / total


def entropies(logits_TS: np.ndarray) -> np.ndarray:
    """Returns the entropy of each row of softmax(logits), in nats."""
    shifted_TS = logits_TS - logits_TS.max(-1, keepdims=True)
    total_T1 = np.exp(shifted_TS).sum(-1, keepdims=True)
    p_TS = np.exp(shifted_TS) / total_T1
    return np.log(total_T1[:, 0]) - np.sum(p_TS * shifted_TS, -1)


@measure(
    *('least_over_bound', 'most_over_bound_of_the_construction', 'share_of_grown_with_sigma'),
    *('least_over_bound_of_smaller_norms', 'share_of_grown_without'),
    *('least_over_bound_without_the_root', 'share_of_grown_with_sigma_of_keys'),
    trains=False,
)
def attention_entropy() -> Iterator[Estimate]:
    """Yields entropies of attention against the paper's bound, and as stored matrices grow.

    least_over_bound: the least entropy of a row over the bound, for the worst case with NOISE and
    W_K, W_Q under sigmaReparam with gammas of product NORMS; the least of all.
    most_over_bound_of_the_construction: the entropy over the bound for the paper's worst case; the
    largest of all NORMS. share_of_grown: the mean entropy over log TOKENS, with rows of X of norm
    sqrt(WIDTH) and logits divided by sqrt(WIDTH), after both stored matrices have grown GROWTH
    times, with sigmaReparam. Then controls: least_over_bound with the bound of norms SMALLER times
    those of the matrices, and share_of_grown without sigmaReparam. Then twins: least_over_bound
    without sqrt(T / (T - 1)) in the bound, and share_of_grown with sigmaReparam of the keys alone.
    Over SEEDS.
    """
    reparam = REPARAMS['sigma'](SPECS, {name: (WIDTH, WIDTH) for name in QK})
    least_SN = np.array([least_entropies(reparam, seed) for seed in range(SEEDS)])

    def compare_to_bound(share=1.0, power=0.5):
        bounds_N = [entropy_bound(share * norm, TOKENS, power) for norm in NORMS]
        return mean_over_seeds((least_SN / bounds_N).min(1), 'log')

    def grow(reparametrised):
        shares = [grown_entropy_share(reparam, reparametrised, seed) for seed in range(SEEDS)]
        return mean_over_seeds(shares, 'logit')

    yield compare_to_bound()
    yield mean_over_seeds([worst_case_over_bound(seed) for seed in range(SEEDS)], 'log')
    yield grow(QK)
    yield compare_to_bound(share=SMALLER)
    yield grow(())
    yield compare_to_bound(power=0.0)
    yield grow(('key',))


def draw_matrices(rng: np.random.Generator) -> Matrices:
    """Draws matrices as in an untrained model."""
    return {name: jnp.float32(rng.standard_normal((WIDTH, WIDTH)) / np.sqrt(WIDTH)) for name in QK}


def qk_product(used: Matrices) -> np.ndarray:
    """Returns W_Q W_K^T in float64."""
    return np.asarray(used['query'], np.float64) @ np.asarray(used['key'], np.float64).T


def draw_worst_case(rng: np.random.Generator) -> tuple[np.ndarray, np.ndarray]:
    """Returns X [T, D] and W [D, D] of norm 1 that reach the bound, up to the norm of W.

    X is orthogonal, and W gives its first token one key with a larger logit than all others, which
    are equal.
    """
    x_TD = np.linalg.qr(rng.standard_normal((TOKENS, WIDTH)))[0]
    key_logits_T = np.full(TOKENS, -1 / TOKENS)
    key_logits_T[0] += 1
    key_logits_T /= np.linalg.norm(key_logits_T)
    return x_TD, np.outer(x_TD[0], key_logits_T @ x_TD)


def least_entropies(reparam: Reparam, seed: int) -> list[float]:
    """Returns the least entropy over all rows and NOISE, for the gammas of each of NORMS."""
    rng = np.random.default_rng(seed)
    x_TD, w_DD = draw_worst_case(rng)
    noise_TD, noise_DD = rng.standard_normal((2, WIDTH, WIDTH)) / np.sqrt(WIDTH)
    noisy = [(x_TD + share * noise_TD, w_DD + share * noise_DD) for share in NOISE]
    return [min(least_entropy(reparam, x, w, norm, rng) for x, w in noisy) for norm in NORMS]


def least_entropy(
    reparam: Reparam, x_TD: np.ndarray, w_DD: np.ndarray, norm: float, rng: np.random.Generator
) -> float:
    """Returns the least entropy of a row if W_Q W_K^T is W, and gammas make |W| |X X^T| = norm.

    Args:
      reparam: sigmaReparam of both matrices.
      x_TD: inputs.
      w_DD: W, of any norm.
      norm: |W| |X X^T| after sigmaReparam.
      rng: draws the orthogonal W_Q.
    """
    # An orthogonal W_Q: the norm of the product is then the product of the norms.
    query = np.linalg.qr(rng.standard_normal(w_DD.shape))[0]
    stored, state = reparam.init({'query': jnp.float32(query), 'key': jnp.float32(w_DD.T @ query)})
    gamma = jnp.float32(np.sqrt(norm) / np.linalg.norm(x_TD, 2))
    scaled = {name: tensors | {'gain': gamma} for name, tensors in stored.items()}
    used, _ = reparam.apply(scaled, state, True)
    return float(entropies(x_TD @ qk_product(used) @ x_TD.T).min())


def worst_case_over_bound(seed: int) -> float:
    """Returns the entropy of the first row over the bound in the worst case, maximum over NORMS."""
    x_TD, w_DD = draw_worst_case(np.random.default_rng(seed))
    first_entropies = [entropies(norm * x_TD @ w_DD @ x_TD.T)[0] for norm in NORMS]
    return max(first_entropies / np.array([entropy_bound(norm, TOKENS) for norm in NORMS]))


def grown_entropy_share(reparam: Reparam, reparametrised: Iterable[str], seed: int) -> float:
    """Returns the mean entropy over log TOKENS, its maximum, for matrices that have grown.

    Args:
      reparam: sigmaReparam of both matrices.
      reparametrised: the matrices that it applies to, of QK.
      seed: of inputs and matrices.
    """
    rng = np.random.default_rng(seed)
    x_TD = rng.standard_normal((TOKENS, WIDTH))
    x_TD *= np.sqrt(WIDTH) / np.linalg.norm(x_TD, axis=-1, keepdims=True)
    stored, state = reparam.init(draw_matrices(rng))
    grown = {
        name: tensors | {'matrix': GROWTH * tensors['matrix']} for name, tensors in stored.items()
    }
    mapped, _ = reparam.apply(grown, state, True)
    used = {name: mapped[name] if name in reparametrised else grown[name]['matrix'] for name in QK}
    logits_TS = x_TD @ qk_product(used) @ x_TD.T / np.sqrt(WIDTH)
    return float(entropies(logits_TS).mean() / np.log(TOKENS))
