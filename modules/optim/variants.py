"""Variants of SGD and Adam: AdEMAMix, Adafactor, AdamP, SGDP, Lion, normalized gradient descent."""

import math
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.base import (
    ABOVE_0,
    B1,
    B2,
    Dampening,
    Direction,
    Eps,
    Momentum,
    Nesterov,
    above_0,
    below_1,
    divide_or_zero,
    from_0,
    init_zeros,
    optimizer_row,
    per_parameter,
    up_to_1,
)
from modules.optim.classic import adam_direction
from modules.options import Option
from modules.params import (
    ParamBox,
    ParamSpec,
    as_matrices,
    from_matrices,
    matrix_axes,
    root_mean_square,
)

MIN_SCALE = 1e-3  # Adafactor multiplies an update by at least this
SGDP_EPS = 1e-8  # of the norms in the projection; SGDP has no other denominator

DELTA_DESCRIPTION = 'project if |cos(gradient, weight)| is below this / sqrt(entries)'
Delta = Annotated[float, above_0(DELTA_DESCRIPTION)]
DecayRatio = Annotated[float, up_to_1('share of weight decay kept for projected weights')]


@optimizer_row('sgd', error_probability=True)
def normalized_gd(specs: Any) -> optax.GradientTransformationExtraArgs:
    """Normalized gradient descent (arXiv:2412.08424): `u = g / q with q = mean(1 - p)`.

    `p` is the probability of the label, and the mean is over the target tokens of the batch. `q`
    comes from the logits of the loss and is recorded as `error_probability`. The gradient is
    clipped before the division; set `optim.clip_norm=inf` for the published step.

    This is the analogue for language models of a method for two classes, where `q` is the mean of
    `1 / (1 + exp(margin))`. There, with a large learning rate, it separates `n` points in as many
    steps as a perceptron, `1 / n` of the steps of plain gradient descent. Raises ValueError if the
    extra argument `means` has no error_probability.
    """

    def update(updates, state, params=None, *, means=None, **_):
        if means is None or 'error_probability' not in means:
            raise ValueError(
                'normalized_gd divides by means["error_probability"], the mean probability of '
                'wrong tokens: pass `update` the means of the batch'
            )
        q = means['error_probability']
        factor = divide_or_zero(1, q)
        return jax.tree.map(lambda g: factor * g, updates), state

    return optax.GradientTransformationExtraArgs(lambda params: optax.EmptyState(), update)


@optimizer_row('adam')
def lion(specs: Any, *, b1: B1 = 0.9, b2: B2 = 0.99) -> optax.GradientTransformation:
    """Lion (arXiv:2302.06675): `u = sign(b1 m + (1 - b1) g)`.

    Afterwards the momentum is updated:

    `m <- b2 m + (1 - b2) g`

    Each coordinate moves by exactly the learning rate, so the learning rate should be a third to a
    tenth of AdamW's, and the weight decay proportionally larger. Source: algorithm 2.
    """

    def update(spec, grad, state, weight, count):
        m = state['momentum']
        return jnp.sign(b1 * m + (1 - b1) * grad), {'momentum': b2 * m + (1 - b2) * grad}

    return per_parameter(specs, init_zeros('momentum'), update)


def steps_before_warm(blocks: int, ademamix_warmup: int) -> int:
    """Returns the steps before the warm-up ends; as published, it takes the whole run."""
    return max(ademamix_warmup - 1, 0)


@optimizer_row('adam', lasts=steps_before_warm)
def ademamix(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-8,
    ademamix_b3: Annotated[float, below_1('exponential decay rate of the slow average')] = 0.9999,
    ademamix_alpha: Annotated[float, from_0('weight of the slow average in the direction')] = 5.0,
    ademamix_warmup: Annotated[
        int,
        Option(
            'steps until the slow average has its weight and decay rate',
            0,
            time_unit='steps',
            traced=True,
        ),
    ] = 0,
) -> optax.GradientTransformation:
    """AdEMAMix (arXiv:2409.03137): `u = (m_hat + alpha s) / (sqrt(v_hat) + eps)`.

    `s <- b3 s + (1 - b3) g`

    `m_hat` and `v_hat` are those of `adamw`. The slow average `s` (`ademamix_b3`) has no bias
    correction, so it fills over thousands of steps: a short run hardly shows it. With
    ``alpha``, the option `ademamix_alpha`, of 0 this is `adamw`.

    With a warm-up of `T` steps (`ademamix_warmup`), step `t <= T` has `alpha_t` and `c_t` in place
    of ``alpha`` and `b3`:

    `alpha_t = alpha t / T`
    `1 / log(c_t) = (1 - t / T) / log(b1) + (t / T) / log(b3)`

    The weight grows linearly, and so does the half-life of the average, from that of `b1`; `c_t` is
    never above `b3`.
    The authors' language models warm up over the whole run, with an ``alpha`` of 8. Sources:
    algorithm 1 and section 3; the default ``alpha`` is that of the authors' JAX code.
    """

    def update(spec, grad, state, weight, count):
        progress = count.astype(grad.dtype) / jnp.maximum(ademamix_warmup, 1)
        progress = jnp.minimum(progress, 1.0)
        log_b1, log_b3 = jnp.log(jnp.asarray(b1)), jnp.log(jnp.asarray(ademamix_b3))
        log_b3 = jnp.minimum(1 / ((1 - progress) / log_b1 + progress / log_b3), log_b3)
        # 1 - b3 without cancellation for b3 near 1.
        slow = state['slow'] - jnp.expm1(log_b3) * (grad - state['slow'])
        m = b1 * state['momentum'] + (1 - b1) * grad
        v = b2 * state['second'] + (1 - b2) * grad**2
        numerator = m / (1 - b1**count) + progress * ademamix_alpha * slow
        direction = numerator / (jnp.sqrt(v / (1 - b2**count)) + eps)
        return direction, {'momentum': m, 'second': v, 'slow': slow}

    return per_parameter(specs, init_zeros('momentum', 'second', 'slow'), update)


@optimizer_row('adam', other_sizes={'adafactor_absolute': False})
def adafactor(
    specs: Any,
    *,
    adafactor_decay: Annotated[
        float, Option('x: step t enters the running mean with weight t^-x', ABOVE_0, 1, traced=True)
    ] = 0.8,
    adafactor_eps: Annotated[float, above_0('added to the squared gradient')] = 1e-30,
    adafactor_clip: Annotated[float, above_0('largest root mean square of an update')] = 1.0,
    adafactor_min_size: Annotated[
        int, Option('factor a matrix if its shorter side is at least this', 1)
    ] = 128,
    adafactor_absolute: Annotated[
        bool, Option("whether to skip scaling by the weight's root mean square")
    ] = False,
) -> optax.GradientTransformation:
    """Adafactor, with factored second moments (arXiv:1804.04235): `u = g / sqrt(v)`.

    `v <- (1 - t^-x) v + t^-x (g^2 + epsilon)`

    `x` is `adafactor_decay`, and `epsilon` is `adafactor_eps`. For a matrix, only the means `r` of
    the rows of `v` and the means `c` of its columns are stored:

    `v_ij = r_i c_j / mean(r)`

    The update is then divided by `max(1, rms(u) / d)`, with `d` the option `adafactor_clip`, and
    multiplied by `max(1e-3, rms(w))` unless `adafactor_absolute` is set.

    This equals optax.adafactor without its weight decay, except that each matrix of a stack is
    factored separately, while optax factors the two largest axes of the whole array. The paper
    (algorithms 4 and 5) has no momentum and a learning rate of `min(0.01, 1 / sqrt(t))`, which a
    config has to set.
    """

    def is_factored(spec, shape):
        if spec.role == 'vector':
            return False
        _, *sides = matrix_axes(spec)
        return min(math.prod(shape[i] for i in axes) for axes in sides) >= adafactor_min_size

    def init_means(spec, weight, axes):
        names = tuple(name for i, name in enumerate(spec.axes) if i not in axes)
        return ParamBox(jnp.mean(jnp.zeros_like(weight), axes), ParamSpec('vector', names))

    def init(spec, weight):
        if not is_factored(spec, weight.shape):
            return {'second': jnp.zeros_like(weight)}
        _, rows, columns = matrix_axes(spec)
        return {
            'rows': init_means(spec, weight, columns),
            'columns': init_means(spec, weight, rows),
        }

    def update(spec, grad, state, weight, count):
        share = count.astype(grad.dtype) ** -adafactor_decay
        square = jnp.square(grad) + adafactor_eps
        if 'second' in state:
            new_state = {'second': (1 - share) * state['second'] + share * square}
            direction = grad * jax.lax.rsqrt(new_state['second'])
        else:
            _, rows, columns = matrix_axes(spec)
            new_state, v = {}, {}
            for name, axes in (('rows', columns), ('columns', rows)):
                mean = jnp.mean(square, axes)
                new_state[name] = (1 - share) * state[name] + share * mean
                v[name] = jnp.expand_dims(new_state[name], axes)
            # Two roots, as the product r c of small squares may underflow.
            relative = v['rows'] / jnp.mean(v['rows'], rows, keepdims=True)
            direction = grad * jax.lax.rsqrt(relative) * jax.lax.rsqrt(v['columns'])
        direction /= jnp.maximum(1.0, root_mean_square(spec, direction) / adafactor_clip)
        if not adafactor_absolute:
            direction *= jnp.maximum(MIN_SCALE, root_mean_square(spec, weight))
        return direction, new_state

    return per_parameter(specs, init, update)


def check_decay_ratio(recipe: Any, part: Any) -> None:
    """Raises ValueError if weight decay is in the gradient, from which no share can be removed."""
    is_penalty = recipe.decay.row.in_gradient and recipe.optim.weight_decay
    if is_penalty and part.options['adamp_decay_ratio'] != 1.0:
        raise ValueError(
            f'{recipe.decay} adds weight decay to the gradient, so {part} cannot reduce it. Choose '
            'optim.decay_rule=decoupled, or optim.adamp_decay_ratio=1.0.'
        )


@optimizer_row('adam', check=check_decay_ratio)
def adamp(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-8,
    nesterov: Nesterov = False,
    adamp_delta: Delta = 0.1,
    adamp_decay_ratio: DecayRatio = 0.1,
) -> optax.GradientTransformation:
    """AdamP (arXiv:2006.08217): Adam without the part of the direction along a scale-invariant
    weight.

    `u <- u - w (w^T u) / |w|^2`

    This projection of Adam's direction applies to the matrices that `remove_radial` selects: those
    whose gradients are nearly orthogonal to them, by the threshold `adamp_delta`. A projected
    matrix gets only the share `adamp_decay_ratio` (wd_ratio in the package) of the weight decay.

    Follows the PyPI package adamp 0.3.0: with `nesterov`, the first moment is moved once more, to
    `b1 m + (1 - b1) g`, and still divided by `1 - b1^t`. Source: algorithm 2.
    """

    def update(spec, grad, state, weight, count):
        direction, moments = adam_direction(grad, state, b1, b2, eps, count, nesterov)
        direction = remove_radial(
            spec, direction, grad, weight, adamp_delta, eps, adamp_decay_ratio
        )
        return direction, moments

    return per_parameter(specs, init_zeros('momentum', 'second'), update)


@optimizer_row('sgd', check=check_decay_ratio)
def sgdp(
    specs: Any,
    *,
    momentum: Momentum = 0.9,
    dampening: Dampening = 0.0,
    nesterov: Nesterov = False,
    adamp_delta: Delta = 0.1,
    adamp_decay_ratio: DecayRatio = 0.1,
) -> optax.GradientTransformation:
    """SGDP (arXiv:2006.08217): SGD without the part of the direction along a scale-invariant
    weight.

    `u <- u - w (w^T u) / |w|^2`

    The projection is that of `adamp`, applied to SGD's direction. The stored sum of gradients is
    not projected, as in the paper; the PyPI package adamp projects it in place unless `nesterov` is
    set. The first gradient is dampened too, as in that package, while torch.optim.SGD does not
    dampen it. The default momentum of 0.9 is from the package's example, which also sets
    `nesterov`; its signature has neither. Weight decay is multiplied by the learning rate as in
    `adamp`; the package also divides it by `1 - momentum`, so that its 1e-5 is 1e-4 here. Source:
    algorithm 1.
    """

    def update(spec, grad, state, weight, count):
        buffer = momentum * state['momentum'] + (1 - dampening) * grad
        direction = grad + momentum * buffer if nesterov else buffer
        direction = remove_radial(
            spec, direction, grad, weight, adamp_delta, SGDP_EPS, adamp_decay_ratio
        )
        return direction, {'momentum': buffer}

    return per_parameter(specs, init_zeros('momentum'), update)


def remove_radial(
    spec: ParamSpec, direction: jax.Array, grad: jax.Array, weight: jax.Array, delta, eps, ratio
) -> jax.Array | Direction:
    """Projects a direction orthogonally to the weight if the gradient is nearly orthogonal to it.

    If the length of a weight has no effect, its gradients are orthogonal to it, and their sum only
    lengthens it. The tested rows are the output units of a matrix, or the tokens of an embedding:
    if the largest |cos(grad, weight)| among them is below delta / sqrt(entries of a row), each row
    loses its radial part, p <- p - w <w, p> / |w|^2. Otherwise the whole matrix is tested as a
    single vector. Vectors are returned unchanged.

    Args:
      spec: describes the parameter.
      direction: p.
      grad: the gradient.
      weight: w.
      delta: the threshold.
      eps: added to norms in denominators.
      ratio: the share of the weight decay that a projected matrix gets.

    Returns:
      The direction, with its share of the weight decay.
    """
    if spec.role == 'vector':
        return direction
    p_IO, g_IO, w_IO = (as_matrices(spec, x) for x in (direction, grad, weight))
    unit = (-1,) if spec.role == 'embedding' else (-2,)
    projected_IO, share = p_IO, jnp.ones((*p_IO.shape[:-2], 1, 1), p_IO.dtype)
    for axes in ((-2, -1), unit):
        size = math.prod(w_IO.shape[axis] for axis in axes)
        cosine = jnp.abs(jnp.sum(g_IO * w_IO, axes, keepdims=True))
        for x_IO in (g_IO, w_IO):
            cosine /= jnp.maximum(jnp.linalg.norm(x_IO, axis=axes, keepdims=True), eps)
        is_below = jnp.max(cosine, (-2, -1), keepdims=True) < delta / math.sqrt(size)
        along_IO = w_IO / (jnp.linalg.norm(w_IO, axis=axes, keepdims=True) + eps)
        radial_IO = along_IO * jnp.sum(along_IO * p_IO, axes, keepdims=True)
        projected_IO = jnp.where(is_below, p_IO - radial_IO, projected_IO)
        share = jnp.where(is_below, ratio, share)
    batch = share.shape[:-2]
    share = share.reshape(*batch, *(1,) * (weight.ndim - len(batch)))
    return Direction(from_matrices(spec, projected_IO, weight.shape), share)
