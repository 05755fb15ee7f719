"""Rounding that is learned by gradients, a matrix at a time, from the moments of its inputs.

The loss is the mean square of the change of the outputs, relative to the outputs:
`L = tr (Q - W)^T H (Q - W) / tr W^T H W`, where `H` holds the means of `x_i x_j` over a text.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

STEPS = 500
WEIGHT_RATE = 0.005  # of weights, in steps of their grid
RANGE_RATE = 3e-3  # of the ends of a grid, relative to them
ROUNDING_RATE = 0.2  # of v
PENALTY = 100.0  # at the end, relative to the error of rounding to nearest
FIRST_POWER, LAST_POWER = 20.0, 2.0  # of the penalty
STRETCH_LOW, STRETCH_HIGH = -0.1, 1.1  # of the sigmoid, so that fractions reach 0 and 1


class Problem(NamedTuple):
    """A matrix to round, in float32.

    Attributes:
      w_IO: the matrix.
      h_II: moments of its inputs.
      ranges_GKO: ranges of its blocks.
      block_I: number of the block of each input.
    """

    w_IO: jax.Array
    h_II: jax.Array
    ranges_GKO: jax.Array
    block_I: jax.Array

    def grid(self, levels: int, stretch_GKO: jax.Array | float = 1.0) -> tuple[jax.Array, ...]:
        """Returns the scale and the code of 0 of each weight.

        Args:
          levels: number of values.
          stretch_GKO: factors of the ranges.
        """
        low_GO, high_GO = jnp.moveaxis(self.ranges_GKO * stretch_GKO, 1, 0)
        scale_GO = (high_GO - low_GO) / (levels - 1)
        scale_GO = jnp.where(scale_GO > 0, scale_GO, 1.0)
        zero_GO = jnp.round(-low_GO / scale_GO)
        return scale_GO[self.block_I], zero_GO[self.block_I]

    def error(self, rounded_IO: jax.Array) -> jax.Array:
        """Returns L of rounded weights."""

        def square_outputs(matrix_IO):
            return jnp.sum(matrix_IO * (self.h_II @ matrix_IO))

        smallest = jnp.finfo(self.w_IO.dtype).tiny
        change = square_outputs(rounded_IO - self.w_IO)
        return change / jnp.maximum(square_outputs(self.w_IO), smallest)


def make_problem(
    weights_IO: np.ndarray, moments_II: np.ndarray, ranges_GKO: np.ndarray, block: int
) -> Problem:
    """Returns a problem.

    Args:
      weights_IO: the matrix.
      moments_II: means of x_i x_j.
      ranges_GKO: ranges of its blocks.
      block: inputs that share a range; 0: all.
    """
    block_I = np.arange(len(weights_IO)) // (block or len(weights_IO))
    arrays = (jnp.asarray(x, jnp.float32) for x in (weights_IO, moments_II, ranges_GKO))
    return Problem(*arrays, jnp.asarray(block_I))


@functools.partial(jax.jit, static_argnames='levels')
def learn_weights_and_ranges(problem: Problem, levels: int) -> tuple[jax.Array, jax.Array]:
    """Learns weights and the ranges of their grids, as AdaQuant (arXiv:2006.10518).

    Rounding passes gradients unchanged. The authors also learn biases and ranges of activations,
    with rates of 1e-5 for weights and 1e-3 for ranges; here weights move in steps of their grid, so
    that one rate fits all matrices. The result is the best of all steps.

    Args:
      problem: the matrix.
      levels: number of values.

    Returns:
      (weights whose nearest values are the result, ranges).
    """
    step_IO, _ = problem.grid(levels)

    def loss(params, progress=1.0):
        del progress
        scale_IO, zero_IO = problem.grid(levels, params['stretch'])
        weights_IO = problem.w_IO + step_IO * params['shift']
        codes_IO = jnp.clip(weights_IO / scale_IO + zero_IO, 0, levels - 1)
        codes_IO = codes_IO + jax.lax.stop_gradient(jnp.round(codes_IO) - codes_IO)
        return problem.error(scale_IO * (codes_IO - zero_IO))

    params = {
        'shift': jnp.zeros_like(problem.w_IO),
        'stretch': jnp.ones_like(problem.ranges_GKO),
    }
    best = _descend(loss, loss, params, {'shift': WEIGHT_RATE, 'stretch': RANGE_RATE})
    return problem.w_IO + step_IO * best['shift'], problem.ranges_GKO * best['stretch']


@functools.partial(jax.jit, static_argnames='levels')
def learn_rounding(problem: Problem, levels: int) -> jax.Array:
    """Learns for each weight whether it is rounded up or down, as AdaRound (arXiv:2004.10568).

    `q = s (clip(floor(w / s) + z + h(v), 0, n - 1) - z)`
    `h(v) = clip(1.2 sigmoid(v) - 0.1, 0, 1)`

    A penalty, the mean of `1 - |2 h - 1|^b`, whose power falls from 20 to 2 and whose weight grows
    from 0, ends fractions. The result is the best of all steps after rounding `h`.

    Args:
      problem: the matrix.
      levels: number of values.

    Returns:
      The rounded weights.
    """
    scale_IO, zero_IO = problem.grid(levels)
    floor_IO = jnp.floor(problem.w_IO / scale_IO)

    def decode(up_IO):
        codes_IO = jnp.clip(floor_IO + up_IO + zero_IO, 0, levels - 1)
        return scale_IO * (codes_IO - zero_IO)

    first_error = problem.error(decode(jnp.round(problem.w_IO / scale_IO) - floor_IO))
    width = STRETCH_HIGH - STRETCH_LOW

    def fraction(v_IO):
        return jnp.clip(width * jax.nn.sigmoid(v_IO) + STRETCH_LOW, 0, 1)

    def soft_loss(v_IO, progress):
        h_IO = fraction(v_IO)
        power = FIRST_POWER + (LAST_POWER - FIRST_POWER) * progress
        distance_IO = jnp.maximum(jnp.abs(2 * h_IO - 1), jnp.finfo(h_IO.dtype).tiny)
        penalty = progress * PENALTY * first_error * jnp.mean(1 - distance_IO**power)
        return problem.error(decode(h_IO)) + penalty

    def hard_loss(v_IO):
        return problem.error(decode(jnp.round(fraction(v_IO))))

    share_IO = (problem.w_IO / scale_IO - floor_IO - STRETCH_LOW) / width
    start_IO = jax.scipy.special.logit(share_IO)
    best_IO = _descend(soft_loss, hard_loss, start_IO, ROUNDING_RATE)
    return decode(jnp.round(fraction(best_IO)))


def _descend(loss, judge, params, rates):
    """Returns the parameters of the step of Adam that is judged best.

    Args:
      loss: (parameters, share of the steps done) -> scalar with gradients.
      judge: parameters -> scalar, of which the smallest counts.
      params: at the start.
      rates: learning rates, a prefix of the parameters' tree; they fall to 0 by a cosine.
    """
    adam = optax.scale_by_adam()

    def update(carry, step):
        params, state, best, smallest = carry
        progress = step / STEPS
        directions, state = adam.update(jax.grad(loss)(params, progress), state)
        decay = (1 + jnp.cos(jnp.pi * progress)) / 2
        params = jax.tree.map(
            lambda rate, param, direction: param - decay * rate * direction,
            jax.tree.broadcast(rates, params),
            params,
            directions,
        )
        value = judge(params)
        best = jax.tree.map(
            lambda param, best_param: jnp.where(value < smallest, param, best_param), params, best
        )
        return (params, state, best, jnp.minimum(value, smallest)), None

    start = params, adam.init(params), params, judge(params)
    (_, _, best, _), _ = jax.lax.scan(update, start, jnp.arange(STEPS))
    return best
