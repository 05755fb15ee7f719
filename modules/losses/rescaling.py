"""Rescaled losses: a small network weighs the rows of a batch, some of whose labels are wrong.

It is trained without clean labels, through a step of the optimizer, on the rescaled loss of another
batch. There is no row in `LOSSES`: two batches and a step are no sum over the tokens of one batch.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax

from modules.choices import choose

FEATURES = 19  # of a row, from `row_features`
MIN_DEVIATION = 1e-8  # of a deviation that something is divided by, as in the authors' code
VARIANCE_EPS = 1e-5  # to variances, as PyTorch's BatchNorm1d adds it

Rescaler = dict[str, jax.Array]
RowsFn = Callable[[Any, Any], tuple[jax.Array, jax.Array]]

FORMS = {
    'published': lambda weights_R: weights_R,
    'mean_one': lambda weights_R: weights_R / jnp.mean(weights_R),
}


def init_rescaler(key: jax.Array, features: int = FEATURES) -> Rescaler:
    """Draws the two matrices of a rescaler, uniform within 1 / sqrt(features) on either side.

    It has no biases: what is behind each matrix is centred over the batch, which removes them.
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
    weight stays near 1/2: weights can not all go to 0, which would minimise every loss that they
    are in. Without that only `mean_one`, which divides by the mean, keeps them from it.

    Args:
      rescaler: from `init_rescaler`.
      features_RF: of each row, from `row_features`, or others.
      form: a row of FORMS; the default of the authors' code, with weights in (0, 1).

    Returns:
      A weight a row.

    Source: arXiv:2412.12955, the rescaler that all classes share.
    """
    scale = choose(FORMS, form, 'form of weights')
    hidden_RF = jax.nn.relu(_standardize(features_RF @ rescaler['first_FF']))
    logits_RK = _standardize(hidden_RF @ rescaler['second_FK'])
    return scale(jax.nn.softmax(logits_RK, -1)[:, 1])


def _standardize(x_RF: jax.Array) -> jax.Array:
    mean_1F, var_1F = (f(x_RF, 0, keepdims=True) for f in (jnp.mean, jnp.var))
    return (x_RF - mean_1F) / jnp.sqrt(var_1F + VARIANCE_EPS)


class RescaledStep(NamedTuple):
    """A step of `rescaled_step`: parameters and state of the optimizer behind it, the gradient in
    the rescaler, the weights of the batch.
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
    """Takes a step on the rescaled loss of one batch, and differentiates that of another behind it.

    With w the weights of a rescaler o and l the losses of rows, the step is that of `transform` on
    mean(w_o(B) l(B)), from p to p'(o); the gradient is that of mean(w_o(B') l_p'(o)(B')) in o, both
    through the weights of B' and through the step.

    Args:
      rows: maps (params, batch) to losses_R and features_RF, which are taken without a gradient.
      transform: of an optimizer whose update can be differentiated; that of `optax.adam` can with
        `eps_root` above 0, as the slope of a square root is infinite where a gradient is 0.
      rescaler: of the weights.
      params: of the model.
      state: of `transform`.
      batches: the batch of the step, and another of the same noisy data.
      form: a row of FORMS.

    Returns:
      The step, and the gradient for an optimizer of the rescaler.

    Source: arXiv:2412.12955, algorithm 1.
    """
    batch, other = batches

    def mean_loss(params, rescaler, batch):
        losses_R, features_RF = rows_fn(params, batch)
        weights_R = row_weights(rescaler, jax.lax.stop_gradient(features_RF), form)
        return jnp.mean(weights_R * losses_R), weights_R

    def behind(rescaler):
        grads, weights_R = jax.grad(mean_loss, has_aux=True)(params, rescaler, batch)
        updates, after = transform.update(grads, state, params)
        moved = optax.apply_updates(params, updates)
        return mean_loss(moved, rescaler, other)[0], (moved, after, weights_R)

    gradient, (moved, after, weights_R) = jax.grad(behind, has_aux=True)(rescaler)
    return RescaledStep(moved, after, gradient, weights_R)


def row_features(losses_GR: jax.Array, logits_GRV: jax.Array, labels_R: jax.Array) -> jax.Array:
    """Returns what a rescaler knows of each row, [R, FEATURES].

    The mean and deviation over passes of the loss and of the largest probability; the divergence
    and the overlap of the normal distribution of a row's loss with that of its group; of each of
    these six also the mean and the deviation in the group; whether the passes agree with the label,
    which makes the two groups of the batch.

    Args:
      losses_GR: losses of the rows in passes with dropout; the first is that which is minimised.
      logits_GRV: likewise.
      labels_R: some of which may be wrong.

    Returns:
      FEATURES numbers a row.

    Raises:
      ValueError: for fewer than two passes.

    Source: arXiv:2412.12955, and utils_storm.py of its code, as
    https://github.com/stylcreed1/STORM-NER-Thesis has it, with a window of one batch.
    """
    if len(losses_GR) < 2:
        raise ValueError(
            f'deviations over passes need two or more; got {len(losses_GR)}: run the model again '
            'with other dropout masks'
        )
    tops_GR = jnp.max(jax.nn.softmax(logits_GRV, -1), -1)
    agrees_R1 = _passes_agree(logits_GRV, labels_R)[:, None]
    own_R2 = jnp.concatenate([~agrees_R1, agrees_R1], 1).astype(losses_GR.dtype)
    count_12 = jnp.sum(own_R2, 0, keepdims=True)

    def with_group(x_KR):
        mean_KR = (x_KR @ own_R2 / jnp.maximum(count_12, 1)) @ own_R2.T
        squares_K2 = (x_KR - mean_KR) ** 2 @ own_R2 / jnp.maximum(count_12 - 1, 1)
        return jnp.stack([x_KR, mean_KR, jnp.sqrt(squares_K2) @ own_R2.T], 1)

    over_passes = ((jnp.mean(x, 0), jnp.std(x, 0, ddof=1)) for x in (losses_GR, tops_GR))
    sizes_K3R = with_group(jnp.stack([x_R for pair in over_passes for x_R in pair]))
    own, group = sizes_K3R[:2, 0], sizes_K3R[:2, 1]  # mean and deviation of the loss
    apart_KR = jnp.stack([normal_divergence(*own, *group), normal_overlap(*own, *group)])
    every_R = jnp.concatenate([sizes_K3R, with_group(apart_KR)]).reshape(-1, len(labels_R)).T
    return jnp.concatenate([every_R, own_R2[:, 1:]], 1)


def _passes_agree(logits_GRV: jax.Array, labels_R: jax.Array) -> jax.Array:
    """Whether most passes have the label on top; of as many as not, whether the first has, [R]."""
    right_GR = jnp.argmax(logits_GRV, -1) == labels_R[None]
    share_R = jnp.mean(right_GR, 0)
    return jnp.where(share_R == 0.5, right_GR[0], share_R > 0.5)


def normal_divergence(
    mean: jax.Array, std: jax.Array, other_mean: jax.Array, other_std: jax.Array
) -> jax.Array:
    """Returns KL(N(mean, std^2) || N(other)) in nats; 0 where a deviation is 0, as published."""
    is_known = (std > 0) & (other_std > 0)
    std, other_std = (jnp.where(is_known, x, 1.0) for x in (std, other_std))
    squares = (std**2 + (mean - other_mean) ** 2) / (2 * other_std**2)
    return jnp.where(is_known, jnp.log(other_std / std) + squares - 0.5, 0.0)


def normal_overlap(
    mean: jax.Array, std: jax.Array, other_mean: jax.Array, other_std: jax.Array
) -> jax.Array:
    """Returns the area below the densities of both normal distributions, in [0, 1].

    The densities cross at the roots of a square equation, of which the one far outside leaves to
    minus infinity as both deviations become one; the other is computed from it without a difference
    of near numbers. Deviations are at least LEAST.
    """
    std, other_std = (jnp.maximum(x, MIN_DEVIATION) for x in (std, other_std))
    narrow, wide = jnp.minimum(std, other_std), jnp.maximum(std, other_std)
    apart = jnp.abs(mean - other_mean)  # from the narrow one, which is put at 0
    logs = 2 * jnp.log(wide / narrow)
    wider = (wide - narrow) * (wide + narrow)
    root = apart * narrow + wide * jnp.sqrt(apart**2 + wider * logs)
    # far above the least float32, as XLA multiplies what is divided by twice
    outer = -root * narrow / jnp.maximum(wider, 1e-20)
    inner = narrow * (apart**2 + wide**2 * logs) / jnp.maximum(root, 1e-20)
    normal = jax.scipy.stats.norm.cdf
    missed = (jnp.abs(normal(x, apart, wide) - normal(x, 0.0, narrow)) for x in (outer, inner))
    return 1 - sum(missed)


def trimmed_weights(losses_R: jax.Array, share: float) -> jax.Array:
    """Returns weights of mean 1 that leave out the largest losses of a batch, without a gradient.

    A rescaled loss without a second network, where the share of wrong labels is known. Losses equal
    to the largest that is kept are kept too.

    Args:
      losses_R: of the rows.
      share: of the rows that is left out, rounded to whole rows.

    Returns:
      A weight for rows that are kept, and 0 for others, [R].

    Raises:
      ValueError: for a share of which no row would be left.
    """
    kept = round((1 - share) * len(losses_R))
    if not 0 < kept <= len(losses_R):
        raise ValueError(
            f'share must leave a row of {len(losses_R)}; got {share}: take one from 0 to below 1'
        )
    losses_R = jax.lax.stop_gradient(losses_R)
    is_kept_R = losses_R <= jnp.sort(losses_R)[kept - 1]
    return is_kept_R / jnp.mean(is_kept_R)
