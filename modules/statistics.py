"""What a layer carries from step to step that no gradient trains: two Linen collections.

STATS is measured in the forward pass: running means, counts, keys. A layer is in training while it
may change them and in evaluation otherwise, so that no flag has to be handed down. BACKWARD_STATS
is measured in the backward pass: a layer reads such a statistic through a `custom_vjp`, which
returns its next value in the place of its gradient; the step stores it instead of following it.

With microbatches each of them is one update, in order. Computing a block again under remat is none:
only what the forward pass returns, and what the backward pass returns, is kept.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

STATS = 'stats'
BACKWARD_STATS = 'bwd_stats'
AUXILIARY = 'auxiliary_losses'  # what layers add to the objective, sown as scalars
DIAGNOSTICS = 'diagnostics'  # what layers record of themselves where somebody asks


def is_training(module: nn.Module) -> bool:
    return module.is_mutable_collection(STATS) and not module.is_initializing()


def is_recording(module: nn.Module) -> bool:
    """Whether somebody asks for DIAGNOSTICS: otherwise nothing of them is even traced."""
    return module.is_mutable_collection(DIAGNOSTICS) and not module.is_initializing()


def at_least_float32(x: jax.Array) -> jax.Array:
    """float32, or float64 where x is: the type that statistics are reduced in."""
    return x.astype(jnp.promote_types(x.dtype, jnp.float32))


def token_mean(x: jax.Array, valid: jax.Array | None) -> jax.Array:
    """[D]: the mean of x [..., D] over all axes but the last.

    valid [..., 1] weights the tokens, 0 for those that do not count; None: all do.
    """
    axes = tuple(range(x.ndim - 1))
    if valid is None:
        return jnp.mean(x, axes)
    weights = jnp.broadcast_to(valid, (*x.shape[:-1], 1))
    return jnp.sum(x * weights, axes) / jnp.maximum(jnp.sum(weights), 1.0)


def next_key(module: nn.Module, name: str = 'key') -> jax.Array | None:
    """The key that `module` draws by now and then no more, of those it carries as `name`; None in
    evaluation.
    """
    carried = module.variable(STATS, name, lambda: as_int(module.make_rng('params')))
    if not is_training(module):
        return None
    now, later = jax.random.split(as_key(carried.value))
    carried.value = as_int(later)
    return now


def as_int(key: jax.Array) -> jax.Array:
    """A random key as int32 [2], to be stored with the other statistics."""
    return jax.lax.bitcast_convert_type(jax.random.key_data(key), jnp.int32)


def as_key(data: jax.Array) -> jax.Array:
    return jax.random.wrap_key_data(jax.lax.bitcast_convert_type(data, jnp.uint32))
