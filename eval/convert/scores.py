"""Scores of single weights, and the masks that choose some weights of every output."""

from collections.abc import Callable, Mapping

import numpy as np

from modules.params import ParamSpec, as_matrices, from_matrices

# How masks choose: the largest of (scores [..., I, O], a generator) are removed.
Ranking = Callable[[np.ndarray, np.random.Generator], np.ndarray]
REMOVE: Mapping[str, Ranking] = {
    'important': lambda scores, rng: scores,  # of unwanted text: Antidote, arXiv:2408.09600
    'random': lambda scores, rng: rng.random(scores.shape),  # the control: as many, whichever
    'unimportant': lambda scores, rng: -scores,  # of wanted text: Wanda, arXiv:2306.11695
}


def wanda(weights_IO: np.ndarray, squares_I: np.ndarray) -> np.ndarray:
    """Returns |w_io| sqrt(mean x_i^2), the scores of matrices [..., I, O] in y = x W.

    squares_I: means of x_i^2 over the tokens of a text, [..., I] (arXiv:2306.11695).
    """
    return np.abs(weights_IO) * np.sqrt(squares_I)[..., None]


def largest_of_outputs(ranks_IO: np.ndarray, share: float) -> np.ndarray:
    """Returns a mask of the floor(share I) largest of the I numbers of every output, of [..., I,
    O]; of equal ones the first are taken, so that the number is exact.

    Raises ValueError for a share of less than one of them.
    """
    n_inputs = ranks_IO.shape[-2]
    n_chosen = int(share * n_inputs + 1e-9)  # 0.29 * 100 is below 29 in float64
    if n_chosen == 0:
        raise ValueError(
            f'a share of {share} of the {n_inputs} inputs of an output is less than one of them; '
            f'give {1 / n_inputs:.3g} or more'
        )
    order = np.argsort(-ranks_IO, axis=-2, kind='stable')[..., :n_chosen, :]
    mask = np.zeros(ranks_IO.shape, bool)
    np.put_along_axis(mask, order, True, -2)
    return mask


def removed(
    spec: ParamSpec,
    weight: np.ndarray,
    squares: np.ndarray,
    remove: str,
    share: float,
    rng: np.random.Generator,
) -> np.ndarray:
    """Returns the mask, shaped as a weight, of what is removed of it.

    Args:
      spec: the description of the weight.
      weight: a parameter; each index of its batch axes is a matrix.
      squares: means of the squares of its inputs, batch axes, then those that are summed over.
      remove: a row of REMOVE.
      share: of the inputs of every output.
      rng: of the row `random`.
    """
    matrices_IO = np.asarray(as_matrices(spec, weight))
    scores_IO = wanda(matrices_IO, np.asarray(squares).reshape(matrices_IO.shape[:-1]))
    mask_IO = largest_of_outputs(REMOVE[remove](scores_IO, rng), share)
    return np.asarray(from_matrices(spec, mask_IO, weight.shape))
