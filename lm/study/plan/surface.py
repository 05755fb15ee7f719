"""Loss over several tuned fields: a quadratic surface through all values tried near its minimum.

Lines along one field at a time do not see how two fields depend on each other, and each uses only
its own few runs. The surface uses all runs and the interaction: on simulated losses of two fields
(tests/bench/tuning) it leaves half of the regret of lines.
"""

import itertools
from collections.abc import Mapping, Sequence

import numpy as np

from lm.study.plan.curve import PER_OCTAVE, mean_loss

REACH = 2  # the fit includes values up to so many steps from the start, in each field
RIDGE = 1e-9  # keeps the normal equations regular if points do not determine a coefficient
INTERACTION_RIDGE = 0.1  # the same for products of fields, which few points determine well
MIN_CURVATURE = 0.2  # share of the largest entry; flatter surfaces are not followed


def find_minimum(
    losses: Mapping[tuple[int, ...], Sequence[float]], start: Sequence[int], steps: Sequence[int]
) -> tuple[int, ...] | None:
    """Returns the minimum of the surface near `start`, at most a step from it in each field.

        loss(z) = c + b z + z A z,    z = (k - start) / PER_OCTAVE, by least squares over seeds

    Args:
      losses: losses at each place, by seed; all finite.
      start: the place to look around.
      steps: distance between tried values, in each field.

    Returns:
      The place; None if the points determine no convex surface.
    """
    places, fields = sorted(losses), len(start)
    z_PF = (np.array(places) - start) / PER_OCTAVE
    near_P = np.all(np.abs(z_PF) <= REACH * np.array(steps) / PER_OCTAVE + 1e-9, 1)
    near_places = [place for place, is_near in zip(places, near_P, strict=True) if is_near]
    z_PF = z_PF[near_P]
    pairs = list(itertools.combinations(range(fields), 2))
    is_curved = all(len({*z_PF[:, i]}) >= 3 for i in range(fields))
    if not is_curved or len(near_places) < 2 + 2 * fields:
        return None
    y_P = np.array([mean_loss(losses[place]) for place in near_places])
    n_P = np.array([len(losses[place]) for place in near_places])
    products_P2 = np.stack([z_PF[:, i] * z_PF[:, j] for i, j in pairs], 1)
    x_PC = np.concatenate([np.ones((len(near_places), 1)), z_PF, z_PF**2, products_P2], 1)
    ridge_C = np.full(x_PC.shape[1], RIDGE)
    ridge_C[1 + 2 * fields :] = INTERACTION_RIDGE
    coefficient_C = np.linalg.solve(x_PC.T * n_P @ x_PC + np.diag(ridge_C), x_PC.T * n_P @ y_P)
    slope_F, square_F, product_2 = np.split(coefficient_C[1:], [fields, 2 * fields])
    hessian_FF = np.diag(2 * square_F)
    for (i, j), product in zip(pairs, product_2, strict=True):
        hessian_FF[i, j] = hessian_FF[j, i] = product
    if np.min(np.linalg.eigvalsh(hessian_FF)) <= MIN_CURVATURE * np.max(np.abs(hessian_FF)):
        return None
    shift_F = np.linalg.solve(hessian_FF, -slope_F) * PER_OCTAVE
    shift_F = np.clip(np.rint(shift_F), -np.array(steps), steps).astype(int)
    return tuple(int(k) + int(shift) for k, shift in zip(start, shift_F, strict=True))
