"""Contract: which device holds which data, on the eight devices of the tests."""

import dataclasses
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest
from jax.sharding import Mesh, PartitionSpec

from lm.config.fields import MeshConfig
from lm.devices.mesh import (
    RULES,
    batch_parts,
    batch_sharding,
    check_idle_devices,
    make_mesh,
    param_sharding,
    process_share,
    put_batch,
    replicated_sharding,
)
from modules.parallel.axes import ACTIVATIONS, AXES, PARAMETERS, count_axis_shards, shard_activation
from modules.params import ParamSpec
from tests.helpers import tiny_batch


def make_test_mesh(**sizes):
    return make_mesh(MeshConfig(**{'data': 1} | sizes))


def get_shape(mesh):
    """Returns the axes that are longer than 1."""
    return {axis: size for axis, size in mesh.shape.items() if size > 1}


def test_mesh_takes_requested_devices():
    assert get_shape(make_test_mesh(data=-1)) == {'data': 8}
    assert tuple(make_test_mesh(data=-1).axis_names) == AXES
    assert list(make_test_mesh(data=3).devices.flat) == jax.devices()[:3]
    assert get_shape(make_mesh(MeshConfig(data=-1), jax.devices()[:2])) == {'data': 2}


@pytest.mark.parametrize(
    ('sizes', 'shape'),
    [
        ({'fsdp': -1}, {'fsdp': 8}),
        ({'data': -1, 'tensor': 4}, {'data': 2, 'tensor': 4}),
        ({'data': 2, 'fsdp': 2, 'tensor': -1}, {'data': 2, 'fsdp': 2, 'tensor': 2}),
        ({'data': 2, 'context': 4}, {'data': 2, 'context': 4}),
        ({'expert': -1, 'data': 4}, {'data': 4, 'expert': 2}),
    ],
)
def test_open_axis_takes_remaining_devices(sizes, shape):
    mesh = make_test_mesh(**sizes)
    assert get_shape(mesh) == shape
    # Devices of the last axis are neighbours.
    assert [d.id for d in mesh.devices.flat] == list(range(8))


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
def test_run_axis_takes_devices_left_by_data(data, run, runs, shape):
    mesh = make_mesh(MeshConfig(data=data, run=run), runs=runs)
    assert (mesh.shape['run'], mesh.shape['data']) == shape
    assert mesh.size == math.prod(shape)


@pytest.mark.parametrize('axis', ['data', 'fsdp', 'tensor', 'run'])
@pytest.mark.parametrize('size', [0, 9, -2])
def test_invalid_axis_size_is_refused(axis, size):
    with pytest.raises(ValueError, match=rf'mesh\.{axis} must be between 1 and 8, .* got {size}'):
        make_test_mesh(**{axis: size})


@pytest.mark.parametrize(
    ('sizes', 'message'),
    [
        ({'data': 4, 'tensor': 4}, r'needs 16 devices, and .* devices, 8\..*mesh\.data=2\.'),
        ({'data': -1, 'tensor': 3}, r'mesh\.tensor=3 needs 3 devices.*mesh\.tensor=(2|4)\.'),
        ({'data': -1, 'fsdp': -1}, r'one axis of the mesh may be -1.*mesh\.data is -1 by default'),
        ({'tensor': -1, 'fsdp': -1}, r'one axis of the mesh may be -1.*all others to numbers\.$'),
    ],
)
def test_indivisible_axes_are_refused(sizes, message):
    with pytest.raises(ValueError, match=message):
        make_test_mesh(**sizes)


def test_single_run_leaves_no_device_idle():
    config = MeshConfig(data=2, tensor=2)
    with pytest.raises(ValueError, match=r'leaves 4 idle. Set mesh\.data=-1 .* \(here 4\)'):
        check_idle_devices(config, make_mesh(config), 8)
    check_idle_devices(MeshConfig(data=1), make_test_mesh(), 8)
    check_idle_devices(MeshConfig(data=-1), make_test_mesh(data=-1), 8)


def test_data_crosses_slices():
    """Each slice has whole groups of the other axes, so that only `data` uses the slow links."""

    @dataclasses.dataclass(frozen=True)
    class SliceDevice:
        id: int
        slice_index: int
        process_index: int = 0
        platform: str = 'other'
        device_kind: str = 'other'

    devices = [SliceDevice(i, i // 4) for i in range(8)]
    mesh = make_mesh(MeshConfig(data=-1, fsdp=2), devices)
    assert get_shape(mesh) == {'data': 4, 'fsdp': 2}
    by_data = mesh.devices.reshape(4, 2)
    assert [{d.slice_index for d in row} for row in by_data] == [{0}, {0}, {1}, {1}]
    with pytest.raises(
        ValueError, match=r'mesh\.data must be a multiple of the number of slices, 2'
    ):
        make_mesh(MeshConfig(data=1, fsdp=8), devices)


def test_axis_without_a_rule_is_named():
    spec = ParamSpec('hidden', ('embed', 'colour', 'mlp'), ('embed',))
    with pytest.raises(ValueError, match=r"no sharding rule for axes \['colour'\] of ParamSpec"):
        param_sharding(make_test_mesh(data=-1), spec, (8, 8, 8))


@pytest.mark.parametrize(
    ('axes', 'shape', 'over'),
    [
        (('layer', 'embed', 'mlp'), (2, 16, 32), (None, 'fsdp', 'tensor')),
        # The first side is cut over both where it can be, and then the last is whole.
        (('layer', 'mlp', 'embed'), (2, 32, 16), (None, ('tensor', 'fsdp'), None)),
        (('layer', 'heads', 'head_dim', 'embed'), (2, 2, 8, 16), (None, 'tensor', None, 'fsdp')),
        (('vocab', 'embed'), (259, 16), (None, 'fsdp')),  # an odd vocabulary stays whole
        (('expert', 'embed', 'mlp'), (4, 16, 32), (None, 'fsdp', 'tensor')),
        (('layer', 'embed'), (2, 16), ()),  # gains are small
        (('layer', 'basis', 'basis'), (2, 16, 16), (None, 'fsdp', None)),
        (('matrix', 'basis', 'basis'), (4, 16, 16), (('fsdp', 'tensor'), None, None)),
        (('matrix', 'basis', 'basis'), (3, 16, 16), (None, 'fsdp', None)),
    ],
)
def test_parameters_are_sharded_by_their_axes(axes, shape, over):
    """Catches a mesh axis used twice, a length that does not divide, and vectors that are cut."""
    role = 'hidden' if len(set(axes) - {'layer'}) > 1 else 'vector'
    spec = ParamSpec(role, axes, axes[:1] if role == 'hidden' else ())
    sharding = param_sharding(make_test_mesh(data=2, fsdp=2, tensor=2), spec, shape)
    assert sharding.spec == PartitionSpec(*over)
    assert sharding.shard_shape(shape)  # it divides


def test_rules_name_mesh_axes():
    assert RULES is PARAMETERS
    for over in (*PARAMETERS.values(), *ACTIVATIONS.values()):
        assert set(over) <= set(AXES)


def test_activations_are_sharded_by_their_letters():
    mesh = make_test_mesh(data=2, context=2, tensor=2)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert (count_axis_shards('B'), count_axis_shards('T'), count_axis_shards('V')) == (2, 2, 2)
        cut = jax.jit(
            lambda x: shard_activation(x, 'BNTH'), in_shardings=replicated_sharding(mesh)
        )(np.ones((4, 2, 6, 3)))
        odd = jax.jit(lambda x: shard_activation(x, 'BTV'), in_shardings=replicated_sharding(mesh))(
            np.ones((4, 6, 3))
        )
    assert cut.sharding.spec == PartitionSpec('data', 'tensor', 'context')
    assert odd.sharding.spec == PartitionSpec('data', 'context')  # three columns for two devices


def test_row_sharding_adds_no_constraint():
    """Programs of one device, and of rows, do not change."""
    mesh = make_test_mesh(data=-1)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        assert 'sharding' not in str(
            jax.make_jaxpr(lambda x: shard_activation(x, 'BTD'))(np.ones((8, 2, 2)))
        )


@pytest.mark.parametrize('sizes', [{'data': 8}, {'fsdp': 4, 'data': 2}, {'data': 2, 'expert': 4}])
def test_batch_is_cut_by_rows(sizes):
    """Each device holds its own rows, in order. Catches a batch that every device holds whole."""
    mesh, batch = make_test_mesh(**sizes), tiny_batch(rows=16)
    placed = put_batch(mesh, batch)
    assert placed.keys() == batch.keys() and batch_parts(mesh) == 8
    for key, array in placed.items():
        assert array.sharding.is_equivalent_to(batch_sharding(mesh), array.ndim)
        np.testing.assert_array_equal(array, batch[key])
        for i, shard in enumerate(sorted(array.addressable_shards, key=lambda s: s.device.id)):
            np.testing.assert_array_equal(shard.data, batch[key][2 * i : 2 * i + 2])


def test_replicated_array_is_whole_on_all_devices():
    array = jax.device_put(np.arange(3), replicated_sharding(make_test_mesh(data=-1)))
    assert [shard.data.shape for shard in array.addressable_shards] == [(3,)] * 8


@pytest.mark.parametrize(
    ('sizes', 'shares'),
    [
        ({'data': 8}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ({'data': 4, 'tensor': 2}, [(0, 4), (1, 4), (2, 4), (3, 4)]),
        ({'data': 2, 'tensor': 4}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
        ({'tensor': 8}, [(0, 1)] * 4),
        ({'data': 2, 'context': 2, 'tensor': 2}, [(0, 2), (0, 2), (1, 2), (1, 2)]),
    ],
)
def test_hosts_read_rows_for_their_devices(sizes, shares):
    """Four hosts of two devices each. Catches hosts that read a share each although the devices of
    several hosts hold the same rows.
    """
    hosts = [SimpleNamespace(process_index=i // 2, id=i) for i in range(8)]
    mesh = make_test_mesh(**sizes)
    host_mesh = SimpleNamespace(
        devices=np.array(hosts, object).reshape(mesh.devices.shape), shape=mesh.shape
    )
    assert [process_share(host_mesh, i) for i in range(4)] == shares


def test_hosts_with_separated_rows_are_refused():
    devices = np.array([SimpleNamespace(process_index=i % 2) for i in range(8)], object)
    mesh = SimpleNamespace(
        devices=devices.reshape(1, 8, 1, 1, 1, 1), shape=make_test_mesh(data=8).shape
    )
    with pytest.raises(ValueError, match=r'host 1 holds parts .* must be adjacent'):
        process_share(mesh, 1)


def test_mesh_with_other_axes_is_supported():
    """Tests of kernels make such meshes."""
    mesh = Mesh(np.array(jax.devices()).reshape(2, 4), ('run', 'data'))
    spec = ParamSpec('hidden', ('embed', 'mlp'), ('embed',))
    assert param_sharding(mesh, spec, (8, 8)).spec == PartitionSpec(None, None)
