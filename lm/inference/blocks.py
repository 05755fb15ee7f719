"""Blocks of a model: the model without some of them, and each block as a function."""

from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from lm.model.block import ACTIVE, STATE, Block, carries_values
from lm.model.kernels import kind_kernels
from lm.model.pattern import block_stacks, take_blocks
from lm.training.state import Learner
from modules.sequence import Sequence, packed_rows, whole_rows


def select_blocks(
    learner: Learner, variables: dict[str, Any], active_L: jax.Array
) -> dict[str, Any]:
    """Returns variables that make the model skip the blocks with a False in `active_L`.

    The other blocks keep their numbers, and with them everything that depends on depth. A skipped
    block is still computed and its result discarded, so that one program serves every choice.

    Args:
      learner: the learner.
      variables: as `learner.variables` gives them.
      active_L: bool, for each block.

    Returns:
      The variables, with the collection ACTIVE.
    """
    active: dict[str, Any] = {}
    for stack in block_stacks(learner.recipe):
        tree = active
        for name in stack.path.split('/'):
            tree = tree.setdefault(name, {})
        tree[ACTIVE] = take_blocks(stack, active_L)
    return variables | {ACTIVE: active}


class BlockFunction(NamedTuple):
    """A block as a function: apply(variables, number, streams, sequence) -> streams.

    Equal blocks share `apply`, which compiles once for them.
    """

    apply: Callable[..., Any]
    variables: dict[str, Any]
    number: jax.Array  #: from 1


def iterate_blocks(learner: Learner, variables: dict[str, Any]) -> Iterator[BlockFunction]:
    """Yields the blocks in order, whether or not the model scans them.

    Raises ValueError if blocks pass on more than the streams of a placement.
    """
    recipe, numbered = learner.recipe, {}
    options = recipe.attention.options
    carriers = ['attention.value_residual'] if carries_values(recipe) else []
    carriers += ['attention.value_embeddings'] if options.get('value_embeddings') else []
    if not recipe.stream.row.is_plain:
        carriers.append(str(recipe.stream))
    if carriers:
        raise ValueError(
            'a block is a function of the residual stream alone only without '
            f'{" and ".join(carriers)}, with which it also reads outputs of other layers or tables'
        )
    for stack in block_stacks(recipe):
        kernels = kind_kernels(recipe, stack.recipe, learner.model.kernels)
        module = Block(stack.recipe, kernels, stack.group)
        stacked = {
            name: subtree for name in STATE if (subtree := stack.find(variables.get(name, {})))
        }

        def apply_block(block_variables, number, streams, sequence, module=module):
            return module.apply(block_variables, streams, number, sequence)[0]

        jitted = jax.jit(apply_block)
        numbered |= {number: (jitted, stacked, i) for i, number in enumerate(stack.numbers)}
    for number in sorted(numbered):
        jitted, stacked, i = numbered[number]
        block_variables = jax.tree.map(lambda leaf, i=i: leaf[i], stacked)
        yield BlockFunction(jitted, block_variables, jnp.float32(number))


def make_sequence(learner: Learner, segments_BT: jax.Array) -> Sequence:
    """Returns the Sequence of rows of a split, as training and evaluation read them."""
    masks = learner.recipe.data.mask_documents
    sequence = packed_rows(segments_BT) if masks else whole_rows(segments_BT.shape[1])
    return sequence.replace(valid_BT=(segments_BT > 0).astype(jnp.float32))
