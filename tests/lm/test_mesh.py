"""Contract: which device holds what, on the eight devices of the tests."""

import jax
import numpy as np
import pytest

from lm.mesh import RULES, batch_sharding, make_mesh, param_sharding, put_batch, replicated
from lm.sections import MeshConfig
from modules.params import ParamSpec
from tests.helpers import tiny_batch


def test_mesh_takes_the_devices_asked_for():
    assert make_mesh(MeshConfig(data=-1)).shape == {'run': 1, 'data': 8}
    mesh = make_mesh(MeshConfig(data=3))
    assert list(mesh.devices.flat) == jax.devices()[:3]
    assert make_mesh(MeshConfig(data=-1), jax.devices()[:2]).shape == {'run': 1, 'data': 2}


@pytest.mark.parametrize(
    ('data', 'run', 'runs', 'shape'),
    [
        (-1, -1, 8, (8, 1)),
        (-1, -1, 100, (8, 1)),
        (-1, -1, 3, (2, 4)),  # 3 does not divide 8
        (-1, 2, 8, (2, 4)),
        (2, -1, 16, (4, 2)),
        (3, -1, 16, (2, 3)),  # two devices are left over
        (8, -1, 16, (1, 8)),
    ],
)
def test_runs_lie_over_the_devices_that_data_leaves(data, run, runs, shape):
    mesh = make_mesh(MeshConfig(data=data, run=run), runs=runs)
    assert tuple(mesh.shape.items()) == (('run', shape[0]), ('data', shape[1]))


@pytest.mark.parametrize('data', [0, 9, -2])
def test_mesh_that_devices_cannot_fill(data):
    with pytest.raises(ValueError, match=f'between 1 and the 8 devices .* got {data}'):
        make_mesh(MeshConfig(data=data))


def test_axis_without_a_rule_is_named():
    mesh = make_mesh(MeshConfig(data=-1))
    spec = ParamSpec('hidden', ('embed', 'colour', 'mlp'), ('embed',))
    with pytest.raises(ValueError, match=r"no sharding rule for axes \['colour'\] of ParamSpec"):
        param_sharding(mesh, spec)


def test_parameter_sharding_follows_the_rules():
    """One mesh axis, or none, for each dimension, in order."""
    mesh = make_mesh(MeshConfig(data=-1))
    spec = ParamSpec('hidden', tuple(RULES), ('embed',))
    assert tuple(param_sharding(mesh, spec).spec) == tuple(RULES.values())
    assert set(RULES.values()) <= {None, *mesh.axis_names}


def test_batch_is_cut_by_rows():
    """Each device holds its own rows, in order; catches a batch that every device holds whole."""
    mesh, batch = make_mesh(MeshConfig(data=-1)), tiny_batch(rows=16)
    placed = put_batch(mesh, batch)
    assert placed.keys() == batch.keys()
    for key, array in placed.items():
        assert array.sharding.is_equivalent_to(batch_sharding(mesh), array.ndim)
        np.testing.assert_array_equal(array, batch[key])
        for i, shard in enumerate(sorted(array.addressable_shards, key=lambda s: s.device.id)):
            np.testing.assert_array_equal(shard.data, batch[key][2 * i : 2 * i + 2])


def test_replicated_is_whole_everywhere():
    mesh = make_mesh(MeshConfig(data=-1))
    array = jax.device_put(np.arange(3), replicated(mesh))
    assert [shard.data.shape for shard in array.addressable_shards] == [(3,)] * 8
