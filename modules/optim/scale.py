"""SCALE: columns of one size, and momentum in the readout alone."""

import sys
from typing import Annotated, Any

import jax.numpy as jnp
import optax

from modules.optim.adamw import ABOVE_0, B1, B2, Eps
from modules.optim.base import of_family, per_parameter
from modules.optim.sgd import Momentum
from modules.options import Option
from modules.params import as_matrices, from_matrices

SMALLEST_RMS = 1e-8  # of a column: a smaller one is not made as large as the others


@of_family('adam')
def scale(
    specs: Any,
    *,
    momentum: Momentum = 0.9,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-8,
    scale_vector_factor: Annotated[
        float,
        Option(
            'how many times the learning rate of matrices vectors have',
            ABOVE_0,
            sys.float_info.max,
            traced=True,
        ),
    ] = 20.0,
) -> optax.GradientTransformation:
    """Each column of a matrix divided by its root mean square (arXiv:2506.16659, algorithm 1).

    A column is what one output unit sums: all inputs, or in an embedding the feature of all tokens.
    It is the gradient's, and in the readout that of m = momentum m + (1 - momentum) g, from 0.
    Vectors have Adam's direction (b1, b2, eps), scale_vector_factor times. An embedding that reads
    out too is an embedding: it has no momentum.

    The paper divides by the norm of a column, the authors' code
    (https://github.com/OptimAI-Lab/Minimalist_LLM_Pretraining) by its root mean square, so here
    too: the learning rates that they report, 1e-3 up to 350M parameters, are of the latter. Vectors
    have 20 times that there; 5 times at 1B and 10 times at 7B. That code compares eps with a second
    moment that is not corrected for its start; here it is, as in Adam's paper.
    """

    def init(spec, weight):
        zeros = jnp.zeros_like(weight)
        if spec.role == 'vector':
            return {'momentum': zeros, 'second': zeros}
        return {'momentum': zeros} if spec.role == 'readout' else {}

    def update(spec, grad, kept, weight, count):
        if spec.role == 'vector':
            m = b1 * kept['momentum'] + (1 - b1) * grad
            v = b2 * kept['second'] + (1 - b2) * grad**2
            adam = m / (1 - b1**count) / (jnp.sqrt(v / (1 - b2**count)) + eps)
            return scale_vector_factor * adam, {'momentum': m, 'second': v}
        later = {}
        if spec.role == 'readout':
            later['momentum'] = momentum * kept['momentum'] + (1 - momentum) * grad
        m_IO = as_matrices(spec, later.get('momentum', grad))
        rms_1O = jnp.sqrt(jnp.mean(jnp.square(m_IO), -2, keepdims=True))
        found_IO = m_IO / jnp.maximum(rms_1O, SMALLEST_RMS)
        return from_matrices(spec, found_IO, weight.shape), later

    return per_parameter(specs, init, update)
