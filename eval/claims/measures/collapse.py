"""Free features: the end of gradient descent on the features and a readout."""

import functools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import optax

from eval.claims import lab
from eval.claims.lab import measure

COUNTS = (64, 40, 25, 16, 10, 4, 2)  # samples of each class
WIDTH = 10  # of the features; at least a class each
DECAY_W, DECAY_H = 0.02, 0.01  # of the readout and of the features
RATE, STEPS, START, SEEDS = 1.0, 30_000, 0.3, 10


@measure(
    *('error_of_squared_lengths', 'cosine_of_rows', 'vanishing_length', 'spread_within_classes')
)
def imbalanced_collapse() -> Iterable[Iterable[float]]:
    """Returns the distance of gradient descent's end from imbalanced neural collapse.

    The loss is |W H - Y|^2 / 2N + DECAY_W |W|^2 / 2 + DECAY_H |H|^2 / 2 over W [K, D] and features
    H [D, N], one for each sample, with one-hot Y and COUNTS samples of the classes: the imbalanced
    case of arXiv:2301.00437. error_of_squared_lengths: the largest difference of |w_k|^2 from
    `squared_lengths`, over the largest squared length. cosine_of_rows: the largest |cosine| of two
    rows of W that do not vanish. vanishing_length: the largest |w_k|^2 of the rows that vanish,
    over the largest of all. spread_within_classes: sum |h - class mean|^2 / sum |h|^2. Over SEEDS
    initial values.
    """
    ends = [jax.device_get(_descend(seed)) for seed in range(SEEDS)]
    expected_K = squared_lengths(np.array(COUNTS), DECAY_W, DECAY_H)
    comparisons = (
        _compare_to_closed_form(
            np.asarray(w_KD, np.float64), np.asarray(h_ND, np.float64), expected_K
        )
        for w_KD, h_ND in ends
    )
    return zip(*comparisons, strict=True)


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


@functools.partial(jax.jit, static_argnames='steps')
def _descend(seed: jax.Array, steps: int = STEPS) -> tuple[jax.Array, jax.Array]:
    """Returns the readout [K, D] and the features [N, D] at the end of gradient descent."""
    labels_N = np.repeat(np.arange(len(COUNTS)), COUNTS)
    y_NK = jax.nn.one_hot(labels_N, len(COUNTS))

    def loss(weights, step):
        w_KD, h_ND = weights
        fit = jnp.sum((h_ND @ w_KD.T - y_NK) ** 2) / len(labels_N)
        return (fit + DECAY_W * jnp.sum(w_KD**2) + DECAY_H * jnp.sum(h_ND**2)) / 2

    w_key, h_key = jax.random.split(jax.random.key(seed))
    start = (
        START * jax.random.normal(w_key, (len(COUNTS), WIDTH)),
        START * jax.random.normal(h_key, (len(labels_N), WIDTH)),
    )
    return lab.train(loss, start, optax.sgd(RATE), jnp.arange(steps)).params


def _compare_to_closed_form(
    w_KD: np.ndarray, h_ND: np.ndarray, expected_K: np.ndarray
) -> list[float]:
    """Returns the values of `imbalanced_collapse` for one run."""
    squared_K, is_nonzero_K = np.sum(w_KD**2, 1), expected_K > 0
    units = w_KD[is_nonzero_K] / np.sqrt(squared_K[is_nonzero_K])[:, None]
    cosines = units @ units.T - np.eye(len(units))
    h_by_class = np.split(h_ND, np.cumsum(COUNTS)[:-1])
    within = sum(np.sum((h_MD - h_MD.mean(0)) ** 2) for h_MD in h_by_class)
    return [
        float(np.max(np.abs(squared_K - expected_K)) / expected_K.max()),
        float(np.max(np.abs(cosines))),
        float(squared_K[~is_nonzero_K].max() / squared_K.max()),
        float(within / np.sum(h_ND**2)),
    ]
