"""Rescaled losses: a small network weighs the rows of a batch, some of which have wrong labels.

It is trained without clean labels: through a step of the optimizer, on the rescaled loss of another
batch. There is no row in `LOSSES`: two batches and a step are no sum over the tokens of a batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from modules.choices import choose

FEATURES = 19  # of a row, from `row_features`
MIN_DEVIATION = 1e-8  # divisors are at least this, as in the authors' code
VARIANCE_EPS = 1e-5  # as in PyTorch's BatchNorm1d

Rescaler = dict[str, jax.Array]
RowsFn = Callable[[Any, Any], tuple[jax.Array, jax.Array]]

FORMS = {
    'published': lambda weights_R: weights_R,
    'mean_one': lambda weights_R: weights_R / jnp.mean(weights_R),
}


def init_rescaler(key: jax.Array, features: int = FEATURES) -> Rescaler:
    """Draws the two matrices of a rescaler, uniform within 1 / sqrt(features) on either side.

    It has no biases: the output of each matrix is centred over the batch, which removes them.
    """
    sizes = {'first_FF': (features, features), 'second_FK': (features, 2)}
    bound, keys = features**-0.5, jax.random.split(key)
    return {
        name: jax.random.uniform(k, size, minval=-bound, maxval=bound)
        for k, (name, size) in zip(keys, sizes.items(), strict=True)
    }


def row_weights(rescaler: Rescaler, features_RF: jax.Array, form: str = 'published') -> jax.Array:
    """Returns the weights of rows, softmax(standard(relu(standard(F A)) B))[:, 1], [R].

    `standard` has mean 0 and variance 1 over the batch. As both logits are standardised, the mean
    weight stays near 1/2: weights cannot all go to 0, which would minimise every rescaled loss.
    Without that, only `mean_one`, which divides by the mean, prevents it. Source: arXiv:2412.12955,
    the rescaler that all classes share.

    Args:
      rescaler: from `init_rescaler`.
      features_RF: of each row, from `row_features`, or others.
      form: a row of FORMS; the default of the authors' code, with weights in (0, 1).

    Returns:
      A weight per row.
    """
    scale = choose(FORMS, form, 'form of weights')
    hidden_RF = jax.nn.relu(_standardize(features_RF @ rescaler['first_FF']))
    logits_RK = _standardize(hidden_RF @ rescaler['second_FK'])
    return scale(jax.nn.softmax(logits_RK, -1)[:, 1])


def _standardize(x_RF: jax.Array) -> jax.Array:
    mean_1F, var_1F = (f(x_RF, 0, keepdims=True) for f in (jnp.mean, jnp.var))
    return (x_RF - mean_1F) / jnp.sqrt(var_1F + VARIANCE_EPS)


class RescaledStep(NamedTuple):
    """A step of `rescaled_step`: parameters and optimizer state after it, the gradient in the
    rescaler, and the weights of the batch.
    """

    params: Any
    state: Any
    gradient: Rescaler
    weights_R: jax.Array


def rescaled_step(
    rows_fn: RowsFn,
    transform: optax.GradientTransformation,
    rescaler: Rescaler,
    params: Any,
    state: Any,
    batches: tuple[Any, Any],
    form: str = 'published',
) -> RescaledStep:
    """Takes a step on the rescaled loss of a batch, and differentiates another batch's loss after
    it.

    With w the weights of a rescaler o and l the losses of rows, the step of `transform` on
    mean(w_o(B) l(B)) leads from p to p'(o). Differentiates mean(w_o(B') l_p'(o)(B')) in o, through
    the weights of B' and through the step. Source: arXiv:2412.12955, algorithm 1.

    Args:
      rows_fn: maps (params, batch) to losses_R and features_RF; features get no gradient.
      transform: an optimizer with a differentiable update; `optax.adam` has it with `eps_root`
        above 0, as the slope of a square root is infinite at a gradient of 0.
      rescaler: computes the weights.
      params: of the model.
      state: of `transform`.
      batches: the batch of the step, and another of the same noisy data.
      form: a row of FORMS.

    Returns:
      The step, and the gradient for an optimizer of the rescaler.
    """
    batch, next_batch = batches

    def mean_loss(params, rescaler, batch):
        losses_R, features_RF = rows_fn(params, batch)
        weights_R = row_weights(rescaler, jax.lax.stop_gradient(features_RF), form)
        return jnp.mean(weights_R * losses_R), weights_R

    def loss_after_step(rescaler):
        grads, weights_R = jax.grad(mean_loss, has_aux=True)(params, rescaler, batch)
        updates, new_state = transform.update(grads, state, params)
        new_params = optax.apply_updates(params, updates)
        return mean_loss(new_params, rescaler, next_batch)[0], (new_params, new_state, weights_R)

    gradient, (new_params, new_state, weights_R) = jax.grad(loss_after_step, has_aux=True)(rescaler)
    return RescaledStep(new_params, new_state, gradient, weights_R)


def row_features(losses_GR: jax.Array, logits_GRV: jax.Array, labels_R: jax.Array) -> jax.Array:
    """Returns the features of each row for a rescaler, [R, FEATURES].

    They are, over passes, the mean and deviation of the loss and of the largest probability; the
    divergence and the overlap of the normal distribution of a row's loss with the distribution of
    its group; for each of these six also its mean and deviation in the group; and whether the
    passes agree with the label, which splits the batch into the two groups. Source:
    arXiv:2412.12955, and utils_storm.py of its code, as
    https://github.com/stylcreed1/STORM-NER-Thesis has it, with a window of one batch.

    Args:
      losses_GR: losses of the rows in passes with dropout; the first pass is minimised.
      logits_GRV: likewise.
      labels_R: some of them may be wrong.

    Returns:
      FEATURES numbers per row.

    Raises:
      ValueError: for fewer than two passes.
    """
    if len(losses_GR) < 2:
        raise ValueError(
            f'standard deviations over passes need at least two passes; got {len(losses_GR)}. Run '
            'the model again with other dropout masks.'
        )
    tops_GR = jnp.max(jax.nn.softmax(logits_GRV, -1), -1)
    agrees_R1 = _passes_agree(logits_GRV, labels_R)[:, None]
    is_member_R2 = jnp.concatenate([~agrees_R1, agrees_R1], 1).astype(losses_GR.dtype)
    count_12 = jnp.sum(is_member_R2, 0, keepdims=True)

    def with_group(x_KR):
        mean_KR = (x_KR @ is_member_R2 / jnp.maximum(count_12, 1)) @ is_member_R2.T
        squares_K2 = (x_KR - mean_KR) ** 2 @ is_member_R2 / jnp.maximum(count_12 - 1, 1)
        return jnp.stack([x_KR, mean_KR, jnp.sqrt(squares_K2) @ is_member_R2.T], 1)

    over_passes = ((jnp.mean(x, 0), jnp.std(x, 0, ddof=1)) for x in (losses_GR, tops_GR))
    sizes_K3R = with_group(jnp.stack([x_R for pair in over_passes for x_R in pair]))
    row_moments, group_moments = (
        sizes_K3R[:2, 0],
        sizes_K3R[:2, 1],
    )  # mean and deviation of the loss
    contrast_KR = jnp.stack(
        [
            normal_divergence(*row_moments, *group_moments),
            normal_overlap(*row_moments, *group_moments),
        ]
    )
    features_RF = jnp.concatenate([sizes_K3R, with_group(contrast_KR)]).reshape(-1, len(labels_R)).T
    return jnp.concatenate([features_RF, is_member_R2[:, 1:]], 1)


def _passes_agree(logits_GRV: jax.Array, labels_R: jax.Array) -> jax.Array:
    """Whether most passes predict the label, [R]; in a tie, whether the first pass does."""
    is_right_GR = jnp.argmax(logits_GRV, -1) == labels_R[None]
    share_R = jnp.mean(is_right_GR, 0)
    return jnp.where(share_R == 0.5, is_right_GR[0], share_R > 0.5)


def normal_divergence(
    mean: jax.Array, std: jax.Array, other_mean: jax.Array, other_std: jax.Array
) -> jax.Array:
    """Returns KL(N(mean, std^2) || N(other)) in nats; 0 where a deviation is 0, as published.

    Args:
      mean: of the first distribution.
      std: likewise.
      other_mean: of the second distribution.
      other_std: likewise.
    """
    is_positive = (std > 0) & (other_std > 0)
    std, other_std = (jnp.where(is_positive, x, 1.0) for x in (std, other_std))
    squares = (std**2 + (mean - other_mean) ** 2) / (2 * other_std**2)
    return jnp.where(is_positive, jnp.log(other_std / std) + squares - 0.5, 0.0)


def normal_overlap(
    mean: jax.Array, std: jax.Array, other_mean: jax.Array, other_std: jax.Array
) -> jax.Array:
    """Returns the area below the densities of both normal distributions, in [0, 1].

    The densities cross at the roots of a square equation. The outer root goes to minus infinity as
    both deviations become equal; the inner root is computed from it, without a difference of near
    numbers. Deviations are at least MIN_DEVIATION.

    Args:
      mean: of the first distribution.
      std: likewise.
      other_mean: of the second distribution.
      other_std: likewise.
    """
    std, other_std = (jnp.maximum(x, MIN_DEVIATION) for x in (std, other_std))
    narrow, wide = jnp.minimum(std, other_std), jnp.maximum(std, other_std)
    distance = jnp.abs(mean - other_mean)  # the narrow distribution is at 0
    logs = 2 * jnp.log(wide / narrow)
    wider = (wide - narrow) * (wide + narrow)
    root = distance * narrow + wide * jnp.sqrt(distance**2 + wider * logs)
    # 1e-20 is far above the least float32: XLA multiplies divisors of two divisions
    outer = -root * narrow / jnp.maximum(wider, 1e-20)
    inner = narrow * (distance**2 + wide**2 * logs) / jnp.maximum(root, 1e-20)
    normal = jax.scipy.stats.norm.cdf
    missed = (jnp.abs(normal(x, distance, wide) - normal(x, 0.0, narrow)) for x in (outer, inner))
    return 1 - sum(missed)  # ty: ignore[invalid-explicit-return]  # two arrays


def trimmed_weights(losses_R: jax.Array, share: float) -> jax.Array:
    """Returns weights of mean 1 that drop the largest losses of a batch, without a gradient.

    They give a rescaled loss without a second network, if the share of wrong labels is known.
    Losses equal to the largest kept loss are kept too.

    Args:
      losses_R: of the rows.
      share: of the rows that are dropped, rounded to whole rows.

    Returns:
      A weight for kept rows, and 0 for dropped rows, [R].

    Raises:
      ValueError: for a share that leaves no row.
    """
    n_kept = round((1 - share) * len(losses_R))
    if not 0 < n_kept <= len(losses_R):
        raise ValueError(
            f'share must keep at least one of {len(losses_R)} rows; got {share}. Choose a share of '
            'at least 0 and below 1.'
        )
    losses_R = jax.lax.stop_gradient(losses_R)
    is_kept_R = losses_R <= jnp.sort(losses_R)[n_kept - 1]
    return is_kept_R / jnp.mean(is_kept_R)
