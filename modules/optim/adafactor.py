"""Adafactor."""

import math
import sys
from typing import Annotated, Any

import jax
import jax.numpy as jnp
import optax

from modules.optim.adamw import ABOVE_0
from modules.optim.base import of_family, per_parameter
from modules.options import Option
from modules.params import Described, ParamSpec, matrix_axes, root_mean_square

SMALLEST_SCALE = 1e-3  # the root mean square that a weight has at least when an update is scaled


@of_family('adam', other_sizes={'adafactor_absolute': False})
def adafactor(
    specs: Any,
    *,
    adafactor_decay: Annotated[
        float, Option('x: t^-x is the share of the squares of step t', ABOVE_0, 1, traced=True)
    ] = 0.8,
    adafactor_eps: Annotated[
        float, Option('added to the squared gradient', ABOVE_0, sys.float_info.max, traced=True)
    ] = 1e-30,
    adafactor_clip: Annotated[
        float,
        Option('root mean square of an update, at most', ABOVE_0, sys.float_info.max, traced=True),
    ] = 1.0,
    adafactor_min_size: Annotated[
        int, Option('the smaller side of the smallest matrix that is factored', 1)
    ] = 128,
    adafactor_absolute: Annotated[
        bool, Option("whether an update is not multiplied by its weight's root mean square")
    ] = False,
) -> optax.GradientTransformation:
    """g / sqrt(v), with v of a matrix from the means of its rows and columns (arXiv:1804.04235).

    v is a mean of g^2 + eps, in which step t has the share t^-x. Of a matrix only the means r of
    rows and c of columns are kept, and v = r c / mean(r). Then an update is divided by
    max(1, rms(update) / clip), and multiplied by max(1e-3, rms(weight)) unless it is absolute.

    As optax.adafactor without its weight decay, but of each matrix of a stack, where that one takes
    the two largest axes of the whole array. In the paper the learning rate is min(0.01, 1 /
    sqrt(t)), to be given here, and there is no momentum (algorithms 4 and 5).
    """

    def init(spec, weight):
        if not is_factored(spec, weight.shape, adafactor_min_size):
            return {'second': jnp.zeros_like(weight)}
        _, rows, columns = matrix_axes(spec)
        return {
            'rows': _mean(spec, jnp.zeros_like(weight), columns),
            'columns': _mean(spec, jnp.zeros_like(weight), rows),
        }

    def update(spec, grad, kept, weight, count):
        share = count.astype(grad.dtype) ** -adafactor_decay
        square = jnp.square(grad) + adafactor_eps
        if 'second' in kept:
            later = {'second': (1 - share) * kept['second'] + share * square}
            direction = grad * jax.lax.rsqrt(later['second'])
        else:
            _, rows, columns = matrix_axes(spec)
            later, v = {}, {}
            for name, others in (('rows', columns), ('columns', rows)):
                mean = jnp.mean(square, others)
                later[name] = (1 - share) * kept[name] + share * mean
                v[name] = jnp.expand_dims(later[name], others)
            relative = v['rows'] / jnp.mean(v['rows'], rows, keepdims=True)
            direction = grad * jax.lax.rsqrt(relative) * jax.lax.rsqrt(v['columns'])
        direction /= jnp.maximum(1.0, root_mean_square(spec, direction) / adafactor_clip)
        if not adafactor_absolute:
            direction *= jnp.maximum(SMALLEST_SCALE, root_mean_square(spec, weight))
        return direction, later

    return per_parameter(specs, init, update)


def is_factored(spec: ParamSpec, shape: tuple[int, ...], least: int) -> bool:
    """Whether it is matrices of at least `least` rows and columns each."""
    if spec.role == 'vector':
        return False
    _, *sides = matrix_axes(spec)
    return min(math.prod(shape[i] for i in axes) for axes in sides) >= least


def _mean(spec, weight, axes):
    """Over some axes, described by the others."""
    names = tuple(name for i, name in enumerate(spec.axes) if i not in axes)
    return Described(jnp.mean(weight, axes), ParamSpec('vector', names))
