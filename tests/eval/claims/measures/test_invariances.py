"""Reference: changes of norms against their formulas in numpy."""

import numpy as np
import pytest

from eval.claims.measures.invariances import (
    CHANGES,
    NAMES,
    NORMALIZERS,
    draw_inputs,
    gradient_times_scale,
    relative_difference,
)


def normalize_rows(name, a_BO):
    if name == 'layernorm':
        a_BO = a_BO - a_BO.mean(-1, keepdims=True)
    return a_BO / np.sqrt(np.mean(a_BO**2, -1, keepdims=True))


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.parametrize('change', CHANGES)
def test_change_matches_formula(name, change):
    key, *before = draw_inputs(11)
    after = CHANGES[change](key, *before)
    first, last = (
        normalize_rows(name, np.float64(x_BI) @ np.float64(w_IO)) for w_IO, x_BI in (before, after)
    )
    expected = np.linalg.norm(last - first) / np.linalg.norm(first)
    np.testing.assert_allclose(
        relative_difference(NORMALIZERS[name], CHANGES[change], 11), expected, rtol=1e-3, atol=1e-5
    )


def test_changes_are_not_identity():
    """None is the identity, which all norms would hide."""
    key, w_IO, x_BI = draw_inputs(2)
    for change in CHANGES.values():
        new_w_IO, new_x_BI = change(key, w_IO, x_BI)
        assert not np.allclose(new_x_BI @ new_w_IO, x_BI @ w_IO, rtol=0.1)


def test_gradient_without_norm_is_constant():
    # without a norm it stays
    np.testing.assert_allclose(gradient_times_scale(lambda a_BO: a_BO, 1), 10.0, rtol=1e-5)
