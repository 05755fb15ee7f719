"""Muon, NorMuon, Muon of bounded spectral norm, AuON and its hybrid: maps of averaged gradients.

Each layer, and each of queries, keys and values, is a separate matrix with all heads merged: a
query [D, N H], the output of attention [N H, D]; each expert too. For hidden matrices only.
"""

import math
from collections.abc import Callable
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.base import (
    B2,
    Eps,
    Momentum,
    Nesterov,
    init_zeros,
    optimizer_row,
    per_parameter,
)
from modules.optim.matrices import from_whole_matrices, whole_matrices
from modules.options import Option
from modules.params import ParamBox, ParamSpec, matrix_axes
from modules.spectrum import power_iteration
from modules.statistics import at_least_float32

COEFFICIENTS = 3.4445, -4.7750, 2.0315  # of x, x^3 and x^5, as in the author's code
# The singular values of the other two converge to 1. (2, -1.5, 0.5) has slope 0 at 1 and is from
# modded-nanogpt's track 3, where it takes 12 steps.
CONVERGENT = 2.0, -1.5, 0.5
# A polynomial for each of 5 steps, for values from 0.001 to 1 with a margin of 2% for rounding:
# as in nanochat and modded-nanogpt. Another number of steps has other constants.
POLAR_EXPRESS = (
    (8.156554524902461, -22.48329292557795, 15.878769915207462),
    (4.042929935166739, -2.808917465908714, 0.5000178451051316),
    (3.8916678022926607, -2.772484153217685, 0.5060648178503393),
    (3.285753657755655, -2.3681294933425376, 0.46449024233003106),
    (2.3465413258596377, -1.7097828382687081, 0.42323551169305323),
)
POLAR_EXPRESS_MARGIN = 1.02  # of the norm
ADAMW_RMS = 0.2  # of AdamW's updates, arXiv:2502.16982, section 2.2
NORM_EPS = 1e-7  # added to the norm inside of AuON's cosh
UNIT_EPS = 1e-10  # added to the roots and norms that NorMuon divides by, as in its code

MuonSteps = Annotated[int, Option('number of Newton-Schulz iterations', 1, 100)]
MuonPolynomial = Annotated[
    str,
    Option(
        'polynomial of the iterations: fastest near 0, one for each of 5 steps, or exact at 1',
        choices=('quintic', 'polar_express', 'convergent'),
    ),
]


def check_steps(polynomial: str, steps: int) -> None:
    """Raises ValueError for fewer steps than polar_express has constants for."""
    if polynomial == 'polar_express' and steps < len(POLAR_EXPRESS):
        raise ValueError(
            f'muon_polynomial=polar_express has constants for {len(POLAR_EXPRESS)} steps, and '
            f'fewer would need others; got muon_steps={steps}. Set muon_steps to '
            f'{len(POLAR_EXPRESS)} or more, or choose muon_polynomial=quintic.'
        )


def check_polynomial(recipe: Any, part: Any) -> None:
    """Raises ValueError as `check_steps`, for an optimizer of a recipe."""
    del recipe
    check_steps(part.options['muon_polynomial'], part.options['muon_steps'])


def newton_schulz(
    matrices: jax.Array, steps: int, eps: Any, polynomial: str = 'quintic'
) -> jax.Array:
    """Returns U f(S) V^T of matrices U S V^T [..., I, O]: all singular values near 1.

    X = M / (|M| + eps) by its Frobenius norm, then `steps` times X = a X + b (X X^T) X + c (X
    X^T)^2 X. Computed in float32 or more, with the device's default precision of products; the
    published code uses bfloat16. A matrix of zeros stays zero. The polynomials:

    - quintic: the same at every step, with the largest slope at 0. With 5 steps a singular value of
      at least 0.0015 of |M| ends between 0.68 and 1.203, a smaller value below; none is larger.
      Source: https://kellerjordan.github.io/posts/muon/ and its code.
    - polar_express: Polar Express (arXiv:2505.16932), a polynomial for each of 5 steps. Values of
      at least 0.001 end between 0.846 and 1.142. X starts as M / (1.02 |M| + eps), with a published
      eps of 1e-6. Steps after the fifth repeat the last polynomial, which takes values to 1.035.
    - convergent: 2 X - 1.5 (X X^T) X + 0.5 (X X^T)^2 X at every step, which takes all values to 1.
      It is slower at first, and is published with 12 steps.

    Args:
      matrices: M.
      steps: the number of iterations.
      eps: added to the norm.
      polynomial: its name.

    Returns:
      The matrices.

    Raises:
      ValueError: as `check_steps`.
    """
    check_steps(polynomial, steps)
    x = at_least_float32(matrices)
    tall = x.shape[-2] > x.shape[-1]
    x = jnp.matrix_transpose(x) if tall else x  # the smaller of the two products with itself
    norm = jnp.linalg.norm(x, axis=(-2, -1), keepdims=True)
    x = x / ((POLAR_EXPRESS_MARGIN * norm if polynomial == 'polar_express' else norm) + eps)

    def iterate(x, coefficients):
        a, b, c = coefficients
        gram = x @ jnp.matrix_transpose(x)
        return a * x + (b * gram + c * gram @ gram) @ x

    if polynomial == 'polar_express':
        for coefficients in POLAR_EXPRESS:
            x = iterate(x, coefficients)
        steps, repeated = steps - len(POLAR_EXPRESS), POLAR_EXPRESS[-1]
    else:
        repeated = {'quintic': COEFFICIENTS, 'convergent': CONVERGENT}[polynomial]
    if steps:
        x = jax.lax.fori_loop(0, steps, lambda _, x: iterate(x, repeated), x)
    return jnp.matrix_transpose(x) if tall else x


def average_gradient(
    mean: jax.Array, grad: jax.Array, momentum: Any, nesterov: bool
) -> tuple[jax.Array, jax.Array]:
    """Updates the average m of gradients.

    Args:
      mean: the present m.
      grad: g.
      momentum: the share of m that is kept.
      nesterov: whether n is m, moved once more.

    Returns:
      (n, m) with m = momentum m + (1 - momentum) g.
    """
    mean = momentum * mean + (1 - momentum) * grad
    return (momentum * mean + (1 - momentum) * grad if nesterov else mean), mean


def map_average(
    specs: Any, momentum: Any, nesterov: bool, map_matrices: Callable[[jax.Array], jax.Array]
) -> optax.GradientTransformation:
    """Makes an optimizer that maps averaged gradients to directions.

    Args:
      specs: a ParamSpec for each parameter.
      momentum: the share of the average that is kept.
      nesterov: whether the average is moved once more.
      map_matrices: maps the averages [..., I, O] to directions.

    Returns:
      The optimizer.
    """

    def update(spec, grad, state, weight, count):
        average, mean = average_gradient(state['momentum'], grad, momentum, nesterov)
        direction = map_matrices(whole_matrices(spec, average))
        return from_whole_matrices(spec, direction, grad), {'momentum': mean}

    return per_parameter(specs, init_zeros('momentum'), update)


SCALES = {  # (fan_in, fan_out) -> factor
    'none': lambda fan_in, fan_out: 1.0,
    'original': lambda fan_in, fan_out: math.sqrt(max(1.0, fan_out / fan_in)),
    'rms': lambda fan_in, fan_out: ADAMW_RMS * math.sqrt(max(fan_in, fan_out)),
}


MuonScale = Annotated[
    str,
    Option(
        'factor: sqrt(max(1, fan_out / fan_in)), 0.2 sqrt(max(fan_in, fan_out)), or 1',
        choices=('original', 'rms', 'none'),
    ),
]


@optimizer_row(
    'spectral', roles=('hidden',), other_sizes={'muon_scale': 'rms'}, check=check_polynomial
)
def muon(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    nesterov: Nesterov = True,
    eps: Eps = 1e-7,
    muon_steps: MuonSteps = 5,
    muon_polynomial: MuonPolynomial = 'quintic',
    muon_scale: MuonScale = 'original',
) -> optax.GradientTransformation:
    """Muon: `u = s NS(n) with n = mu m + (1 - mu) g`.

    `m <- mu m + (1 - mu) g`

    `NS` is `newton_schulz`, which brings all singular values of a matrix near 1, and `mu` is
    `momentum`. Without `nesterov`, `n = m`. The factor `s` (`muon_scale`):

    - `original`: `s = sqrt(max(1, O / I))`, with `I` inputs and `O` outputs, follows the author's
      code.
    - `rms`: `s = 0.2 sqrt(max(I, O))` gives updates the root mean square of AdamW's
      (arXiv:2502.16982), so that its learning rate can be kept.
    - `none`: `s = 1` leaves singular values near 1.

    `muon_polynomial` is the polynomial of the iterations: `quintic` is the author's,
    `polar_express` has one for each of its 5 steps (arXiv:2505.16932), and `convergent`, for 12
    steps, is exact in the limit. All use eps alike; Polar Express is published with 1e-6.

    Sources: https://kellerjordan.github.io/posts/muon/ and its code. Unlike in optax, its averages
    have no bias correction, and eps is added to the norm; torch.optim.Muon uses eps as the least
    norm.
    """

    def direction(matrices):
        factor = SCALES[muon_scale](*matrices.shape[-2:])
        return factor * newton_schulz(matrices, muon_steps, eps, muon_polynomial)

    return map_average(specs, momentum, nesterov, direction)


@optimizer_row(
    'spectral', roles=('hidden',), other_sizes={'muon_scale': 'rms'}, check=check_polynomial
)
def normuon(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    nesterov: Nesterov = True,
    b2: B2 = 0.95,
    eps: Eps = 1e-7,
    muon_steps: MuonSteps = 5,
    muon_polynomial: MuonPolynomial = 'quintic',
    muon_scale: MuonScale = 'original',
    normuon_axis: Annotated[
        str,
        Option(
            'units with a second moment each: outputs, or the longer side of a matrix',
            choices=('output', 'longer'),
        ),
    ] = 'output',
) -> optax.GradientTransformation:
    """NorMuon (arXiv:2510.05491): Muon with a second moment for each output.

    `u = s |X| Y / |Y| with Y[:, o] = X[:, o] / sqrt(v_o)`
    `v_o <- b2 v_o + (1 - b2) mean(X[:, o]^2)`

    `X = NS(n)` is the orthogonalised average of the gradients in `muon`, with its options and its
    factor `s`. Columns `o` of `X` belong to outputs, whose sizes differ after 5 iterations, and
    more so in a matrix with more outputs than inputs. `|X|` is the Frobenius norm of a matrix,
    which the division leaves unchanged; `v` thus needs no correction for its start.

    `normuon_axis=output` follows the authors' code (github.com/zichongli5/NorMuon). With `longer`,
    rows of a matrix with more inputs than outputs are divided in place of its columns, as in
    modded-nanogpt and nanochat, with `b2` 0.9. 1e-10 is added to each root and norm
    that is divided by, as in the authors' code.
    """

    def unit_side(rows, columns):
        return 'left' if normuon_axis == 'longer' and rows > columns else 'right'

    def init(spec, weight):
        batch, rows, columns = matrix_axes(spec)
        sizes = [math.prod(weight.shape[i] for i in axes) for axes in (rows, columns)]
        axes = (*batch, *(rows if unit_side(*sizes) == 'left' else columns))
        squares = jnp.zeros([weight.shape[i] for i in axes], weight.dtype)
        boxed = ParamBox(squares, ParamSpec('vector', tuple(spec.axes[i] for i in axes)))
        return {'momentum': jnp.zeros_like(weight), 'squares': boxed}

    def update(spec, grad, state, weight, count):
        average, mean = average_gradient(state['momentum'], grad, momentum, nesterov)
        x = newton_schulz(whole_matrices(spec, average), muon_steps, eps, muon_polynomial)
        side = unit_side(*x.shape[-2:])
        summed = -1 if side == 'left' else -2
        present = jnp.mean(jnp.square(x), summed)
        squares = b2 * state['squares'].reshape(present.shape) + (1 - b2) * present
        y = x / (jnp.expand_dims(jnp.sqrt(squares), summed) + UNIT_EPS)
        before, after = (jnp.linalg.norm(m, axis=(-2, -1), keepdims=True) for m in (x, y))
        factor = SCALES[muon_scale](*x.shape[-2:]) * before / (after + UNIT_EPS)
        direction = from_whole_matrices(spec, factor * y, grad)
        squares = squares.reshape(state['squares'].shape).astype(state['squares'].dtype)
        return direction, {'momentum': mean, 'squares': squares}

    return per_parameter(specs, init, update)


@optimizer_row('spectral', roles=('hidden',), check=check_polynomial)
def muon_spectral(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    nesterov: Nesterov = True,
    eps: Eps = 1e-7,
    muon_steps: MuonSteps = 5,
    muon_polynomial: MuonPolynomial = 'quintic',
    muon_power_steps: Annotated[int, Option('power iterations for the spectral norm', 1, 100)] = 8,
) -> optax.GradientTransformation:
    """Muon with bounded spectral norm: `u = sqrt(O / I) X / max(1, sigma(X)) with X = NS(n)`.

    `NS` and `n` are those of `muon`, `I` and `O` the numbers of inputs and outputs, and `sigma(X)`
    is the largest singular value. This is a usable approximation of the spectral condition on
    updates, that `sigma` of an update is at most `sqrt(O / I)` times the learning rate
    (arXiv:2310.17813). arXiv:2601.01306 requires it throughout training; this is not that paper's
    algorithm.

    `sigma(X)` is estimated from below by `muon_power_steps` power iterations, which start at the
    vector of the previous step. With 8 iterations, the norm of random updates of width 64 exceeds
    the bound by up to 8%, as all singular values of `X` are near the largest; with any number, by
    at most 20.3%. The bound covers neither weight decay nor the initial matrices.
    """

    def init(spec, weight):
        batch, _, columns = matrix_axes(spec)
        axes = (*batch, *columns)
        # Random, since the gradient behind a layer norm is orthogonal to a vector of ones.
        u = jax.random.normal(jax.random.key(0), [weight.shape[i] for i in axes], weight.dtype)
        boxed_u = ParamBox(u, ParamSpec('vector', tuple(spec.axes[i] for i in axes)))
        return {'momentum': jnp.zeros_like(weight), 'right': boxed_u}

    def update(spec, grad, state, weight, count):
        average, mean = average_gradient(state['momentum'], grad, momentum, nesterov)
        x = newton_schulz(whole_matrices(spec, average), muon_steps, eps, muon_polynomial)
        u = state['right']
        largest, next_u = power_iteration(
            x, u.reshape(*x.shape[:-2], x.shape[-1]).astype(x.dtype), muon_power_steps
        )
        factor = math.sqrt(x.shape[-1] / x.shape[-2]) / jnp.maximum(largest, 1.0)
        direction = from_whole_matrices(spec, x * factor[..., None, None], grad)
        next_u = next_u.reshape(u.shape).astype(u.dtype)
        return direction, {'momentum': mean, 'right': next_u}

    return per_parameter(specs, init, update)


Gamma = Annotated[float, Option('norm of a matrix inside cosh', 0, 10, traced=True)]


def cosh_rms(matrices: jax.Array, gamma: Any) -> tuple[jax.Array, jax.Array]:
    """Returns (R [..., 1, 1], X [..., I, O]) of matrices M.

        X = M / (|M| + NORM_EPS)        R = sqrt(mean(cosh(gamma X)^2))

    1 <= R <= 1 + sinh(gamma)^2 / (2 I O), which a matrix of a single entry comes close to; other
    matrices are near 1 + gamma^2 / (2 I O): 1.004 for 16 x 16 and 1.00002 for 256 x 256 at gamma
    1.5.
    """
    x = matrices / (jnp.linalg.norm(matrices, axis=(-2, -1), keepdims=True) + NORM_EPS)
    squares = jnp.square(jnp.cosh(gamma * x))
    return jnp.sqrt(jnp.mean(squares, (-2, -1), keepdims=True)), x


@optimizer_row('sgd', roles=('hidden',), other_sizes={'auon_form': 'paper'})
def auon(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    nesterov: Nesterov = True,
    auon_gamma: Gamma = 1.5,
    auon_form: Annotated[
        str,
        Option(
            "code: as large as the gradients; paper: norm 1 times muon's factor",
            choices=('code', 'paper'),
        ),
    ] = 'code',
) -> optax.GradientTransformation:
    """AuON (arXiv:2509.24320): `u = n / R with R = sqrt(mean(cosh(gamma n / |n|)^2))`.

    `n` is the averaged gradient of `muon`, `|n|` its Frobenius norm, and
    ``gamma`` is `auon_gamma`. `R` is so near 1 that this is momentum alone: it changes no ratio of
    singular values. With `auon_form=paper` the momentum has length 1; the paper has a ``gamma`` of
    1:

    `u = sqrt(max(1, O / I)) n / (|n| R)`

    `auon_form=code` is the published code, and the optimizer family suits it. Sources:
    arXiv:2509.24320, section 3.1; its code as of January 2026 and, for `paper`, the code for its
    first experiments, which also has the factor of the shape.
    """

    def direction(matrices):
        brake, unit = cosh_rms(matrices, auon_gamma)
        if auon_form == 'code':
            return matrices / brake
        rows, columns = matrices.shape[-2:]
        return math.sqrt(max(1.0, columns / rows)) * unit / brake

    return map_average(specs, momentum, nesterov, direction)


@optimizer_row('spectral', roles=('hidden',), check=check_polynomial)
def hybrid_auon(
    specs: Any,
    *,
    momentum: Momentum = 0.95,
    nesterov: Nesterov = True,
    eps: Eps = 1e-7,
    auon_gamma: Gamma = 1.5,
    muon_steps: MuonSteps = 5,
    muon_polynomial: MuonPolynomial = 'quintic',
) -> optax.GradientTransformation:
    """Hybrid AuON (arXiv:2509.24320): `u = X / R(X) with X = NS(n)`.

    `n` and `R` are those of `auon`. Up to `R`, which is near 1, this is `muon` without its factor.
    It follows the code, which has 5 `muon_steps`; the paper has one, and takes cosh of `X` without
    dividing by `|X|`. Source: section 3.2, and its code.
    """

    def direction(matrices):
        x = newton_schulz(matrices, muon_steps, eps, muon_polynomial)
        return x / cosh_rms(x, auon_gamma)[0]

    return map_average(specs, momentum, nesterov, direction)
