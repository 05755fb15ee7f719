"""Losses of label-distributional robustness: the worst mean of margins near the uniform mean."""

from typing import Annotated

import jax
import jax.numpy as jnp

from modules.losses.base import FINITE, cross_entropies, label_logits, logits_loss
from modules.options import Option
from modules.statistics import at_least_float32

MIN_LAMBDA = 1e-3  # the losses divide by lambda
LAMBDA_DESCRIPTION = 'temperature: near 0 the largest margin counts, for large values their mean'
SCORE_DESCRIPTION = (
    'logits unchanged, divided by their mean magnitude, or softplus divided by its mean'
)
Lambda = Annotated[float, Option(LAMBDA_DESCRIPTION, MIN_LAMBDA, FINITE, traced=True)]
Margin = Annotated[
    float, Option('margin required between the label and other words', 0, FINITE, traced=True)
]
Scores = Annotated[str, Option(SCORE_DESCRIPTION, choices=('plain', 'l1', 'softplus'))]


@logits_loss
def ldr_kl(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    *,
    ldr_lambda: Lambda = 1.0,
    ldr_margin: Margin = 2.0,
    ldr_scores: Scores = 'plain',
) -> dict[str, jax.Array]:
    """LDR-KL (arXiv:2112.14869): `objective = l log mean_v(exp((s_v - s_label + c_v) / l))`.

    `s_v` are the scores (`ldr_scores`), and `l` is `ldr_lambda`. `c_v` is `ldr_margin`, or 0 for
    the label. With `l = 1`, no margin and plain scores, the objective is `ce - log(V)`. As `l`
    approaches 0, it becomes the largest margin (Crammer and Singer); as `l` grows, the mean of the
    margins. The authors' code has the softplus scores, which bound the logits by about `V`. Plain
    scores are our choice for language models, where `l` is a temperature. Source: section 4.1, and
    https://github.com/Optimization-AI/ICML2023_LDR.
    """
    lead_MV, _ = _margins(logits_MV, labels_M, ldr_margin, ldr_scores)
    objective_M = _log_mean(lead_MV, ldr_lambda)
    return {'objective': objective_M, 'ce': cross_entropies(logits_MV, labels_M)}


@logits_loss
def aldr_kl(
    logits_MV: jax.Array,
    labels_M: jax.Array,
    *,
    ldr_lambda: Lambda = 1.0,
    ldr_margin: Margin = 1.0,
    ldr_alpha: Annotated[
        float, Option('larger: lambda adapts less to each token', 1e-3, FINITE, traced=True)
    ] = 1.0,
    ldr_scores: Scores = 'plain',
) -> dict[str, jax.Array]:
    """ALDR-KL (arXiv:2112.14869): `ldr_kl` with a smaller lambda for tokens of which the model is
    sure.

    `objective = l log mean_v(exp((s_v - s_label + c_v) / l)) - alpha log(V) (l - l_0)^2 / (2 l_0)`
    `l = l_0 (1 - KL(softmax(s / l_0), uniform) / (alpha log(V)))`

    `l` is a number per token, without a gradient; `l_0` is `ldr_lambda`, and
    ``alpha`` is `ldr_alpha`. For tokens of which the model is certain, `l` is at least `l_0 /
    1000`. The authors' code keeps a lambda for each training example from epoch to epoch, and
    computes the next lambda from it. Here each lambda is one step of that iteration from `l_0`,
    since a language model seldom sees a token twice. Source: section 4.2, and the code that
    `ldr_kl` names, with `l1` scores.
    """
    lead_MV, scores_MV = _margins(logits_MV, labels_M, ldr_margin, ldr_scores)
    log_v = jnp.log(jnp.array(logits_MV.shape[-1], lead_MV.dtype))
    log_p_MV = jax.nn.log_softmax(scores_MV / ldr_lambda)
    divergence_M = log_v + jnp.sum(jnp.exp(log_p_MV) * log_p_MV, -1)
    share_M = jnp.maximum(1 - divergence_M / (ldr_alpha * log_v), MIN_LAMBDA)
    lambda_M = jax.lax.stop_gradient(ldr_lambda * share_M)
    penalty_M = ldr_alpha * log_v * jnp.square(lambda_M - ldr_lambda) / (2 * ldr_lambda)
    objective_M = _log_mean(lead_MV, lambda_M) - penalty_M
    return {'objective': objective_M, 'ce': cross_entropies(logits_MV, labels_M)}


def _margins(logits_MV, labels_M, margin, kind):
    """Returns (s_v - s_label + c [v is not the label], s)."""
    scores_MV = at_least_float32(logits_MV)
    if kind == 'softplus':
        scores_MV = jax.nn.softplus(scores_MV)
    if kind != 'plain':
        size_M = jnp.mean(jnp.abs(scores_MV), -1)
        scores_MV = scores_MV / _broadcast_columns(jnp.maximum(size_M, 1e-12), scores_MV)
    is_other_MV = jnp.arange(scores_MV.shape[-1])[None] != labels_M[:, None]
    lead_MV = scores_MV - _broadcast_columns(label_logits(scores_MV, labels_M), scores_MV)
    return lead_MV + jnp.where(is_other_MV, margin, 0.0), scores_MV


def _log_mean(lead_MV, lambda_M):
    """Returns l log mean_v exp(lead / l); l may be a number for all tokens."""
    lambda_M = jnp.broadcast_to(lambda_M, lead_MV.shape[:1])
    log_total_M = jax.nn.logsumexp(lead_MV / _broadcast_columns(lambda_M, lead_MV), axis=-1)
    return lambda_M * (log_total_M - jnp.log(jnp.array(lead_MV.shape[-1], lead_MV.dtype)))


def _broadcast_columns(x_M, like_MV):
    return jnp.broadcast_to(x_M[:, None], like_MV.shape)
