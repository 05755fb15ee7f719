"""GaLore and Fira: Adam in the subspace of the gradient's largest singular vectors."""

import sys
from typing import Annotated, Any

import optax

from modules.optim.adamw import B1, B2, Eps
from modules.optim.base import of_family, per_parameter, when
from modules.optim.low_rank import (
    GrowthLimit,
    ProjectionEvery,
    Rank,
    as_parameter,
    bias_factor,
    empty_basis,
    empty_moments,
    empty_norm,
    limited,
    norm_ratio,
    short_side_first,
    singular_basis,
    uncorrected_adam,
)
from modules.optim.rotations import turned, turned_back
from modules.options import Option

GaloreScale = Annotated[
    float, Option('factor of the update within the subspace', 0, sys.float_info.max, traced=True)
]


@of_family('adam', roles=('hidden',))
def galore(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-6,
    rank: Rank = 128,
    projection_every: ProjectionEvery = 200,
    galore_scale: GaloreScale = 0.25,
) -> optax.GradientTransformation:
    """galore_scale P Adam(P^T G), P the first singular vectors of G (arXiv:2403.03507).

    P [K, r] belongs to the shorter side of the matrix and is computed again from the gradient of
    every `projection_every`-th update, the first one included; the moments [r, N] are not turned
    with it.
    As jiaweizzhao/GaLore, whose bias correction leaves eps out; rank and scale are those of its
    60M-parameter model of width 512. With model.reparam=weight_norm, projection_every=250 and
    optim.others=adamw this is GradNormLoRP (arXiv:2412.19616), projected on one side as in its
    code: the gradient of the direction is projected, and the gain of each output has Adam. That
    code overwrites the gains, and leaves the gradient's part along the direction in it.
    """

    def init(spec, weight):
        return empty_moments(spec, weight, rank) | {'basis': empty_basis(spec, weight, rank)}

    def update(spec, grad, kept, weight, count):
        del weight
        basis, low = _into_subspace(
            short_side_first(spec, grad), kept['basis'], count, projection_every
        )
        adam, moments = uncorrected_adam(low, kept, b1, b2, eps)
        found = (
            galore_scale
            * bias_factor(b1, b2, count, grad.dtype)
            * turned_back(adam, {'left': basis})
        )
        return as_parameter(spec, found, grad), moments | {'basis': basis}

    return per_parameter(specs, init, update)


@of_family('adam', roles=('hidden',))
def fira(
    specs: Any,
    *,
    b1: B1 = 0.9,
    b2: B2 = 0.999,
    eps: Eps = 1e-6,
    rank: Rank = 128,
    projection_every: ProjectionEvery = 200,
    galore_scale: GaloreScale = 0.25,
    growth_limit: GrowthLimit = 1.01,
) -> optax.GradientTransformation:
    """GaLore's update + S, S = f (G - galore_scale P R), limited (arXiv:2410.01623).

    R = P^T G is the projected gradient and f = |Adam(R)| / |R|, a number for each of the N indices
    of the longer side. The norm of S grows at most `growth_limit`-fold from one update to the next.
    As xichen-fy/Fira; the paper has G - P R, all that GaLore leaves out, where its code has the
    scale in it too. In the code f and the limit precede Adam's bias correction, and so here.
    """

    def init(spec, weight):
        return empty_moments(spec, weight, rank) | {
            'basis': empty_basis(spec, weight, rank),
            'norm': empty_norm(spec, weight),
        }

    def update(spec, grad, kept, weight, count):
        del weight
        g = short_side_first(spec, grad)
        basis, low = _into_subspace(g, kept['basis'], count, projection_every)
        adam, moments = uncorrected_adam(low, kept, b1, b2, eps)
        rest = g - galore_scale * turned_back(low, {'left': basis})
        rest, norm = limited(norm_ratio(adam, low, -2) * rest, kept['norm'], growth_limit)
        found = bias_factor(b1, b2, count, grad.dtype) * (
            galore_scale * turned_back(adam, {'left': basis}) + rest
        )
        return as_parameter(spec, found, grad), moments | {'basis': basis, 'norm': norm}

    return per_parameter(specs, init, update)


def _into_subspace(g, basis, count, every):
    """(basis [..., K, r], the gradient g [..., K, N] in it)."""
    rank, due = basis.shape[-1], (count - 1) % every == 0
    basis = when(due, lambda: singular_basis(g, rank), basis)
    return basis, turned(g, {'left': basis})
