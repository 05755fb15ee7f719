"""Runs norms with drawn parameters and statistics, in training or in evaluation."""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from modules.norms import NORMS
from modules.params import split_boxes
from modules.statistics import BACKWARD_STATS, STATS

M, D = 12, 16
WEIGHTS = np.float64([1, 0, 1, 1, 1, 1, 1, 1, 0, 1, 1, 0])[:, None]  # 0 for padding


class NormCase(NamedTuple):
    """A norm with drawn parameters and statistics, as float32 NumPy arrays."""

    norm: Any
    params: dict[str, Any]
    stats: dict[str, Any]
    options: dict[str, Any]  # all of the norm's fields


def build(name, seed=1, randomize=True, features=D, dtype='float32', **options) -> NormCase:
    """Builds a norm.

    randomize: whether to draw parameters and statistics at random instead of the initial values.
    """
    norm = NORMS[name](**options)
    variables = norm.init(jax.random.key(0), jnp.ones((M, features), dtype))
    params = jax.device_get(split_boxes(variables.pop('params', {}))[0])
    stats = jax.device_get(variables)
    if randomize:
        rng = np.random.default_rng(seed)
        params = jax.tree.map(lambda p: np.float32(rng.normal(0.2, 0.3, p.shape)), params)
        stats = {k: {n: _draw(rng, n, v) for n, v in tree.items()} for k, tree in stats.items()}
    fields = {f: getattr(norm, f) for f in norm.__dataclass_fields__ if f not in ('parent', 'name')}
    return NormCase(norm, params, stats, fields)


def _draw(rng, name, value):
    if value.dtype == np.int32:
        return np.int32(1)
    if name in ('mean', 'running_gz', 'window_gz'):
        return np.float32(rng.normal(size=value.shape))
    return np.float32(rng.uniform(0.5, 2, value.shape))  # squares, variances and deviations


def tokens(dtype='float32', seed=0, shape=(M, D)):
    """Draws x and dy, exact in `dtype`, as float64."""
    rng = np.random.default_rng(seed)
    arrays = rng.normal(1, 2, shape), rng.normal(size=shape)
    return tuple(np.asarray(jnp.asarray(v, dtype), np.float64) for v in arrays)


def weight_options(name, weights=WEIGHTS):
    """Returns {'valid': ...} for norms with that field."""
    takes = 'valid' in NORMS[name].__dataclass_fields__
    return {'valid': np.float32(weights)} if takes else {}


def run(norm, params, stats, x, training):
    """Returns (y, the next STATS)."""
    variables = jax.tree.map(jnp.asarray, {'params': params, **stats})
    if training:
        y, next_stats = norm.apply(variables, x, mutable=(STATS,))
        return y, next_stats.get(STATS, {})
    return norm.apply(variables, x), {}


def differentiate(norm, training):
    """Compiles (params, stats, x, dy) -> (y, next STATS, dparams, next BACKWARD_STATS, dx)."""

    def compute(params, stats, x, dy):
        backward = {k: v for k, v in stats.items() if k == BACKWARD_STATS}
        carried = {k: v for k, v in stats.items() if k != BACKWARD_STATS}

        def f(params, backward, x):
            return run(norm, params, carried | backward, x, training)

        y, pull, next_stats = jax.vjp(f, params, backward, x, has_aux=True)
        grads, backward, grad_x = pull(dy)
        return y, next_stats, grads, backward.get(BACKWARD_STATS, {}), grad_x

    return jax.jit(compute)
