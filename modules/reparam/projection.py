"""Projection of weights onto what they were at the start."""

from typing import Any

import jax
import jax.numpy as jnp

from modules.params import ParamSpec, as_matrices
from modules.reparam.base import LEAST_NORM, Reparam, reparam_row
from modules.reparam.matrices import Roles, known_roles, on_matrices, per_matrix


def frobenius_norm(spec: ParamSpec, weight: jax.Array) -> jax.Array:
    """[...]: of each matrix of a parameter; float32."""
    return jnp.sqrt(jnp.sum(jnp.square(as_matrices(spec, weight)), (-2, -1)))


@reparam_row(least_init_scale=LEAST_NORM, maps_after_update=True, check=known_roles)
def normalize_and_project(specs: Any, shapes: Any, *, roles: Roles = 'hidden') -> Reparam:
    """W <- W ||W_0||_F / ||W||_F after each optimizer step, for every matrix.

    Carries ||W_0||_F of each matrix; what the optimizer carries stays as it is. The norms that the
    method asks for before each nonlinearity are those of the model (`model.norm`, `model.qk_norm`);
    their gains are not projected. Weight decay does next to nothing to a projected matrix, so that
    its effective learning rate is that of the schedule alone. Source: arXiv:2407.01800.
    """
    del shapes

    def init(spec, weight):
        return weight, frobenius_norm(spec, weight)

    def after_update(spec, weight, start):
        return weight * per_matrix(start / frobenius_norm(spec, weight), spec), start

    return on_matrices(
        roles, specs, init, lambda spec, weight, start: (weight, start), after_update=after_update
    )
