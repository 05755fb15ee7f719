"""Free features: the end of gradient descent on the features and a readout."""

import functools
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.estimates import Estimate, mean_over_seeds
from eval.claims.lab import measure

COUNTS, EQUAL_COUNTS = (64, 40, 25, 16, 10, 4, 2), (23,) * 7  # samples of each class
WIDTH = 10  # of the features; at least a class each
DECAY_W, DECAY_H = 0.02, 0.01  # of the readout and of the features
RATE, STEPS, START, SEEDS = 1.0, 30_000, 0.3, 4


@measure(
    *('error_of_squared_lengths', 'cosine_of_rows', 'vanishing_length', 'spread_within_classes'),
    *('cosine_of_rows_with_bias', 'spread_within_classes_without_decay'),
    'error_of_squared_lengths_of_half_the_decay',
)
def imbalanced_collapse() -> Iterator[Estimate]:
    """Yields the distance of gradient descent's end from imbalanced neural collapse.

    The loss is |W H - Y|^2 / 2N + DECAY_W |W|^2 / 2 + DECAY_H |H|^2 / 2 over W [K, D] and features
    H [D, N], one for each sample, with one-hot Y and COUNTS samples of the classes: the imbalanced
    case of arXiv:2301.00437. error_of_squared_lengths: the largest difference of |w_k|^2 from
    `squared_lengths`, over the largest squared length. cosine_of_rows: the largest |cosine| of two
    rows of W that do not vanish. vanishing_length: the largest |w_k|^2 of the rows that vanish,
    over the largest of all. spread_within_classes: sum |h - class mean|^2 / sum |h|^2.

    Then the cosine for classes of equal size and a readout with a bias, where the rows form a
    simplex; the spread if features have no decay; and the error of `squared_lengths` for half of
    both decays. Over SEEDS initial values.
    """
    counts_K = np.array(COUNTS)
    expected_K = squared_lengths(counts_K, DECAY_W, DECAY_H)
    ends = _descend_from_seeds()
    for values in zip(*(_compare_to_closed_form(*end, expected_K) for end in ends), strict=True):
        yield mean_over_seeds(values, 'log')
    with_bias = _descend_from_seeds(counts=EQUAL_COUNTS, has_bias=True)
    yield mean_over_seeds([_largest_cosine(w_KD) for w_KD, _ in with_bias], 'log')
    without_decay = _descend_from_seeds(decay_h=0.0)
    yield mean_over_seeds([_spread_within_classes(h_ND) for _, h_ND in without_decay], 'log')
    long_K = squared_lengths(counts_K, DECAY_W / 2, DECAY_H / 2)
    yield mean_over_seeds([_length_error(w_KD, long_K) for w_KD, _ in ends], 'log')


def squared_lengths(counts_K: np.ndarray, decay_w: float, decay_h: float) -> np.ndarray:
    """Returns |w_k|^2 = a_k sqrt(n_k decay_h / decay_w), a_k = max(0, 1 - N sqrt(decay_w decay_h /
    n_k)).

    Args:
      counts_K: n_k, samples of each class; N is their sum.
      decay_w: weight decay of the readout.
      decay_h: weight decay of the features.
    """
    a_K = np.maximum(0, 1 - counts_K.sum() * np.sqrt(decay_w * decay_h / counts_K))
    return a_K * np.sqrt(counts_K * decay_h / decay_w)


def _descend_from_seeds(**changes: Any) -> list[tuple[np.ndarray, np.ndarray]]:
    """Returns the ends of `_descend` for SEEDS initial values, in float64."""
    ends = [jax.device_get(_descend(seed, **changes)) for seed in range(SEEDS)]
    return [(np.asarray(w_KD, np.float64), np.asarray(h_ND, np.float64)) for w_KD, h_ND in ends]


@functools.partial(jax.jit, static_argnames=('steps', 'counts', 'decay_h', 'has_bias'))
def _descend(
    seed: jax.Array | int,
    steps: int = STEPS,
    counts: Sequence[int] = COUNTS,
    decay_h: float = DECAY_H,
    has_bias: bool = False,
) -> tuple[jax.Array, jax.Array]:
    """Returns the readout [K, D] and the features [N, D] at the end of gradient descent.

    Args:
      seed: of the initial values.
      steps: number of steps.
      counts: samples of each class.
      decay_h: weight decay of the features.
      has_bias: whether the readout has a bias, which does not decay.
    """
    labels_N = np.repeat(np.arange(len(counts)), counts)
    y_NK = jax.nn.one_hot(labels_N, len(counts))

    def loss(params, step):
        w_KD, h_ND, bias_K = params
        fit = jnp.sum((h_ND @ w_KD.T + has_bias * bias_K[None] - y_NK) ** 2) / len(labels_N)
        return (fit + DECAY_W * jnp.sum(w_KD**2) + decay_h * jnp.sum(h_ND**2)) / 2

    w_key, h_key = jax.random.split(jax.random.key(seed))
    start = (
        START * jax.random.normal(w_key, (len(counts), WIDTH)),
        START * jax.random.normal(h_key, (len(labels_N), WIDTH)),
        jnp.zeros(len(counts)),
    )
    w_KD, h_ND, _ = lab.train(loss, start, optax.sgd(RATE), jnp.arange(steps)).params
    return w_KD, h_ND


def _compare_to_closed_form(
    w_KD: np.ndarray, h_ND: np.ndarray, expected_K: np.ndarray
) -> list[float]:
    """Returns the first four values of `imbalanced_collapse` for one run."""
    squared_K, is_nonzero_K = np.sum(w_KD**2, 1), expected_K > 0
    return [
        _length_error(w_KD, expected_K),
        _largest_cosine(w_KD[is_nonzero_K]),
        float(squared_K[~is_nonzero_K].max() / squared_K.max()),
        _spread_within_classes(h_ND),
    ]


def _length_error(w_KD: np.ndarray, expected_K: np.ndarray) -> float:
    return float(np.max(np.abs(np.sum(w_KD**2, 1) - expected_K)) / expected_K.max())


def _largest_cosine(w_KD: np.ndarray) -> float:
    units_KD = w_KD / np.linalg.norm(w_KD, axis=1, keepdims=True)
    return float(np.max(np.abs(units_KD @ units_KD.T - np.eye(len(units_KD)))))


def _spread_within_classes(h_ND: np.ndarray) -> float:
    h_by_class = np.split(h_ND, np.cumsum(COUNTS)[:-1])
    within = sum(np.sum((h_MD - h_MD.mean(0)) ** 2) for h_MD in h_by_class)
    return float(within / np.sum(h_ND**2))
