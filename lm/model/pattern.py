"""Blocks over depth: groups of equal blocks, and of the repeated periods of model.pattern."""

import dataclasses
from collections.abc import Iterable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn

from lm.config.recipe import Recipe
from lm.model.block import Block
from lm.model.kernels import kind_kernels
from modules.kernels import Kernels
from modules.placements import Blocks
from modules.sequence import Sequence

BLOCK_NAME = r'block_\d+'  # of the blocks of a period, as `block_name` numbers them


@dataclasses.dataclass(frozen=True)
class Stack:
    """Equal blocks, whose parameters are stacked.

    Attributes:
      path: of their parameters: 'layers', or 'layers/block_2' for the second block of a period.
      recipe: of a model with these blocks alone.
      group: the sublayers of the placement.
      numbers: of the blocks, from 1.
    """

    path: str
    recipe: Recipe
    group: Blocks
    numbers: range

    @property
    def count(self) -> int:
        """Returns the number of blocks."""
        return len(self.numbers)

    def find(self, tree: Mapping[str, Any]) -> Any:
        """Returns the subtree at the path, or an empty dict."""
        for name in self.path.split('/'):
            tree = tree.get(name, {})
        return tree


@dataclasses.dataclass(frozen=True)
class Group:
    """Blocks that are scanned together: a block, or the blocks of a period, several times.

    name: of their parameters. count: of periods. stacks: the blocks of a period, in order.
    """

    name: str
    count: int
    stacks: tuple[Stack, ...]


def block_groups(recipe: Recipe) -> list[Group]:
    """Returns the groups of blocks in order: those of the placement, or of model.pattern.

    The first blocks of a pattern, and those behind its last whole period, are groups of their own.
    A placement with
    several groups has no pattern (`lm.model.check`).
    """
    placement = recipe.placement
    placed = placement.row.blocks(recipe.model.n_layers, **placement.options)
    if not recipe.is_mixed:
        (kind,) = recipe.kinds.values()
        groups, first = [], 1
        for blocks in placed:
            stack = Stack(blocks.name, kind, blocks, range(first, first + blocks.count))
            groups.append(Group(blocks.name, blocks.count, (stack,)))
            first += blocks.count
        return groups
    (blocks,), (period, count, remainder) = placed, recipe.tiles
    names = (f'{blocks.name}_first', blocks.name, f'{blocks.name}_last')
    groups, number = [], 1
    for name, kinds, n in zip(
        names, (recipe.first_layers, period, remainder), (1, count, 1), strict=True
    ):
        if kinds:
            groups.append(_repeat(name, kinds, n, number))
            number += n * len(kinds)
    return groups


def _repeat(name: str, period: tuple[Recipe, ...], count: int, first: int) -> Group:
    """Returns the group that repeats a period.

    Args:
      name: of the group.
      period: the recipes of its blocks.
      count: the number of periods.
      first: the number of the first block.
    """

    def place_blocks(kind: Recipe) -> Blocks:
        placement = kind.placement
        (blocks,) = placement.row.blocks(kind.model.n_layers, **placement.options)
        return blocks._replace(name=name, count=count)

    stop, step = first + count * len(period), len(period)
    stacks = (
        Stack(
            name if step == 1 else f'{name}/{block_name(place)}',
            recipe,
            place_blocks(recipe),
            range(first + place, stop, step),
        )
        for place, recipe in enumerate(period)
    )
    return Group(name, count, tuple(stacks))


def block_name(place: int) -> str:
    """Returns the name of a block in its period, from 'block_1' for place 0."""
    return f'block_{place + 1}'


def block_stacks(recipe: Recipe) -> list[Stack]:
    """Returns the stacks of equal blocks of all groups."""
    return [stack for group in block_groups(recipe) for stack in group.stacks]


def join_stacks(stacks: Iterable[Stack], arrays: Iterable[jax.Array]) -> jax.Array:
    """Joins arrays of stacks, [count, ...] each, into an array over blocks in their order."""
    joined = jnp.concatenate(list(arrays))
    numbers = [number for stack in stacks for number in stack.numbers]
    if numbers == sorted(numbers):
        return joined
    order = sorted(range(len(numbers)), key=numbers.__getitem__)
    return joined[jnp.array(order)]


def take_blocks(stack: Stack, x_L: jax.Array) -> jax.Array:
    """Returns the entries of an array over blocks that belong to a stack."""
    numbers = stack.numbers
    return x_L[numbers.start - 1 : numbers.stop - 1 : numbers.step]


class Period(nn.Module):
    """The blocks of a period of model.pattern, in order.

    The argument `first` is the number of the first block, from 1.
    """

    block: type[nn.Module]
    recipe: Recipe
    kernels: Kernels
    stacks: tuple[Stack, ...]

    @nn.compact
    def __call__(self, streams: Any, first: jax.Array, sequence: Sequence) -> tuple[Any, None]:
        for place, stack in enumerate(self.stacks):
            kernels = kind_kernels(self.recipe, stack.recipe, self.kernels)
            block = self.block(stack.recipe, kernels, stack.group, name=block_name(place))
            streams, _ = block(streams, first + place, sequence)
        return streams, None  # as `Block` returns


def build_body(
    group: Group, recipe: Recipe, kernels: Kernels, block: type[nn.Module] = Block
) -> tuple[type[nn.Module], tuple[Any, ...]]:
    """Returns (module, its fields) of what a group repeats: a block, or a period of blocks.

    Args:
      group: of the model.
      recipe: of the model.
      kernels: of the model.
      block: `Block`, or a version of it that saves memory.
    """
    if len(group.stacks) > 1:
        return Period, (block, recipe, kernels, group.stacks)
    (stack,) = group.stacks
    return block, (stack.recipe, kind_kernels(recipe, stack.recipe, kernels), stack.group)
