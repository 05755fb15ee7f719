"""Reference: GaLore, Fira and APOLLO against trajectories of their authors' code. Property: what is
kept of a matrix, subspaces, factors and the limit on growth.
"""

import functools
import importlib
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.optim import state_specs, unboxed
from modules.optim.apollo import apollo
from modules.optim.galore import fira, galore
from modules.optim.low_rank import limited, singular_basis
from modules.params import ParamSpec, named_leaves
from tests.fixtures.optim import make_galore
from tests.helpers import FAST
from tests.modules.optim_trajectories import MATRIX, assert_follows, trajectory

FIXED = {'rank': make_galore.RANK, 'projection_every': make_galore.EVERY}
MINI = {'rank': 1, 'apollo_factors': 'tensor', 'apollo_scale': 128.0}
ROWS = {
    'galore': functools.partial(galore, **FIXED),
    'fira': functools.partial(fira, **FIXED),
    'apollo': functools.partial(apollo, **FIXED),
    'apollo mini': functools.partial(apollo, **FIXED | MINI),
}


@pytest.fixture
def fixed_projections(monkeypatch):
    """APOLLO's random numbers are those that the stored trajectories were made with."""

    def projection(number, period, shape, dtype):
        del number
        *_, rows, rank = shape
        each = [make_galore.normal(rows, rank, p) for p in range(3)]
        return jnp.asarray(np.stack(each), dtype)[period] / math.sqrt(rank)

    module = importlib.import_module('modules.optim.apollo')  # the package has a row of its name
    monkeypatch.setattr(module, 'random_projection', projection)


@pytest.mark.parametrize('shape', make_galore.SHAPES)
@pytest.mark.parametrize('name', ROWS)
def test_follows_the_published_code(fixed_projections, name, shape):
    """50 steps over three projections, in float32. Catches a projection of the longer side, another
    moment of refresh, turned moments, an epsilon under the bias correction, a limit after it.
    """
    assert_follows(
        trajectory(ROWS[name], shape, make_galore.LR), 'make_galore', f'{name} {shape}', shape
    )
