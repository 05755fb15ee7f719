"""SGD, AdamW, and SCALE, a combination of both."""

from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.base import (
    B1,
    B2,
    Dampening,
    Eps,
    Momentum,
    Nesterov,
    ParamState,
    above_0,
    init_zeros,
    optimizer_row,
    per_parameter,
)
from modules.params import as_matrices, from_matrices

MIN_RMS = 1e-8  # a smaller column is not scaled up to the size of the others


@optimizer_row('sgd')
def sgd(
    specs: Any, *, momentum: Momentum = 0.9, dampening: Dampening = 0.0, nesterov: Nesterov = False
) -> optax.GradientTransformation:
    """SGD with momentum: `m <- mu m + (1 - tau) g`.

    `u = m`, or with `nesterov`: `u = g + mu m`.

    `mu` is `momentum`, and `tau` is `dampening`. The first `m` is `g` for any dampening, as in
    torch.optim.SGD. Source of Nesterov's momentum: arXiv:1212.0901, section 3.5.
    """

    def update(spec, grad, state, weight, count):
        share = jnp.where(count == 1, 1.0, 1 - dampening)
        buffer = momentum * state['momentum'] + share * grad
        return (grad + momentum * buffer if nesterov else buffer), {'momentum': buffer}

    return per_parameter(specs, init_zeros('momentum'), update)


@optimizer_row('adam')
def adamw(
    specs: Any, *, b1: B1 = 0.9, b2: B2 = 0.95, eps: Eps = 1e-8
) -> optax.GradientTransformation:
    """AdamW (arXiv:1711.05101): `u = m_hat / (sqrt(v_hat) + eps)`.

    `m <- b1 m + (1 - b1) g, m_hat = m / (1 - b1^t)`
    `v <- b2 v + (1 - b2) g^2, v_hat = v / (1 - b2^t)`

    Weight decay is applied by the decay rule (`optim.decay_rule`). The default of `b2` is common
    for language models (arXiv:2005.14165, appendix B).
    """
    return optax.scale_by_adam(b1=b1, b2=b2, eps=eps)


def adam_direction(
    grad, moments: ParamState, b1, b2, eps, count, nesterov=False
) -> tuple[jax.Array, ParamState]:
    """Computes Adam's direction, m_hat / (sqrt(v_hat) + eps).

    Args:
      grad: g.
      moments: 'momentum' m and 'second' v.
      b1: share of the first moment that is kept.
      b2: share of the second moment that is kept.
      eps: added to the denominator.
      count: the number of the update, from 1.
      nesterov: whether m moves once more in the direction.

    Returns:
      (direction, both moments).
    """
    m = b1 * moments['momentum'] + (1 - b1) * grad
    v = b2 * moments['second'] + (1 - b2) * grad**2
    numerator = b1 * m + (1 - b1) * grad if nesterov else m
    direction = numerator / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps)
    return direction, {'momentum': m, 'second': v}


@optimizer_row('adam')
def scale(
    specs: Any,
    *,
    momentum: Momentum = 0.9,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-8,
    scale_vector_factor: Annotated[
        float, above_0('learning rate of vectors, relative to matrices')
    ] = 20.0,
) -> optax.GradientTransformation:
    """SCALE (arXiv:2506.16659): each column of a matrix is divided by its root mean square.

    `u_o = g_o / rms(g_o)`

    A column `o` holds the weights of an output unit, or in an embedding a feature of all tokens.
    The readout has momentum: `m <- mu m + (1 - mu) g`, from 0, takes the place of `g`, with `mu`
    the option `momentum`. Vectors have Adam's direction (`b1`, `b2`, `eps`), multiplied by
    `scale_vector_factor`. An embedding that is also the readout counts as an embedding, without
    momentum.

    The paper divides by the norm of a column. The authors' code
    (https://github.com/OptimAI-Lab/Minimalist_LLM_Pretraining) divides by its root mean square, and
    so do we: the reported learning rates, 1e-3 up to 350M parameters, belong to the code. Its
    factor for vectors is 20, but 5 at 1B and 10 at 7B parameters. It adds eps to a second moment
    without bias correction; ours is corrected, as in Adam's paper. Source: algorithm 1.
    """

    def init(spec, weight):
        if spec.role == 'vector':
            return init_zeros('momentum', 'second')(spec, weight)
        return init_zeros('momentum')(spec, weight) if spec.role == 'readout' else {}

    def update(spec, grad, state, weight, count):
        if spec.role == 'vector':
            direction, new_state = adam_direction(grad, state, b1, b2, eps, count)
            return scale_vector_factor * direction, new_state
        new_state = {}
        if spec.role == 'readout':
            new_state['momentum'] = momentum * state['momentum'] + (1 - momentum) * grad
        m_IO = as_matrices(spec, new_state.get('momentum', grad))
        rms_1O = jnp.sqrt(jnp.mean(jnp.square(m_IO), -2, keepdims=True))
        direction_IO = m_IO / jnp.maximum(rms_1O, MIN_RMS)
        return from_matrices(spec, direction_IO, weight.shape), new_state

    return per_parameter(specs, init, update)
