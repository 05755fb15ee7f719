"""Scores of single weights, and masks of the weights with the largest scores."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

# (scores [..., I, O], a generator) -> ranks; the weights of the largest ranks are removed.
Ranking = Callable[[np.ndarray, np.random.Generator], np.ndarray]
REMOVE: Mapping[str, Ranking] = {
    'important': lambda scores, rng: scores,  # for unwanted text: Antidote, arXiv:2408.09600
    'random': lambda scores, rng: rng.random(scores.shape),  # the control
    'unimportant': lambda scores, rng: -scores,  # for wanted text: Wanda, arXiv:2306.11695
}
DAMPING = 0.01  # of the mean of the diagonal of H, added to it, as in SparseGPT
# 2 lambda lr^2 / 1000 in D-Pruner's code; its H is twice the sum over the 2,048 tokens of a row.
STRENGTH = 2 * 0.1 * 0.03**2 / 1000 * (2 * 2048)


def wanda(weights_IO: np.ndarray, squares_I: np.ndarray) -> np.ndarray:
    """Returns |w_io| sqrt(mean x_i^2), the scores of matrices [..., I, O] in y = x W.

    squares_I: means of x_i^2 over the tokens of a text, [..., I] (arXiv:2306.11695).
    """
    return np.abs(weights_IO) * np.sqrt(squares_I)[..., None]


def magnitude(weights_IO: np.ndarray, squares_I: np.ndarray) -> np.ndarray:
    """Returns |w_io|, which does not depend on the text."""
    del squares_I
    return np.abs(weights_IO)


def obs(weights_IO: np.ndarray, moments_II: np.ndarray) -> np.ndarray:
    """Returns w_io^2 / U_ii^2, the scores of SparseGPT (arXiv:2301.00774) of matrices [..., I, O].

    H holds the means of x_i x_j, plus DAMPING; U is the upper triangle with U' U = H^-1. The score
    is the mean square of the change of output o if w_io is removed and the weights of the inputs
    after i compensate. An input that is always 0 scores 0. moments_II: means over the tokens of a
    text, [..., I, I].
    """
    u_II, is_dead_I = invert_moments(moments_II)
    u_I = np.diagonal(u_II, axis1=-2, axis2=-1)
    return np.where(is_dead_I[..., None], 0.0, weights_IO**2 / u_I[..., None] ** 2)


def invert_moments(moments_II: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns (U, which inputs are always 0): U' U = H^-1, U upper triangular, as in SparseGPT.

    H holds the means of x_i x_j, plus DAMPING. moments_II: means over the tokens of a text,
    [..., I, I].
    """
    h_II, eye_II = np.asarray(moments_II, np.float64), np.eye(moments_II.shape[-1])
    squares_I = np.diagonal(h_II, axis1=-2, axis2=-1)
    # Inputs that are always 0 get 1 on the diagonal, so that H has an inverse (SparseGPT's code).
    dead_I = squares_I == 0
    damp = DAMPING * np.mean(np.where(dead_I, 1.0, squares_I), -1)[..., None]
    h_II = h_II + eye_II * (dead_I + damp)[..., None]
    return np.swapaxes(np.linalg.cholesky(np.linalg.inv(h_II)), -2, -1), dead_I


def regularise(gradients: Any, general: Any, strength: Any) -> Any:
    """Returns g + strength G g^2, as in the code of D-Pruner (arXiv:2405.06275).

    Args:
      gradients: g, on the text of a domain.
      general: the importance G (`obs`) of the same weights for a general text.
      strength: of the general importance.
    """
    return gradients + strength * general * gradients**2


def taylor(weights: Any, gradients: Any) -> Any:
    """Returns |g w| + (g w)^2 / 2: the change of the loss from removing each weight.

    It is of second order, with g^2 for the curvature.
    """
    change = gradients * weights
    return abs(change) + change**2 / 2


def taylor_published(weights: Any, gradients: Any) -> Any:
    """Returns |g w + (g w)^2 / 2000 + w^3|, as in the code of D-Pruner.

    w^3 stands in place of the order of the remainder.
    """
    change = gradients * weights
    return abs(change + change**2 / 2000 + weights**3)


SQUARES, MOMENTS, GRADIENTS = 'squares', 'moments', 'gradients'  # statistics of a text


@dataclasses.dataclass(frozen=True)
class WeightScore:
    """A row of SCORES.

    compute: (weights, statistic) -> scores. statistic: SQUARES or MOMENTS, the means of x_i^2 or
    x_i x_j, with weights as matrices [..., I, O]; or GRADIENTS of a row, in the shape of the
    parameter. per: the published row of PER. needs_general: whether gradients are `regularise`d,
    which takes a second text.
    """

    compute: Callable[[Any, Any], Any]
    statistic: str
    per: str
    needs_general: bool = False


SCORES: Mapping[str, WeightScore] = {
    'magnitude': WeightScore(magnitude, SQUARES, 'matrix'),
    'wanda': WeightScore(wanda, SQUARES, 'output'),
    'obs': WeightScore(obs, MOMENTS, 'matrix'),
    'taylor': WeightScore(taylor, GRADIENTS, 'matrix'),
    'dual': WeightScore(taylor, GRADIENTS, 'matrix', needs_general=True),
    'dual_published': WeightScore(taylor_published, GRADIENTS, 'matrix', needs_general=True),
}


def largest_per_output(ranks_IO: np.ndarray, share: float) -> np.ndarray:
    """Returns a mask of the floor(share I) largest of the I numbers of every output, [..., I, O].

    Ties go to the first numbers, so that the count is exact. Raises ValueError for a share of less
    than a single number.
    """
    return _largest(ranks_IO, share, 'inputs per output')


def largest_per_matrix(ranks_IO: np.ndarray, share: float) -> np.ndarray:
    """Returns a mask of the floor(share I O) largest numbers of each matrix of [..., I, O].

    Otherwise like `largest_per_output`.
    """
    flat_ranks = ranks_IO.reshape(*ranks_IO.shape[:-2], -1, 1)
    return _largest(flat_ranks, share, 'weights per matrix').reshape(ranks_IO.shape)


def _largest(ranks_IO: np.ndarray, share: float, unit: str) -> np.ndarray:
    n_inputs = ranks_IO.shape[-2]
    n_chosen = int(share * n_inputs + 1e-9)  # 0.29 * 100 is below 29 in float64
    if n_chosen == 0:
        raise ValueError(
            f'--share must be at least {1 / n_inputs:.3g}, to remove one of {n_inputs} {unit}; got '
            f'{share}'
        )
    order = np.argsort(-ranks_IO, axis=-2, kind='stable')[..., :n_chosen, :]
    mask = np.zeros(ranks_IO.shape, bool)
    np.put_along_axis(mask, order, True, -2)
    return mask


PER: Mapping[str, Callable[[np.ndarray, float], np.ndarray]] = {
    'matrix': largest_per_matrix,
    'output': largest_per_output,
}
