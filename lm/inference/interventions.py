"""Interventions on activations: scale, add, replace or zero, as arrays that a program takes."""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from lm.config.recipe import Recipe
from lm.model.block import AFTER_ATTENTION, AFTER_MLP, EMBEDDING, FINAL
from lm.model.pattern import block_stacks, take_blocks
from modules.interventions import (
    ADD,
    GAINS,
    HEADS,
    HIDDEN,
    OPERATIONS,
    REPLACE,
    SCALE,
    SETS,
    SHIFTS,
    ZERO,
)

# {site: the axes of its activation behind the layer, and the submodule of a block that has it}.
SITES: Mapping[str, tuple[str, str]] = {
    EMBEDDING: ('BTD', ''),
    AFTER_ATTENTION: ('BTD', ''),
    AFTER_MLP: ('BTD', ''),
    HEADS: ('BTNH', 'attention'),
    HIDDEN: ('BTF', 'mlp'),
    FINAL: ('BTD', ''),
}
OUTSIDE = (EMBEDDING, FINAL)  # sites that no block has


@dataclasses.dataclass(frozen=True)
class Intervention:
    """A change of an activation in the forward pass.

    The site `heads` are the outputs of attention heads before the output matrix, and `hidden` the
    hidden units of MLPs; the others are the residual stream.
    """

    site: str  #: a row of SITES: embedding, after_attention, after_mlp, heads, hidden or final
    operation: str  #: scale, add, replace or zero
    #: A number, or an array that broadcasts to the activation [B, T, ...], with the selected layers
    #: in front if it has an axis more; not used by `zero`.
    value: Any = None
    #: Blocks, from 0 as in arrays [L, ...]; None: all. `embedding` and `final` have none.
    layers: int | Sequence[int] | None = None
    rows: int | Sequence[int] | None = None  #: indices of rows; None: all
    positions: int | Sequence[int] | None = None  #: indices of tokens in a row; None: all
    heads: int | Sequence[int] | None = None  #: indices of heads; None: all
    features: int | Sequence[int] | None = None  #: indices along the last axis; None: all

    def __post_init__(self) -> None:
        """Raises ValueError for an unknown site or operation, and for what the site lacks."""
        if self.site not in SITES:
            raise ValueError(f'site must be one of {", ".join(SITES)}; got {self.site!r}')
        if self.operation not in OPERATIONS:
            raise ValueError(
                f'operation must be one of {", ".join(OPERATIONS)}; got {self.operation!r}'
            )
        if (self.value is None) != (self.operation == ZERO):
            needs = 'takes no value' if self.operation == ZERO else 'needs a value'
            raise ValueError(f'the operation {self.operation} {needs}; got {self.value!r}')
        if self.layers is not None and self.site in OUTSIDE:
            raise ValueError(f'the site {self.site} is in no block; leave layers out')
        if self.heads is not None and self.site != HEADS:
            raise ValueError(f'heads are selected at the site {HEADS}; got {self.site}')


def build_collections(
    recipe: Recipe, interventions: Sequence[Intervention], shape: tuple[int, int] | None
) -> dict[str, Any]:
    """Returns the collections that carry out interventions, in their order.

    Their structure and shapes depend on sites, operations and selections, and not on values, so
    that a compiled program serves every value.

    Args:
      recipe: of the model.
      interventions: the changes.
      shape: (B, T) of the tokens; None: the changes may not select rows or positions, and their
        values may have neither, as in generation.

    Raises:
      ValueError: for an index out of range, a value of another shape, or hidden units of experts.
    """
    collections: dict[str, Any] = {}
    for site in dict.fromkeys(intervention.site for intervention in interventions):
        changes = [change for change in interventions if change.site == site]
        for collection, array in _compose(recipe, site, changes, shape).items():
            tree = collections.setdefault(collection, {})
            if site in OUTSIDE:
                tree[site] = array
            else:
                _place_blocks(recipe, site, tree, array)
    return collections


def _compose(
    recipe: Recipe,
    site: str,
    changes: Sequence[Intervention],
    shape: tuple[int, int] | None,
) -> dict[str, Any]:
    """Returns {collection: array or (mask, values)} of all changes of a site.

    `x <- where(m, v, g x + s)`, with the layer in front of the arrays of blocks.
    """
    sizes = _axis_sizes(recipe, site, shape)
    gain, shift, values = np.ones(1, np.float32), np.zeros(1, np.float32), np.zeros(1, np.float32)
    mask = np.zeros(1, bool)
    for change in changes:
        selected = _select(change, sizes)
        value = 0.0 if change.operation == ZERO else _align(change, sizes)
        if change.operation == SCALE:
            gain, shift, values = (np.where(selected, value * y, y) for y in (gain, shift, values))
        elif change.operation == ADD:
            shift, values = (np.where(selected, y + value, y) for y in (shift, values))
        else:
            values, mask = np.where(selected, value, values), mask | selected
    operations = {change.operation for change in changes}
    arrays = {}
    if SCALE in operations:
        arrays[GAINS] = gain
    if ADD in operations:
        arrays[SHIFTS] = shift
    if operations & {REPLACE, ZERO}:
        arrays[SETS] = mask, values

    def finish(array):
        array = array.reshape((1,) * (len(sizes) - array.ndim) + array.shape)
        if site in OUTSIDE:
            return jnp.asarray(array)
        return jnp.asarray(np.broadcast_to(array, (sizes['L'], *array.shape[1:])))

    return {
        name: tuple(map(finish, a)) if isinstance(a, tuple) else finish(a)
        for name, a in arrays.items()
    }


def _head_sizes(kind: Recipe) -> tuple[int, int]:
    """Returns the number of heads of a kind of block, and the width of their outputs."""
    layer = kind.attention
    heads, width = layer.row.mixed_sizes(kind.model.n_heads, kind.head_dim, **layer.options)
    return heads, width * layer.options.get('expand_value', 1)


def _axis_sizes(recipe: Recipe, site: str, shape: tuple[int, int] | None) -> dict[str, int]:
    """Returns {axis: length} of the activation of a site, layers first; 0: not known."""
    rows, positions = shape or (0, 0)
    sizes = {_head_sizes(kind) for kind in recipe.kinds.values()}
    if site == HEADS and len(sizes) > 1:
        raise ValueError(
            'blocks have heads of different widths or numbers (such as attention.expand_value). '
            f'Choose the site {AFTER_ATTENTION}.'
        )
    n_heads, head_width = max(sizes)
    lengths = {
        'B': rows,
        'T': positions,
        'D': recipe.stream_width,
        'N': n_heads,
        'H': head_width,
        'F': recipe.model.d_ff,
    }
    if site == HIDDEN and any('n_experts' in kind.mlp.options for kind in recipe.kinds.values()):
        raise ValueError(
            'the hidden units of experts belong to other tokens in each batch. Choose the site '
            f'{AFTER_MLP}, or a model with model.mlp=dense.'
        )
    layer = {} if site in OUTSIDE else {'L': recipe.model.n_layers}
    return layer | {axis: lengths[axis] for axis in SITES[site][0]}


def _select(change: Intervention, sizes: Mapping[str, int]) -> np.ndarray:
    """Returns a mask that broadcasts to the activation, true where the change applies."""
    selections = {
        'L': change.layers,
        'B': change.rows,
        'T': change.positions,
        'N': change.heads,
        [*sizes][-1]: change.features,
    }
    mask = np.ones((1,) * len(sizes), bool)
    for place, (axis, length) in enumerate(sizes.items()):
        indices = selections.get(axis)
        if indices is None:
            continue
        if not length:
            raise ValueError(
                f'{change}: rows and positions cannot be selected here, because their number is '
                'not known. Leave them out, or use Checkpoint.logits.'
            )
        indices = np.atleast_1d(indices)
        if indices.size == 0 or indices.min() < 0 or indices.max() >= length:
            raise ValueError(
                f'{change}: indices must be from 0 to {length - 1}; got {indices.tolist()}'
            )
        chosen = np.zeros(length, bool)
        chosen[indices] = True
        mask = mask & chosen.reshape(*(length if i == place else 1 for i in range(len(sizes))))
    return mask


def _align(change: Intervention, sizes: Mapping[str, int]) -> np.ndarray:
    """Returns the value with an axis for each of the activation's, layers included."""
    value = np.asarray(change.value, np.float32)
    lengths = [*sizes.values()]
    if 'L' in sizes and value.ndim == len(sizes) and change.layers is not None:
        chosen = np.atleast_1d(change.layers)
        if len(value) == len(chosen) != lengths[0]:  # values of the selected layers alone
            spread = np.zeros((lengths[0], *value.shape[1:]), np.float32)
            spread[chosen] = value
            value = spread
    shape = (1,) * (len(sizes) - value.ndim) + value.shape
    fits = len(shape) == len(lengths) and all(
        n == 1 or n == length for n, length in zip(shape, lengths, strict=True)
    )
    if not fits:
        axes = ', '.join(f'{axis}={length or "?"}' for axis, length in sizes.items())
        raise ValueError(
            f'the value at {change.site} must broadcast to [{axes}]; got {list(value.shape)}'
        )
    return value.reshape(shape)


def _place_blocks(recipe: Recipe, site: str, tree: dict[str, Any], array: Any) -> None:
    """Adds the arrays [L, ...] of a site to a collection, by stack of blocks."""
    for stack in block_stacks(recipe):
        subtree = tree
        for name in filter(None, (*stack.path.split('/'), SITES[site][1])):
            subtree = subtree.setdefault(name, {})
        if isinstance(array, tuple):
            subtree[site] = tuple(take_blocks(stack, part) for part in array)
        else:
            subtree[site] = take_blocks(stack, array)
