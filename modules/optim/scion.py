"""Scion: for each role, the step that a norm of the update would choose.

Each layer, and each of queries, keys and values, is a separate matrix with all heads merged, and
each expert too, as in `modules.optim.muon`.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.base import Momentum, init_zeros, optimizer_row, per_parameter
from modules.optim.matrices import from_whole_matrices, whole_matrices
from modules.optim.muon import MuonSteps, newton_schulz
from modules.options import Option
from modules.params import ParamSpec, as_matrices, from_matrices, root_mean_square

RMS_EPS, SPECTRAL_EPS = 1e-8, 1e-7  # added to norms in denominators, as in the authors' code


def _divide_by_rms(matrices: jax.Array, axis: int, inputs: float) -> jax.Array:
    rms = jnp.sqrt(jnp.mean(jnp.square(matrices), axis, keepdims=True))
    return matrices / (inputs * rms + RMS_EPS)


ENTRYWISE: dict[str, Callable[[jax.Array, float], jax.Array]] = {  # (d [..., I, O], I) -> step
    'sign': lambda d_IO, inputs: jnp.sign(d_IO) / inputs,
    'input': lambda d_IO, inputs: _divide_by_rms(d_IO, -1, inputs),
    'output': lambda d_IO, inputs: _divide_by_rms(d_IO, -2, inputs),
}
NORMS_HELP = 'norm of the steps of {}: per entry, input or output'


def _choice(parameters: str, *norms: str, suffix: str = '') -> Option:
    return Option(NORMS_HELP.format(parameters) + suffix, choices=norms)


def choose_step(spec: ParamSpec, norm: str, mean: jax.Array, steps: int) -> jax.Array:
    """Returns the step of norm 1 that has the largest product with an average of gradients.

    Args:
      spec: describes the parameter; looked up or one-hot inputs are not averaged over.
      norm: 'spectral' or a row of ENTRYWISE, for matrices; vectors have their rms.
      mean: d, like the parameter.
      steps: Newton-Schulz iterations.

    Returns:
      An array like `mean`.
    """
    if spec.role == 'vector':
        return mean / (root_mean_square(spec, mean) + RMS_EPS)
    if norm == 'spectral':
        d_IO = whole_matrices(spec, mean)
        factor = math.sqrt(d_IO.shape[-1] / d_IO.shape[-2])
        return from_whole_matrices(spec, factor * newton_schulz(d_IO, steps, SPECTRAL_EPS), mean)
    d_IO = as_matrices(spec, mean)
    inputs = d_IO.shape[-2]
    if spec.role == 'embedding':
        inputs = math.sqrt(inputs) if norm == 'output' else 1
    return from_matrices(spec, ENTRYWISE[norm](d_IO, inputs), mean.shape)


@optimizer_row('spectral')
def scion(
    specs: Any,
    *,
    momentum: Momentum = 0.9,
    muon_steps: MuonSteps = 5,
    scion_hidden: Annotated[
        str, _choice('hidden matrices', 'spectral', *ENTRYWISE, suffix=', or the singular values')
    ] = 'spectral',
    scion_embedding: Annotated[str, _choice('embeddings', *ENTRYWISE)] = 'sign',
    scion_readout: Annotated[
        str, _choice('the readout', 'spectral', *ENTRYWISE, suffix=', or the singular values')
    ] = 'sign',
) -> optax.GradientTransformation:
    """Scion (arXiv:2502.07529): `u` is the step of norm 1 with the largest product `u . d`.

    `d <- mu d + (1 - mu) g`

    `mu` is `momentum`, 1 - alpha in the paper. The norm depends on the role. With `I` inputs and
    `O` outputs, a step is

    - `spectral`: `u = sqrt(O / I) NS(d)`, with the singular values of `muon`.
    - `sign`: `u = sign(d) / I`.
    - `input`: `u_i = d_i / (I rms(d_i))` for the weights of each input (ColNorm in the code).
    - `output`: `u_o = d_o / (I rms(d_o))` for those of each output (RowNorm).

    An embedding looks up its inputs, so `sign` and `input`, which norms each token, are not divided
    by `I`, and `output` is divided by `sqrt(I)`. Vectors have `u = d / rms(d)` (BiasRMS). All steps
    keep their effect on activations as the width grows.

    The paper multiplies steps by a radius `rho` for each role. Here that is the ratio of learning
    rates: 50 for hidden matrices and 3000 for the readout, in the authors' nanoGPT, are
    `optim.others_lr` of 60 times `optim.lr`. It shares one table between embedding and readout,
    with the factor `1 / I` of the readout; ours has the embedding's norm, without it.

    As it is, this is the unconstrained form. The constrained form, `w <- (1 - gamma) w - gamma rho
    u`, keeps each weight within `rho` of 0 in its norm. It is decoupled decay with learning rate
    `gamma rho` and a weight_decay of `1 / rho`, or for several radii
    `optim.decay_rule=independent` with a weight_decay of `gamma`, 0.00036 in that code. Source:
    https://github.com/LIONS-EPFL/scion.
    """
    norms = {'hidden': scion_hidden, 'embedding': scion_embedding, 'readout': scion_readout}

    def update(spec, grad, state, weight, count):
        mean = momentum * state['momentum'] + (1 - momentum) * grad
        direction = choose_step(spec, norms.get(spec.role, 'rms'), mean, muon_steps)
        return direction, {'momentum': mean}

    return per_parameter(specs, init_zeros('momentum'), update)
