"""Datamodels: the outputs of models as a linear function of their training documents.

A model unlearns documents by fine-tuning to the predictions of its datamodel without them
(datamodel matching). KLoM measures how far such models are from models that never saw the
documents. Everything is a function of arrays: outputs of N documents may be logits, margins, or a
number per document. Source: arXiv:2410.23232, and https://github.com/RoyRin/data-unlearning-bench.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

BINS, CLIP, FLOOR = 20, 100.0, 1e-5  # of `klom`, as in the authors' code


class Datamodel(NamedTuple):
    """f(S) = constant [...] + sum of effects_i over the documents i of S, effects [N, ...]."""

    constant: np.ndarray
    effects: np.ndarray


def fit_datamodel(
    included_RN: np.ndarray, model_outputs: np.ndarray, ridge: float = 0.0
) -> Datamodel:
    """Fits the outputs of models to their training documents by least squares.

    min sum_r (outputs_r - f(S_r))^2 + ridge sum_i effects_i^2; the constant has no penalty. The
    paper estimates datamodels (arXiv:2202.00622) from models of random halves of the documents.

    Args:
      included_RN: whether model r was trained on document n.
      model_outputs: of each model, [R, ...].
      ridge: the penalty, 0 or more.

    Returns:
      The datamodel, in float64.

    Raises:
      ValueError: if the models do not distinguish the documents, and ridge is 0.
    """
    included_RN, model_outputs = (
        np.asarray(included_RN, np.float64),
        np.asarray(model_outputs, np.float64),
    )
    # Centring removes the constant from the least squares.
    means_N, flat_RO = included_RN.mean(0), model_outputs.reshape(len(model_outputs), -1)
    centred_RN, mean_O = included_RN - means_N, flat_RO.mean(0)
    count = included_RN.shape[1]
    if ridge == 0 and (rank := np.linalg.matrix_rank(centred_RN)) < count:
        raise ValueError(
            f'{len(included_RN)} models distinguish only {rank} of {count} documents. Add models '
            'that were trained without some of the documents, or set ridge above 0.'
        )
    gram_NN = centred_RN.T @ centred_RN + ridge * np.eye(count)
    effects_NO = np.linalg.solve(gram_NN, centred_RN.T @ (flat_RO - mean_O))
    shape = model_outputs.shape[1:]
    constant_O = mean_O - means_N @ effects_NO
    return Datamodel(constant_O.reshape(shape), effects_NO.reshape(count, *shape))


def predict_without(
    model_outputs: np.ndarray, datamodel: Datamodel, forgotten: np.ndarray
) -> np.ndarray:
    """Predicts the outputs of models trained without some documents.

    Subtracts the sum of effects from each model's outputs, as in the authors' code. In contrast, f
    of the remaining documents does not depend on the initialisation of a model.

    Args:
      model_outputs: [..., shape of an output].
      datamodel: gives the effects.
      forgotten: the documents.
    """
    return model_outputs - datamodel.effects[forgotten].sum(0)


def descend(
    loss: Callable[[Any], jax.Array],
    params: Any,
    transform: optax.GradientTransformation,
    steps: int,
) -> Any:
    """Returns the parameters after some updates of a transform on the gradient of a loss.

    Args:
      loss: of the parameters.
      params: the initial parameters.
      transform: of optax.
      steps: number of updates.
    """

    def step(_, carry):
        params, state = carry
        updates, state = transform.update(jax.grad(loss)(params), state, params)
        return optax.apply_updates(params, updates), state

    return jax.lax.fori_loop(0, steps, step, (params, transform.init(params)))[0]


def match_targets(
    predict: Callable[[Any], jax.Array],
    params: Any,
    targets: jax.Array,
    transform: optax.GradientTransformation,
    steps: int,
) -> Any:
    """Returns the parameters of a model fine-tuned to `targets`, by the mean square error.

    In datamodel matching, the documents are all documents to forget and some to retain. The authors
    take logits, and retain three times the number of forgotten documents.

    Args:
      predict: outputs of the documents, given parameters.
      params: the initial parameters.
      targets: outputs, as from `predict_without`.
      transform: of optax.
      steps: number of updates.
    """
    return descend(lambda p: jnp.mean((predict(p) - targets) ** 2), params, transform, steps)


def margins(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns z_y - log sum_{k != y} exp(z_k), the log odds of the label, for logits [..., K]."""
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    other_logits = jax.nn.logsumexp(jnp.where(is_label, -jnp.inf, logits), -1)
    return jnp.sum(jnp.where(is_label, logits, 0.0), -1) - other_logits


def klom(unlearned_RN: np.ndarray, retrained_RN: np.ndarray) -> np.ndarray:
    """Returns KLoM: KL(unlearned | retrained) of the margins of each document, [N], in nats.

    Both are histograms over models, with BINS of equal width from the smallest to the largest
    margin of the document, after clipping at CLIP. A retrained share below FLOOR counts as FLOOR if
    there are unlearned margins in the bin, so that its logarithm is at most log(1 / FLOOR).
    Histograms of few models differ by chance: compare with the KLoM of other retrained models. The
    largest margin is in the last bin; the authors' code leaves it out.

    Args:
      unlearned_RN: margins of R unlearned models.
      retrained_RN: margins of any number of models trained without the forgotten documents.

    Raises:
      ValueError: if the two have different documents.
    """
    if unlearned_RN.shape[1:] != retrained_RN.shape[1:]:
        raise ValueError(
            'margins must have one column per document, for the same documents; got shape '
            f'{unlearned_RN.shape} for unlearned and {retrained_RN.shape} for retrained models'
        )
    pairs = zip(np.transpose(unlearned_RN), np.transpose(retrained_RN), strict=True)
    return np.array([_divergence(*pair) for pair in pairs])


def _divergence(unlearned_R: np.ndarray, retrained_R: np.ndarray) -> float:
    clipped = [np.clip(np.float64(x), -CLIP, CLIP) for x in (unlearned_R, retrained_R)]
    bounds = min(x.min() for x in clipped), max(x.max() for x in clipped)
    # If all margins are equal, bins of width 1 keep the histograms defined.
    edges = (
        np.linspace(*bounds, BINS + 1) if bounds[0] < bounds[1] else bounds[0] + np.arange(BINS + 1)
    )
    # NumPy's stubs take np.float64(array) for a scalar.
    p, q = (np.histogram(x, edges)[0] / len(x) for x in clipped)  # ty: ignore[invalid-argument-type]
    is_filled = p > 0
    q = np.where(is_filled, np.maximum(q, FLOOR), q)
    q /= q.sum()
    return float(np.sum(p[is_filled] * np.log(p[is_filled] / q[is_filled])))
