"""State of layers that is not trained by gradients: two Linen collections.

STATS is measured in the forward pass: running means, counts, keys. A layer is in training while
STATS is mutable, and in evaluation otherwise, so that no flag has to be passed down. BACKWARD_STATS
is measured in the backward pass: a layer reads such a statistic through a `custom_vjp`, which
returns its next value in place of its gradient; the step stores the value.

Each microbatch is one update, in order. Recomputing a block under remat is no update: only the
return values of the forward and the backward pass are stored. A statistic that must change once for
a step, however many microbatches it has, is summed over them and then applied by `finish_step` of
the row (`modules.experts`).
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

STATS = 'stats'
BACKWARD_STATS = 'bwd_stats'
AUXILIARY = 'auxiliary_losses'  # sown scalars that layers add to the objective
DIAGNOSTICS = 'diagnostics'  # measurements that layers record on demand
# Zeros that layers read; their gradients are what rounding does to a gradient.
GRADIENT_ERRORS = 'gradient_errors'
INPUTS = 'inputs'  # sums over tokens of the squared inputs of matmuls, on demand
INPUT_MOMENTS = 'input_moments'  # sums over tokens of the products of two inputs, on demand


def is_training(module: nn.Module) -> bool:
    return module.is_mutable_collection(STATS) and not module.is_initializing()


def is_recording(module: nn.Module) -> bool:
    """Whether DIAGNOSTICS are requested; otherwise they are not traced."""
    return module.is_mutable_collection(DIAGNOSTICS) and not module.is_initializing()


def at_least_float32(x: jax.Array) -> jax.Array:
    """Casts to float32, or leaves float64: the type that statistics are reduced in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def token_mean(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """Returns the mean [D] of x [..., D] over all axes but the last.

    valid [..., 1] weights the tokens, 0 for padding; None: all tokens count.
    """
    axes = tuple(range(x.ndim - 1))
    if valid is None:
        return jnp.mean(x, axes)
    weights = jnp.broadcast_to(valid, (*x.shape[:-1], 1))
    return jnp.sum(x * weights, axes) / jnp.maximum(jnp.sum(weights), 1.0)


def next_key(module: nn.Module, name: str = 'key') -> jax.Array | None:
    """Returns a new random key from the key that `module` stores as `name`; None in evaluation."""
    stored = module.variable(STATS, name, lambda: key_to_int(module.make_rng('params')))
    if not is_training(module):
        return None
    key, next_stored = jax.random.split(key_from_int(stored.value))
    stored.value = key_to_int(next_stored)
    return key


def key_to_int(key: jax.Array) -> jax.Array:
    """Returns a random key as int32 [2], the form in which statistics store it."""
    return jax.lax.bitcast_convert_type(jax.random.key_data(key), jnp.int32)


def key_from_int(bits: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(jax.lax.bitcast_convert_type(bits, jnp.uint32))
