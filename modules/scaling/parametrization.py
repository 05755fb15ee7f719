"""Parametrisations: what follows for a parameter from what it is and how the model has grown."""

import dataclasses
import math

from modules.params import LAYER, ParamSpec


@dataclasses.dataclass(frozen=True)
class Growth:
    """How many times the sizes of the base model a parameter has: in the terms of each of its sums,
    in its outputs, and in the number of blocks.
    """

    fan_in: float = 1.0
    fan_out: float = 1.0
    depth: float = 1.0


def growth_of(
    spec: ParamSpec, shape: tuple[int, ...], base: tuple[int, ...], depth: float = 1.0
) -> Growth:
    """Of a parameter of `shape` that has the shape `base` in the base model."""

    def size(shape, summed):
        sizes = zip(shape, spec.axes, strict=True)
        return math.prod(n for n, a in sizes if a != LAYER and (a in spec.fan_in) == summed)

    fan_in, fan_out = (size(shape, summed) / size(base, summed) for summed in (True, False))
    return Growth(fan_in, fan_out, depth)


@dataclasses.dataclass(frozen=True)
class Scaling:
    """init_std: standard deviation of a stored matrix at the start; None: the value is kept as
    declared. The factors multiply the weight where it is used, its learning rate, its weight decay
    and its optimizer's epsilon.
    """

    init_std: float | None
    forward_factor: float = 1.0
    lr_factor: float = 1.0
    decay_factor: float = 1.0
    eps_factor: float = 1.0


def standard(spec: ParamSpec, shape: tuple[int, ...], growth: Growth, family: str) -> Scaling:
    """std = 1/sqrt(fan_in) for matrices, 1/sqrt(D) for embeddings; one learning rate for all.

    Matrices and embeddings decay; vectors do not, but for those described as decayed. The
    description's init_gain multiplies the standard deviation. Neither the base model nor the
    family of the optimizer matters. Source: the baseline of arXiv:2309.14322, section 2.
    """
    del growth, family
    if spec.role == 'vector':
        return Scaling(init_std=None, decay_factor=float(spec.decayed))
    terms = shape[-1] if spec.role == 'embedding' else spec.fan_in_size(shape)
    return Scaling(init_std=spec.init_gain / math.sqrt(terms))
