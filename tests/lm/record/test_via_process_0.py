"""Equivalence: what process 0 writes and reads for all is what all would have."""

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
CUTS = {  # how an array of 8 x 4 x 6 may lie over the mesh
    'whole': PartitionSpec(),
    'rows': PartitionSpec(('data', 'fsdp')),
    'columns': PartitionSpec(None, 'fsdp'),
}


@pytest.fixture
def state():
    """On a mesh of 2 x 4, with numbers that are easily lost: -0.0, the smallest, none at all."""
    mesh = make_mesh(MeshConfig(data=2, fsdp=4))

    def placed(value, spec=CUTS['whole']):
        return jax.device_put(value, NamedSharding(mesh, spec))

    rng = np.random.default_rng(0)
    whole = rng.normal(size=(8, 4, 6)).astype(np.float32)
    whole.flat[:4] = -0.0, 1e-42, np.inf, np.nan
    params = {name: placed(whole, spec) for name, spec in CUTS.items()}
    moments = jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)
    return State(placed(jnp.int32(3)), params, (), {}, (moments, placed(jnp.uint32(7))))


def shapes_of(state):
    return jax.tree.map(
        lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=x.sharding), state
    )


def assert_same_bits(found, expected):
    for one, other in zip(jax.tree.leaves(found), jax.tree.leaves(expected), strict=True):
        assert one.sharding == other.sharding and one.dtype == other.dtype
        assert np.asarray(one).tobytes() == np.asarray(other).tobytes()


@pytest.mark.default_rows('True-True')
@pytest.mark.parametrize('reads, writes', [(True, False), (False, True), (True, True)])
def test_checkpoints_are_the_same_bit_for_bit(state, reads, writes, tmp_path, monkeypatch):
    """Also where an array goes in parts: here of five rows at most. Catches a -0.0 that is 0.0 when
    it was added to the zeros of other processes.
    """
    monkeypatch.setattr(via_process_0, 'MAX_BYTES', 5 * 4 * 6 * 4)
    monkeypatch.setattr(
        via_process_0.multihost_utils,
        'broadcast_one_to_all',
        lambda rows: rows + np.zeros_like(rows),
    )

    def of(alone):
        return private_disks() if alone else contextlib.nullcontext()

    with of(writes):
        checkpoints = Checkpoints(tmp_path, 1, 1)
        checkpoints.save(state, META, None)
        checkpoints.wait()
        checkpoints.close()
    with of(reads):
        found, meta = Checkpoints(tmp_path, 1, 1).restore(shapes_of(state))
    assert meta['counters'] == META['counters']
    assert_same_bits(found, state)


def test_another_model_is_refused_by_process_0(state, tmp_path):
    with private_disks():
        checkpoints = Checkpoints(tmp_path, 1, 1)
        checkpoints.save(state, META, None)
        checkpoints.close()
        other = state.replace(params={'whole': state.params['whole'][:4]})
        with pytest.raises(TreeMismatch, match='does not fit'):
            checkpoints.restore(shapes_of(other))


def test_no_more_of_an_array_is_whole_on_devices_than_is_sent_at_once(state, monkeypatch):
    """An array whose rows are cut is gathered as a whole: a part of it would be that too."""
    sent = []
    monkeypatch.setattr(via_process_0, 'MAX_BYTES', 2 * 4 * 6 * 4)
    gathered = via_process_0._make_gather
    monkeypatch.setattr(
        via_process_0, '_make_gather', lambda size, mesh: sent.append(size) or gathered(size, mesh)
    )
    found = via_process_0.gather_to_first(state.params)
    assert sent == [2, 2, 2, 2, 8]  # of columns, of rows; what is whole already is only read
    assert all(np.array_equal(one, found['whole'], equal_nan=True) for one in found.values())
