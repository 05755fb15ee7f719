"""Blocks of a model one by one: the model without some of them, and each as a function alone."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.model.transformer import ACTIVE, STATE, Block, block_groups
from lm.training.state import Learner
from modules.sequence import Sequence, packed_rows, whole_rows


def select_blocks(
    learner: Learner, variables: dict[str, Any], active_L: jax.Array
) -> dict[str, Any]:
    """Returns variables of the model without the blocks at which `kept_L` is False.

    The others keep their numbers, and with them what depends on depth. A block that is gone is
    computed all the same, and its result not used: one program serves all choices.
    """
    found, start = {}, 0
    for group in block_groups(learner.recipe):
        found[group.name] = {ACTIVE: active_L[start : start + group.count]}
        start += group.count
    return variables | {ACTIVE: found}


class BlockFunction(NamedTuple):
    """A block: apply(own, number, streams, sequence) -> streams; blocks of a group share apply."""

    apply: Callable[..., Any]
    variables: dict[str, Any]  # its variables
    number: jax.Array  # from 1


def iterate_blocks(learner: Learner, variables: dict[str, Any]) -> Iterator[BlockFunction]:
    """Yields the blocks in order, scanned in the model or not."""
    first = 1
    for group in block_groups(learner.recipe):
        module = Block(learner.recipe, learner.model.kernels, group)
        stacked = {
            name: variables[name][group.name]
            for name in STATE
            if group.name in variables.get(name, {})
        }

        def apply(block_variables, number, streams, sequence, module=module):
            return module.apply(block_variables, streams, number, sequence)[0]

        apply = jax.jit(apply)
        for i in range(group.count):
            own = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
            yield BlockFunction(apply, own, jnp.float32(first + i))
        first += group.count


def make_sequence(learner: Learner, segments_BT: jax.Array) -> Sequence:
    """Returns the Sequence of rows of a split as training and evaluation read them."""
    masks = learner.recipe.data.mask_documents
    sequence = packed_rows(segments_BT) if masks else whole_rows(segments_BT.shape[1])
    return sequence.replace(valid_BT=(segments_BT > 0).astype(jnp.float32))
