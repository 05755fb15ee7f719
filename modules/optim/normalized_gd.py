"""Gradient descent normalised as the perceptron is."""

from typing import Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.base import of_family


@of_family('sgd', error_probability=True)
def normalized_gd(specs: Any) -> optax.GradientTransformationExtraArgs:
    """g / q, with q the mean over the target tokens of 1 - p, p the label's probability.

    The published method is for two classes, where q is the mean of 1 / (1 + exp(margin)): with a
    large learning rate it separates n points in as many steps as a perceptron, 1 / n of those of
    plain gradient descent. This is its analogue for language models. q comes from the logits that
    the loss has made, and is recorded as `error_probability`; the gradient is clipped before it is
    divided, so that optim.clip_norm=inf is the published step. Source: arXiv:2412.08424.
    ValueError where the extra argument `means` has no error_probability.
    """
    del specs

    def update(grads, state, params=None, *, means=None, **more):
        del params, more
        if means is None or 'error_probability' not in means:
            raise ValueError(
                'normalized_gd divides by means["error_probability"], the mean probability of '
                'words that are not meant; give `update` the means of the batch'
            )
        q = means['error_probability']
        factor = jnp.where(q > 0, 1 / jnp.where(q > 0, q, 1.0), 0.0)
        return jax.tree.map(lambda g: factor * g, grads), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)
