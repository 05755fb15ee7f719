"""A parameter is described once, where it is created.

A layer calls `self.param(name, declare(init, role, axes, fan_in), shape)`. The description travels
in a Flax metadata box through `nn.scan`, which adds the `layer` axis, and `split` takes it off
after init. Parametrisation, weight decay, optimizer, sharding and reparametrisation all read this
record.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import struct
from flax.core import meta

ROLES = ('embedding', 'hidden', 'readout', 'vector')
LAYER = 'layer'  # the axis along which nn.scan stacks parameters
NORM = 'norm'  # the part of the model that train.trainable can pick out


@dataclasses.dataclass(frozen=True)
class ParamSpec:
    """What a parameter is.

    role: how it scales: `embedding` (rows looked up), `hidden` (both sides grow with width),
      `readout` (width in, vocabulary out), `vector` (gains, biases, scalars).
    axes: a logical name for each dimension, such as ('layer', 'embed', 'mlp').
    fan_in: those of `axes` that the forward pass sums over; empty for embeddings and vectors.
    part: `norm` for all that belongs to a norm, '' otherwise.
    init_gain: a factor of the standard deviation it is drawn with, for methods that ask for one.
    decayed: whether a vector decays all the same; matrices and embeddings always do.
    """

    role: str
    axes: tuple[str, ...]
    fan_in: tuple[str, ...] = ()
    part: str = ''
    init_gain: float = 1.0
    decayed: bool = False

    def __post_init__(self):
        if self.role not in ROLES:
            raise ValueError(f'role must be one of {", ".join(ROLES)}; got {self.role!r}')
        unknown = set(self.fan_in) - set(self.axes)
        if unknown:
            raise ValueError(f'fan_in names axes {sorted(unknown)} that are not in {self.axes}')

    def without(self, axis: str) -> 'ParamSpec':
        """The same of one slice along `axis`."""
        return dataclasses.replace(self, axes=tuple(a for a in self.axes if a != axis))

    def fan_in_size(self, shape: tuple[int, ...]) -> int:
        """The number of terms in each sum of the forward pass."""
        return math.prod(n for n, axis in zip(shape, self.axes, strict=True) if axis in self.fan_in)


class Described(struct.PyTreeNode, meta.AxisMetadata):
    """A parameter in its box; `nn.scan` calls `add_axis` when it stacks layers."""

    value: Any
    spec: ParamSpec = struct.field(pytree_node=False)

    def unbox(self):
        return self.value

    def replace_boxed(self, val):
        return self.replace(value=val)

    def add_axis(self, index, params):
        axes = (*self.spec.axes[:index], LAYER, *self.spec.axes[index:])
        return self.replace(spec=dataclasses.replace(self.spec, axes=axes))

    def remove_axis(self, index, params):
        axes = (*self.spec.axes[:index], *self.spec.axes[index + 1 :])
        return self.replace(spec=dataclasses.replace(self.spec, axes=axes))


def declare(
    init: Callable[..., jax.Array],
    role: str,
    axes: tuple[str, ...],
    fan_in: tuple[str, ...] = (),
    **more: Any,
) -> Callable[..., Described]:
    """An initializer whose value carries ParamSpec(role, axes, fan_in, **more).

    `init(key, shape, dtype)` draws at unit scale; the parametrisation multiplies matrices by their
    standard deviation afterwards (`modules.scaling`), so that no layer decides its own.
    """
    spec = ParamSpec(role, tuple(axes), tuple(fan_in), **more)

    def initializer(key, shape, dtype=jnp.float32):
        if len(shape) != len(spec.axes):
            raise ValueError(f'axes {spec.axes} must name each dimension of shape {tuple(shape)}')
        return Described(init(key, shape, dtype), spec)

    return initializer


def split(described: Any) -> tuple[Any, Any]:
    """(params, specs): two parallel plain dict trees. ValueError for an undescribed parameter."""

    def check(path, leaf):
        if not isinstance(leaf, Described):
            raise ValueError(
                f'parameter {path_name(path)} was created without `declare`; '
                'its role and axes are unknown, so nothing can scale, decay or shard it'
            )
        return leaf

    def is_box(leaf):
        return isinstance(leaf, Described)

    jax.tree_util.tree_map_with_path(check, described, is_leaf=is_box)
    params = jax.tree.map(lambda box: box.value, described, is_leaf=is_box)
    specs = jax.tree.map(lambda box: box.spec, described, is_leaf=is_box)
    return params, specs


def matrix_axes(spec: ParamSpec) -> tuple[tuple[int, ...], tuple[int, ...], tuple[int, ...]]:
    """The dimensions of a parameter that are (batch, rows, columns) of matrices.

    Rows are those that the forward pass sums over, or that are looked up in an embedding. Those
    before them (layer, expert) make matrices of their own. ValueError for a vector.
    """
    rows = spec.fan_in or (spec.axes[-2:-1] if spec.role == 'embedding' else ())
    if not rows:
        raise ValueError(f'{spec} is no matrix: nothing is summed over')
    summed = tuple(i for i, axis in enumerate(spec.axes) if axis in rows)
    others = tuple(i for i in range(len(spec.axes)) if i not in summed)
    batch = tuple(i for i in others if i < summed[0])
    return batch, summed, others[len(batch) :]


def batch_axes(spec: ParamSpec) -> tuple[int, ...]:
    """The dimensions along which matrices, or vectors, lie that are each one of its own."""
    if spec.role == 'vector':
        return tuple(i for i, axis in enumerate(spec.axes) if axis == LAYER)
    return matrix_axes(spec)[0]


def root_mean_square(spec: ParamSpec, x: jax.Array) -> jax.Array:
    """sqrt(mean(x^2)) of each matrix or vector of a parameter, of size 1 along their own axes."""
    axes = tuple(i for i in range(x.ndim) if i not in batch_axes(spec))
    return jnp.sqrt(jnp.mean(jnp.square(x), axes, keepdims=True))


def as_matrices(spec: ParamSpec, weight: jax.Array) -> jax.Array:
    """[..., I, O]: the matrices of a parameter, one for each index of its batch axes.

    The weights are y = x W with x [I]. Queries, keys and values are parameters of their own.
    """
    batch, rows, columns = matrix_axes(spec)
    sizes = [math.prod(weight.shape[i] for i in axes) for axes in (rows, columns)]
    in_order = jnp.transpose(weight, (*batch, *rows, *columns))
    return in_order.reshape(*(weight.shape[i] for i in batch), *sizes)


def from_matrices(spec: ParamSpec, matrices: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The parameter of `shape` whose `as_matrices` these are."""
    order = [axis for axes in matrix_axes(spec) for axis in axes]
    in_order = matrices.reshape([shape[i] for i in order])
    return jnp.transpose(in_order, [order.index(i) for i in range(len(shape))])


def path_name(path: tuple[Any, ...]) -> str:
    """'blocks/attention/query' for a tree path."""
    return jax.tree_util.keystr(path, simple=True, separator='/')


def named_leaves(tree: Any) -> dict[str, Any]:
    """{'blocks/attention/query': leaf, ...}; a ParamSpec counts as a leaf."""
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {path_name(path): leaf for path, leaf in leaves}
