"""What a parametrisation knows of a parameter, and what it says of it."""

import dataclasses
import math

from modules.params import LAYER, NORM, ParamSpec

OF_WIDTH = ('embed', 'head_dim', 'heads', 'kv_heads', 'mlp', 'qk_features')


@dataclasses.dataclass(frozen=True)
class Growth:
    """How many times the sizes of the base model a parameter has, in the terms of each of its sums
    and in its outputs; and how many times as many blocks, and as wide a stream, the model has.
    """

    fan_in: float = 1.0
    fan_out: float = 1.0
    depth: float = 1.0
    width: float = 1.0


def growth_of(
    spec: ParamSpec,
    shape: tuple[int, ...],
    base: tuple[int, ...],
    depth: float = 1.0,
    width: float = 1.0,
) -> Growth:
    """Of a parameter of `shape` that has the shape `base` in the base model."""
    fan_in, fan_out = (
        own / old for own, old in zip(sizes(spec, shape), sizes(spec, base), strict=True)
    )
    return Growth(fan_in, fan_out, depth, width)


def sizes(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[int, int]:
    """(terms of each sum, the rest of the entries of one layer)."""

    def size(summed):
        named = zip(shape, spec.axes, strict=True)
        return math.prod(n for n, a in named if a != LAYER and (a in spec.fan_in) == summed)

    return size(True), size(False)


def of_one_channel(spec: ParamSpec, shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape that a parameter has in a model of one channel: its sizes that go with the width
    are 1.
    """
    named = zip(shape, spec.axes, strict=True)
    return tuple(1 if axis in OF_WIDTH else n for n, axis in named)


@dataclasses.dataclass(frozen=True)
class Factors:
    """What a parametrisation multiplies: the weight where it is used, the deviation it is drawn
    with (that of the base model's parameter, or, with `init_of_own_size`, that of this one), its
    learning rate, its weight decay where the decay rule asks, and its optimizer's epsilon.
    """

    forward: float = 1.0
    init: float = 1.0
    lr: float = 1.0
    decay: float = 1.0
    eps: float = 1.0
    init_of_own_size: bool = False


@dataclasses.dataclass(frozen=True)
class Scaling:
    """init_std: standard deviation of a stored matrix at the start; None: the value is kept as
    declared. The factors multiply the weight where it is used, its learning rate, its weight decay
    (0: there is none) and its optimizer's epsilon.
    """

    init_std: float | None
    forward_factor: float = 1.0
    lr_factor: float = 1.0
    decay_factor: float = 1.0
    eps_factor: float = 1.0


def in_blocks(spec: ParamSpec) -> bool:
    return LAYER in spec.axes


def writes_to_stream(spec: ParamSpec) -> bool:
    """Whether it is the last matrix of attention or of an MLP, or the bias behind it."""
    if spec.part == NORM or spec.axes[-1:] != ('embed',) or not in_blocks(spec):
        return False
    return spec.role == 'vector' or (spec.role == 'hidden' and 'embed' not in spec.fan_in)
