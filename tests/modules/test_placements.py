"""Reference: each placement is the equation in its docstring."""

import jax.numpy as jnp
import numpy as np
import pytest

from modules.placements import PLACEMENTS

X = np.float32([1.0, 2.0, 4.0])
# F(x) = 3 x + 1; norm_in halves, norm_out divides by 8: exact, and no two of them commute.
NORMS = {'norm_in': lambda x: x / 2, 'norm_out': lambda x: x / 8}
WANTED = {  # value, the norms made, whether the stream is normalized before the readout
    'peri': (X + (3 * X / 2 + 1) / 8, ['norm_in', 'norm_out'], True),
    'post': ((X + 3 * X + 1) / 8, ['norm_out'], False),
    'pre': (X + 3 * X / 2 + 1, ['norm_in'], True),
}


def test_every_placement_has_its_equation():
    assert WANTED.keys() == PLACEMENTS.keys()


@pytest.mark.parametrize('name', PLACEMENTS)
def test_placement_is_its_equation(name):
    made, calls = [], []

    def norm(norm_name):
        made.append(norm_name)
        return NORMS[norm_name]

    def sublayer(x):
        calls.append(x)
        return 3 * x + 1

    value, norms, final_norm = WANTED[name]
    np.testing.assert_array_equal(PLACEMENTS[name].place(jnp.asarray(X), sublayer, norm), value)
    assert sorted(made) == norms
    assert len(calls) == 1
    assert PLACEMENTS[name].final_norm == final_norm
