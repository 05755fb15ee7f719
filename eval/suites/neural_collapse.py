"""Neural collapse: the spread of features before the same token, and the frame of their means."""

from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import numpy as np

from eval.load import Checkpoint, open_data
from eval.suites.base import SuiteResult, Table
from eval.suites.reading import jit_statistic, validation_batches
from lm.inference.scoring import fetch_pipelined
from lm.training.state import Hyper, Learner, Weights
from lm.training.step import Batch, compute_activations, target_weights
from modules.options import Option


def neural_collapse(
    checkpoint: Checkpoint,
    *,
    tokens: Annotated[int, Option('approximate number of validation tokens; 0: all', 0)] = 65_536,
    classes: Annotated[int, Option('number of classes: the most frequent next tokens', 2)] = 1024,
    least: Annotated[int, Option('minimum number of occurrences of a class', 2)] = 10,
) -> SuiteResult:
    """Measures neural collapse (NC1 to NC4) of the last features.

    The class of a feature is the next token. The features h of class c have the mean m_c, and s_c^2
    is their mean |h - m_c|^2. m is the mean of the m_c, u_c the unit vector along m_c - m, and w_c
    the column of the readout. nc1: (s_c^2 + s_d^2) / (2 |m_c - m_d|^2), averaged over pairs of
    classes; 0 if all features of a class are equal (arXiv:2112.15121). nc2_norms and nc2_distances:
    standard deviation divided by mean, of |m_c - m| and of log |u_c - u_d|. nc2_cosines: the
    standard deviation of u_c.u_d. All three are 0 if the means form a simplex. nc3: the mean of
    cos(w_c, m_c - m). nc3_spread: the standard deviation of that cosine divided by its mean. They
    are 1 and 0 if means and readout form the same frame. nc4: the share of tokens for which the
    class with the largest logit also has the nearest mean. For language models see
    arXiv:2405.17767.

    Args:
      checkpoint: a loaded checkpoint.
      tokens: approximate number of validation tokens to read; 0: all.
      classes: number of classes, the most frequent next tokens.
      least: minimum number of occurrences of a class.
    """
    features = ValidationFeatures(checkpoint, tokens)
    sums_VD, counts_V = features.sum_statistic(sums_by_class)
    chosen_C = frequent_tokens(counts_V, classes, least)
    counts_C = counts_V[chosen_C]
    means_CD = sums_VD[chosen_C] / counts_C[:, None]
    squares_C, n_agreeing = features.sum_statistic(
        sums_around_means, chosen_C, np.float32(means_CD)
    )
    readout_CD: Any = np.float64(features.first_statistic(readout_rows, chosen_C))
    variances_C, centred_CD = squares_C / counts_C, means_CD - means_CD.mean(0)
    cosines_C = np.sum(normalise_rows(readout_CD) * normalise_rows(centred_CD), 1)
    numbers = {
        'tokens': counts_C.sum(),
        'classes': len(chosen_C),
        'nc1': compute_variability(means_CD, variances_C),
        **measure_frame(centred_CD),
        'nc3': cosines_C.mean(),
        'nc3_spread': cosines_C.std() / cosines_C.mean(),
        'nc4': n_agreeing / counts_C.sum(),
    }
    columns = {
        'token': [checkpoint.tokenizer.decode([int(token)]) for token in chosen_C],
        'tokens': counts_C.astype(int).tolist(),
        'variance': variances_C.tolist(),
        'length of the mean': np.linalg.norm(centred_CD, axis=1).tolist(),
        'cosine with the readout': cosines_C.tolist(),
    }
    tables = {'Classes': Table(columns, x='tokens', y='cosine with the readout')}
    return SuiteResult({name: float(x) for name, x in numbers.items()}, {}, tables)


class ValidationFeatures:
    """The last features of the validation split, batch by batch."""

    def __init__(self, checkpoint: Checkpoint, tokens: int):
        self._checkpoint, self._tokens = checkpoint, tokens
        self._split = open_data(checkpoint).validation

    def sum_statistic(self, statistic: Callable[..., Any], *arguments: Any) -> tuple[Any, ...]:
        """Returns the sums of statistic(learner, weights, batch, hyper, *arguments), in float64."""
        statistics = self._iterate(statistic, arguments, self._tokens)
        sums = [np.float64(x) for x in next(statistics)]
        for batch_statistics in statistics:
            sums = [total + np.float64(x) for total, x in zip(sums, batch_statistics, strict=True)]
        return tuple(sums)

    def first_statistic(self, statistic: Callable[..., Any], *arguments: Any) -> Any:
        """Returns the statistic of the first batch."""
        return next(self._iterate(statistic, arguments, tokens=1))

    def _iterate(self, statistic, arguments, tokens):
        c = self._checkpoint
        run, batches = jit_statistic(c, statistic), validation_batches(c, self._split, tokens)
        return fetch_pipelined(run(c.weights, batch, c.hyper, *arguments) for batch in batches)


def read_features(
    learner: Learner, weights: Weights, batch: Batch, hyper: Hyper
) -> tuple[Any, ...]:
    """Returns (features [M, D] float32, the next token of each, its weight, the readout).

    Args:
      learner: of the model.
      weights: of the model.
      batch: of tokens.
      hyper: of the learner.
    """
    (x_BTD, readout), _ = compute_activations(learner, learner.variables(weights), batch, (), hyper)
    weights_BT = target_weights(batch, learner.bos_id).astype(jnp.float32)
    x_MD = x_BTD.reshape(-1, x_BTD.shape[-1]).astype(jnp.float32)
    return x_MD, batch['tokens'][:, 1:].reshape(-1), weights_BT.reshape(-1), readout


def sums_by_class(
    learner: Learner, weights: Weights, batch: Batch, hyper: Hyper
) -> tuple[jax.Array, jax.Array]:
    """Returns (the sum of the features before each token [V, D], their number [V]).

    Args:
      learner: of the model.
      weights: of the model.
      batch: of tokens.
      hyper: of the learner.
    """
    x_MD, next_M, weights_M, _ = read_features(learner, weights, batch, hyper)
    vocab = learner.model.vocab_size
    sums_VD = jnp.zeros((vocab, x_MD.shape[-1])).at[next_M].add(weights_M[:, None] * x_MD)
    return sums_VD, jnp.zeros(vocab).at[next_M].add(weights_M)


def sums_around_means(
    learner: Learner,
    weights: Weights,
    batch: Batch,
    hyper: Hyper,
    chosen_C: jax.Array,
    means_CD: jax.Array,
) -> tuple[jax.Array, jax.Array]:
    """Returns sums over the targets of some classes.

    Args:
      learner: of the model.
      weights: of the model.
      batch: of tokens.
      hyper: of the learner.
      chosen_C: tokens of the classes.
      means_CD: of the features of each class.

    Returns:
      (sums of |h - m_c|^2 by class [C], the number of targets with the nearest mean at the class of
        the largest logit).
    """
    x_MD, next_M, weights_M, readout = read_features(learner, weights, batch, hyper)
    # -1 for tokens of no class, which get the weight 0 below.
    place_V = jnp.full(learner.model.vocab_size, -1).at[chosen_C].set(jnp.arange(len(chosen_C)))
    place_M = place_V[next_M]
    weights_M = weights_M * (place_M >= 0)
    square_M = jnp.sum(jnp.square(x_MD - means_CD[place_M]), -1)
    squares_C = jnp.zeros(len(chosen_C)).at[place_M].add(weights_M * square_M)
    bias_V = readout.bias_V
    class_readout = readout.replace(
        weight_DV=readout.weight_DV[:, chosen_C],
        bias_V=None if bias_V is None else bias_V[chosen_C],
        is_table=False,
    )
    # |h - m|^2 - |h|^2: the term |h|^2 is the same for all means.
    from_means_MC = jnp.sum(jnp.square(means_CD), 1)[None] - 2 * x_MD @ means_CD.T
    is_same_M = jnp.argmax(class_readout(x_MD), -1) == jnp.argmin(from_means_MC, -1)
    return squares_C, jnp.sum(weights_M * is_same_M)


def readout_rows(
    learner: Learner,
    weights: Weights,
    batch: Batch,
    hyper: Hyper,
    chosen_C: jax.Array,
) -> jax.Array:
    """Returns the rows [C, D] of the readout for some tokens.

    Args:
      learner: of the model.
      weights: of the model.
      batch: of tokens.
      hyper: of the learner.
      chosen_C: the tokens.
    """
    *_, readout = read_features(learner, weights, batch, hyper)
    return readout.weight_DV[:, chosen_C].T


def frequent_tokens(counts_V: np.ndarray, max_classes: int, min_count: int) -> np.ndarray:
    """Returns the most frequent next tokens.

    Args:
      counts_V: of each token.
      max_classes: number of tokens, at most.
      min_count: of each returned token.

    Raises:
      ValueError: if there are fewer than three: a frame has three vectors.
    """
    order = np.argsort(-counts_V, kind='stable')[:max_classes]
    chosen = order[counts_V[order] >= min_count]
    if len(chosen) < 3:
        raise ValueError(
            f'neural_collapse needs at least three classes, next tokens that occur {min_count} '
            f'times or more; got {len(chosen)}. Raise --neural_collapse.tokens or '
            '--neural_collapse.classes, or lower --neural_collapse.least.'
        )
    return chosen


def normalise_rows(x_CD: np.ndarray) -> np.ndarray:
    """Returns the rows scaled to length 1; zeros stay zeros."""
    lengths_C1 = np.linalg.norm(x_CD, axis=1, keepdims=True)
    return x_CD / np.where(lengths_C1 > 0, lengths_C1, 1)


def compute_variability(means_CD: np.ndarray, variances_C: np.ndarray) -> float:
    """Returns the mean over pairs of (s_c^2 + s_d^2) / (2 |m_c - m_d|^2) (arXiv:2112.15121)."""
    c, d = np.triu_indices(len(means_CD), 1)
    squares = np.sum(means_CD**2, 1)
    squared_distances = squares[c] + squares[d] - 2 * (means_CD @ means_CD.T)[c, d]
    return float(np.mean((variances_C[c] + variances_C[d]) / (2 * squared_distances)))


def measure_frame(centred_CD: np.ndarray) -> dict[str, float]:
    """Returns the numbers of NC2: the deviations from a simplex, or from any equal spacing."""
    lengths_C, units_CD = np.linalg.norm(centred_CD, axis=1), normalise_rows(centred_CD)
    cosines = (units_CD @ units_CD.T)[np.triu_indices(len(units_CD), 1)]
    logs = 0.5 * np.log(np.maximum(2 - 2 * cosines, np.finfo(np.float64).tiny))
    return {
        'nc2_norms': float(lengths_C.std() / lengths_C.mean()),
        'nc2_cosines': float(cosines.std()),
        'nc2_distances': float(logs.std() / np.abs(logs.mean())),
    }
