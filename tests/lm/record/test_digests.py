"""Property: any changed bit of an array changes its digest; the array's sharding does not.

Equivalence: the host and the devices compute the same digests.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from lm.record import digests

DTYPES = ('float32', 'bfloat16', 'float16', 'int32', 'uint8', 'bool')


def array(dtype='float32', shape=(16, 24)):
    values = np.random.default_rng(0).normal(size=shape) * 100
    return np.asarray(jnp.asarray(values).astype(dtype))


@pytest.fixture(params=['host', 'devices'])
def platform(request, monkeypatch):
    """Computes digests of small arrays on the host, or on devices like those of large arrays."""
    if request.param == 'devices':
        monkeypatch.setattr(digests, 'SMALL_BYTES', -1)
    return request.param


@pytest.mark.parametrize('dtype', DTYPES)
def test_every_bit_changes_digest(platform, dtype):
    clean = array(dtype)
    (digest,) = digests.hash_arrays(clean)
    rng = np.random.default_rng(1)
    bits = 1 if dtype == 'bool' else 8
    for byte in (0, clean.nbytes - 1, *rng.integers(clean.nbytes, size=20)):
        flipped = clean.copy()
        flipped.reshape(-1).view(np.uint8)[byte] ^= 1 << rng.integers(bits)
        assert digests.hash_arrays(flipped) != [digest], byte


@pytest.mark.parametrize('shape', [(), (0,), (7,), (5, 3), (520, 3)])
@pytest.mark.parametrize('dtype', DTYPES)
def test_host_and_device_digests_agree(dtype, shape, monkeypatch):
    """Catches another order of words, and words of another width."""
    values = jnp.asarray(np.random.default_rng(0).normal(size=shape) * 100).astype(dtype)
    on_host = digests.hash_arrays(values)
    monkeypatch.setattr(digests, '_sums_on_host', lambda x: pytest.fail('by the host'))
    monkeypatch.setattr(digests, 'SMALL_BYTES', -1)
    assert digests.hash_arrays(values) == on_host


def test_host_splits_eight_byte_elements(monkeypatch):
    with jax.enable_x64(True):
        values = np.random.default_rng(0).normal(size=(4, 3))
        on_host = digests.hash_arrays(values)
        monkeypatch.setattr(digests, 'SMALL_BYTES', -1)
        assert digests.hash_arrays(values) == on_host


def test_order_and_position_change_digest(platform):
    x = array()
    assert digests.hash_arrays(x) != digests.hash_arrays(x[::-1])
    assert digests.hash_arrays(x) != digests.hash_arrays(x.T.copy())
    swapped = x.copy()
    swapped[3, 5], swapped[7, 11] = x[7, 11], x[3, 5]
    assert digests.hash_arrays(x) != digests.hash_arrays(swapped)


def test_signed_zeros_and_nans_have_other_digests(platform):
    zeros = [np.float32([0.0]), np.float32([-0.0])]
    nans = [np.uint32([0x7FC00000]).view(np.float32), np.uint32([0x7FC00001]).view(np.float32)]
    assert len(set(digests.hash_arrays([*zeros, *nans]))) == 4


@pytest.mark.parametrize('shape', [(16, 24), (520, 8)])  # 256 rows and fewer one by one
@pytest.mark.parametrize('spec', [('a', None), (None, 'a'), (None, None)])
def test_mesh_does_not_change_digest(platform, spec, shape):
    """Slicing does not change it either: an array on one device is processed some rows at a time,
    with a rest.
    """
    mesh, whole = Mesh(np.array(jax.devices()), ('a',)), array(shape=shape)
    sharded = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*spec)))
    assert digests.hash_arrays(sharded) == digests.hash_arrays(whole)


def test_old_digests_are_unchanged(platform):
    """These digests are in checkpoints: with another formula all of them would count as damaged."""
    tree = {'a': np.arange(6, dtype=np.float32).reshape(2, 3), 'b': np.int32(3)}
    assert digests.hash_arrays(tree) == ['349bad64374dcba9', '53f1e9ddee71f942']


def test_error_names_changed_leaf():
    stored = digests.hash_arrays({'mlp': {'up': array(), 'down': array()}})
    changed = {'mlp': {'up': array() * 2, 'down': array()}}
    with pytest.raises(digests.DamagedCheckpoint, match=r"\['mlp'\]\['up'\] of there"):
        digests.check_arrays(stored, changed, 'there')
    with pytest.raises(digests.DamagedCheckpoint, match='has 1 arrays, but 2 digests'):
        digests.check_arrays(stored, {'up': array()}, 'there')
    digests.check_arrays(stored, {'mlp': {'up': array(), 'down': array()}}, 'there')


def test_key_order_does_not_change_digest():
    assert digests.hash_record({'a': 1, 'b': 2.5}) == digests.hash_record({'b': 2.5, 'a': 1})
    assert digests.hash_record({'a': 1}) != digests.hash_record({'a': 2})
