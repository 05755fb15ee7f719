"""Datamodels: what models give as a linear function of which documents they were trained on.

A model unlearns documents by being fine-tuned to what its datamodel predicts without them
(datamodel matching), and KLoM says how far models are then from models that never had them. All
are functions of arrays: outputs of N documents may be logits, margins, or one number a document.
Source: arXiv:2410.23232, and https://github.com/RoyRin/data-unlearning-bench.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

BINS, CLIP, FLOOR = 20, 100.0, 1e-5  # of `klom`, as in the authors' code


class Datamodel(NamedTuple):
    """f(S) = constant [...] + sum over the documents i of S of effects_i, effects [N, ...]."""

    constant: np.ndarray
    effects: np.ndarray


def fit_datamodel(
    included_RN: np.ndarray, model_outputs: np.ndarray, ridge: float = 0.0
) -> Datamodel:
    """Least squares of what models give on which documents each was trained on.

    min sum_r (outputs_r - f(S_r))^2 + ridge sum_i effects_i^2; the constant has no penalty. The
    paper estimates datamodels (arXiv:2202.00622) by models of random halves of the documents.

    Args:
      kept_RN: whether model r was trained on document n.
      outputs: what each model gives, [R, ...].
      ridge: the penalty, 0 or more.

    Returns:
      The datamodel, in float64.

    Raises:
      ValueError: where the models do not tell the documents apart, and ridge is 0.
    """
    included_RN, model_outputs = (
        np.asarray(included_RN, np.float64),
        np.asarray(model_outputs, np.float64),
    )
    means_N, flat_RO = included_RN.mean(0), model_outputs.reshape(len(model_outputs), -1)
    centred_RN, mean_O = included_RN - means_N, flat_RO.mean(0)
    count = included_RN.shape[1]
    if ridge == 0 and (rank := np.linalg.matrix_rank(centred_RN)) < count:
        raise ValueError(
            f'{len(included_RN)} models tell {rank} of {count} documents apart: a datamodel takes more '
            'models, each without some documents, or a ridge above 0'
        )
    gram_NN = centred_RN.T @ centred_RN + ridge * np.eye(count)
    effects_NO = np.linalg.solve(gram_NN, centred_RN.T @ (flat_RO - mean_O))
    shape = model_outputs.shape[1:]
    constant_O = mean_O - means_N @ effects_NO
    return Datamodel(constant_O.reshape(shape), effects_NO.reshape(count, *shape))


def predict_without(
    model_outputs: np.ndarray, datamodel: Datamodel, forgotten: np.ndarray
) -> np.ndarray:
    """Returns what models that give `outputs` [..., one shape of the datamodel] would give if they
    had been trained without the documents `forgotten`: outputs - sum of their effects.

    It is a difference from what each model gives, as in the authors' code, and not f of the
    documents that are left, so that models which differ by their starts still differ.
    """
    return model_outputs - datamodel.effects[forgotten].sum(0)


def descend(
    loss: Callable[[Any], jax.Array],
    params: Any,
    transform: optax.GradientTransformation,
    steps: int,
) -> Any:
    """Returns the parameters after `steps` updates of a transform on the gradient of a loss."""

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
    """Returns the parameters of a model fine-tuned to give `targets`, by their mean square error.

    Datamodel matching: outputs(params) and targets, as `without` predicts them, are of all that is
    to be forgotten and of some that is to be retained; the authors take logits, and thrice as many
    documents to retain.
    """
    return descend(lambda p: jnp.mean((predict(p) - targets) ** 2), params, transform, steps)


def margins(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Returns z_y - log sum_{k != y} exp(z_k), the log odds of the label, for logits [..., K]."""
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    others = jax.nn.logsumexp(jnp.where(is_label, -jnp.inf, logits), -1)
    return jnp.sum(jnp.where(is_label, logits, 0.0), -1) - others


def klom(unlearned_RN: np.ndarray, retrained_RN: np.ndarray) -> np.ndarray:
    """KLoM: KL(unlearned | retrained) of the margins that models give each document, [N], in nats.

    Both are histograms over models, of BINS of equal width from the least to the largest margin
    that either gives the document, margins being clipped at CLIP. A share of the retrained below
    FLOOR counts as that where there are unlearned ones, so that it is log(1 / FLOOR) at most.
    Histograms of few models differ by chance: compare with KLoM of other retrained models. The
    largest margin is in the last bin; the authors' code leaves it out.

    Args:
      unlearned_RN: margins of R unlearned models.
      retrained_RN: margins of as many models or others, trained without what is forgotten.

    Raises:
      ValueError: where the two are not of the same documents.
    """
    if unlearned_RN.shape[1:] != retrained_RN.shape[1:]:
        raise ValueError(
            f'margins must be of the same documents, a column each; got {unlearned_RN.shape} of '
            f'unlearned and {retrained_RN.shape} of retrained models'
        )
    pairs = zip(np.transpose(unlearned_RN), np.transpose(retrained_RN), strict=True)
    return np.array([_divergence(*pair) for pair in pairs])


def _divergence(unlearned_R: np.ndarray, retrained_R: np.ndarray) -> float:
    both = [np.clip(np.float64(x), -CLIP, CLIP) for x in (unlearned_R, retrained_R)]
    ends = min(x.min() for x in both), max(x.max() for x in both)
    edges = np.linspace(*ends, BINS + 1) if ends[0] < ends[1] else ends[0] + np.arange(BINS + 1)
    p, q = (np.histogram(x, edges)[0] / len(x) for x in both)
    is_there = p > 0
    q = np.where(is_there, np.maximum(q, FLOOR), q)
    q /= q.sum()
    return float(np.sum(p[is_there] * np.log(p[is_there] / q[is_there])))
