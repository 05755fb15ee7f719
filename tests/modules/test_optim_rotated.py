"""SOAP, Conda, ARO and Shampoo: optimizers in rotated coordinates."""

import functools

import jax
import jax.numpy as jnp
import pytest

from modules.optim.aro import aro
from modules.optim.conda import conda
from modules.optim.soap import soap
from tests.modules.optim_trajectories import assert_follows, trajectory

SOAP_CASES = [
    ('square every 1', 'square', {'soap_every': 1}),
    ('square every 10', 'square', {'soap_every': 10}),
    ('wide', 'wide', {'soap_every': 3, 'soap_max_dim': 4}),
    ('tall', 'tall', {'soap_every': 3, 'soap_max_dim': 4}),
    ('tall', 'tall', {'soap_every': 3, 'soap_sides': 'smaller'}),
]
CONDA_CASES = [
    ('square', 'square', {'conda_every': 10}),
    ('wide', 'wide', {'conda_every': 10}),
    ('tall', 'tall', {'conda_every': 10}),
    ('once', 'wide', {}),
    ('every', 'tall', {'conda_every': 1, 'conda_scale': 1.0}),
]

ARO_CASES = [
    ('sink', 'wide', {}),
    ('sink square', 'square', {}),
    ('row', 'wide', {'aro_map': 'row'}),
    ('sign', 'wide', {'aro_map': 'sign'}),
]


class TestSoap:
    @pytest.mark.parametrize(('case', 'shape', 'given'), SOAP_CASES)
    def test_follows_the_authors_code(self, case, shape, given):
        """To 1e-7 in float64. Reference. Catches bases used too early, a second moment that is not
        put in order, and a correction that counts the first call.
        """
        with jax.enable_x64(True):
            make = functools.partial(soap, **given)
            found = trajectory(make, shape, 0.1, dtype=jnp.float64)
        assert_follows(found, 'make_soap', case, shape, rtol=1e-7)


class TestConda:
    @pytest.mark.parametrize(('case', 'shape', 'given'), CONDA_CASES)
    def test_follows_the_authors_code(self, case, shape, given):
        """To 1e-7 in float64. Reference. Catches the wrong side, vectors in rows, and singular
        vectors of the moment of before the gradient.
        """
        with jax.enable_x64(True):
            make = functools.partial(conda, **given)
            found = trajectory(make, shape, 0.1, dtype=jnp.float64)
        assert_follows(found, 'make_conda', case, shape, rtol=1e-7)


class TestAro:
    @pytest.mark.parametrize(('case', 'shape', 'given'), ARO_CASES)
    def test_follows_the_authors_code(self, case, shape, given):
        """To 1e-7 in float64. Reference. Catches a direction in the last rotation, and rows and
        columns in the other order.
        """
        with jax.enable_x64(True):
            make = functools.partial(aro, aro_scale=1.0, **given)
            found = trajectory(make, shape, 0.1, dtype=jnp.float64)
        assert_follows(found, 'make_aro', case, shape, rtol=1e-7)
