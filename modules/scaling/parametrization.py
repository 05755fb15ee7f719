"""Parametrisations."""

import dataclasses
import math

from modules.params import ParamSpec


@dataclasses.dataclass(frozen=True)
class Scaling:
    """init_std: standard deviation of a drawn matrix; None: the value is kept as declared.
    lr_factor and decay_factor multiply the learning rate and the weight decay of this parameter.
    """

    init_std: float | None
    lr_factor: float
    decay_factor: float


def standard(spec: ParamSpec, shape: tuple[int, ...]) -> Scaling:
    """std = 1/sqrt(fan_in) for matrices, 1/sqrt(D) for embeddings; one learning rate for all.

    Matrices and embeddings decay; vectors do not, but for those described as decayed. The
    description's init_gain multiplies the standard deviation. Source: the baseline of
    arXiv:2309.14322, section 2.
    """
    if spec.role == 'vector':
        return Scaling(init_std=None, lr_factor=1.0, decay_factor=float(spec.decayed))
    terms = shape[-1] if spec.role == 'embedding' else spec.fan_in_size(shape)
    std = spec.init_gain / math.sqrt(terms)
    return Scaling(init_std=std, lr_factor=1.0, decay_factor=1.0)
