"""Equivalence: process 0 writes and reads for all processes what each would write and read."""

import contextlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import NamedSharding, PartitionSpec

from lm.config.fields import MeshConfig
from lm.devices.mesh import make_mesh
from lm.launch.distributed import private_disks
from lm.record import via_process_0
from lm.record.checkpoint import TreeMismatch
from lm.record.checkpoints import Checkpoints
from lm.training.state import State

META = {'config': {}, 'counters': {'best': {}}}
SPECS = {  # how an array of 8 x 4 x 6 may lie over the mesh
    'whole': PartitionSpec(),
    'rows': PartitionSpec(('data', 'fsdp')),
    'columns': PartitionSpec(None, 'fsdp'),
}


@pytest.fixture
def state():
    """Returns a state on a 2 x 4 mesh, with fragile numbers: -0.0, a denormal, infinity and NaN."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))

    def place(value, spec=SPECS['whole']):
        return jax.device_put(value, NamedSharding(mesh, spec))

    rng = np.random.default_rng(0)
    whole = rng.normal(size=(8, 4, 6)).astype(np.float32)
    whole.flat[:4] = -0.0, 1e-42, np.inf, np.nan
    params = {name: place(whole, spec) for name, spec in SPECS.items()}
    moments = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return State(place(jnp.int32(3)), params, (), {}, (moments, place(jnp.uint32(7))))


def make_shapes(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same_bits(actual, expected):
    for array, expected_array in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        assert array.sharding == expected_array.sharding and array.dtype == expected_array.dtype
        assert np.asarray(array).tobytes() == np.asarray(expected_array).tobytes()


@pytest.mark.default_rows('True-True')
@pytest.mark.parametrize('reads, writes', [(True, False), (False, True), (True, True)])
def test_checkpoints_are_equal_bit_for_bit(state, reads, writes, tmp_path, monkeypatch):
    """Arrays are moved in parts of at most five rows here. Catches a -0.0 that becomes 0.0 when
    zeros of other processes are added.
    """
    monkeypatch.setattr(via_process_0, 'MAX_BYTES', 5 * 4 * 6 * 4)
    monkeypatch.setattr(
        via_process_0.multihost_utils,
        'broadcast_one_to_all',
        lambda rows: rows + np.zeros_like(rows),
    )

    def disks(is_private):
        return private_disks() if is_private else contextlib.nullcontext()

    with disks(writes):
        checkpoints = Checkpoints(tmp_path, 1, 1)
        checkpoints.save(state, META, None)
        checkpoints.wait()
        checkpoints.close()
    with disks(reads):
        restored, meta = Checkpoints(tmp_path, 1, 1).restore(make_shapes(state))
    assert meta['counters'] == META['counters']
    assert_same_bits(restored, state)


def test_process_0_refuses_other_model(state, tmp_path):
    with private_disks():
        checkpoints = Checkpoints(tmp_path, 1, 1)
        checkpoints.save(state, META, None)
        checkpoints.close()
        other_state = state.replace(params={'whole': state.params['whole'][:4]})
        with pytest.raises(TreeMismatch, match='does not fit'):
            checkpoints.restore(make_shapes(other_state))


def test_devices_hold_one_array_part_at_a_time(state, monkeypatch):
    """An array with sharded rows is gathered as a whole, as a part of it would be too."""
    sizes = []
    monkeypatch.setattr(via_process_0, 'MAX_BYTES', 2 * 4 * 6 * 4)
    make_gather = via_process_0._make_gather
    monkeypatch.setattr(
        via_process_0,
        '_make_gather',
        lambda size, mesh: sizes.append(size) or make_gather(size, mesh),
    )
    arrays = via_process_0.gather_to_first(state.params)
    assert sizes == [2, 2, 2, 2, 8]  # of columns, of rows; what is whole already is only read
    assert all(np.array_equal(array, arrays['whole'], equal_nan=True) for array in arrays.values())
