"""Interventions: arrays in Linen collections that scale, shift or replace an activation.

A layer passes an activation through `intervene`. Without these collections it adds no operation,
so that training and evaluation are unchanged; with them, other values need no new program.
"""

import jax
import jax.numpy as jnp
from flax import linen as nn

GAINS = 'gains'  # multiply the activation
SHIFTS = 'shifts'  # are added to it, so that their gradient is the activation's
SETS = 'sets'  # (mask, values): replace it where the mask is true
COLLECTIONS = (GAINS, SHIFTS, SETS)
OPERATIONS = SCALE, ADD, REPLACE, ZERO = 'scale', 'add', 'replace', 'zero'
INNER = 'inner_activations'  # the activations within sublayers, recorded if mutable
HEADS, HIDDEN = 'heads', 'hidden'  # outputs of heads [B, T, N, H], hidden units [B, T, F]


def intervene(module: nn.Module, name: str, x: jax.Array) -> jax.Array:
    """Returns `where(mask, values, gain x + shift)`, from the collections that have the name.

    Args:
      module: the module whose collections hold the arrays.
      name: of the activation.
      x: the activation; arrays broadcast to its shape.
    """
    if module.has_variable(GAINS, name):
        x = x * module.get_variable(GAINS, name).astype(x.dtype)
    if module.has_variable(SHIFTS, name):
        x = x + module.get_variable(SHIFTS, name)
    if module.has_variable(SETS, name):
        mask, values = module.get_variable(SETS, name)
        x = jnp.where(mask, values.astype(x.dtype), x)
    return x


def intervene_within(module: nn.Module, name: str, x: jax.Array) -> jax.Array:
    """Returns `intervene`, and records the result in INNER if that is mutable.

    Args:
      module: the module whose collections hold the arrays.
      name: of the activation.
      x: the activation.
    """
    if module.is_initializing():
        return x
    x = intervene(module, name, x)
    if module.is_mutable_collection(INNER):
        module.put_variable(INNER, name, x)
    return x
