"""Property: any changed bit of an array shows in its digest; how it lies over a mesh does not.
Equivalence: small arrays have on the host the digest that a device computes.
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
def where(request, monkeypatch):
    """Small arrays are taken by the host, or by the devices as large ones are."""
    if request.param == 'devices':
        monkeypatch.setattr(digests, 'SMALL_BYTES', -1)
    return request.param


@pytest.mark.parametrize('dtype', DTYPES)
def test_every_bit_counts(where, dtype):
    clean = array(dtype)
    (wanted,) = digests.hash_arrays(clean)
    rng = np.random.default_rng(1)
    bits = 1 if dtype == 'bool' else 8
    for byte in (0, clean.nbytes - 1, *rng.integers(clean.nbytes, size=20)):
        flipped = clean.copy()
        flipped.reshape(-1).view(np.uint8)[byte] ^= 1 << rng.integers(bits)
        assert digests.hash_arrays(flipped) != [wanted], byte


@pytest.mark.parametrize('shape', [(), (0,), (7,), (5, 3), (520, 3)])
@pytest.mark.parametrize('dtype', DTYPES)
def test_the_host_computes_what_devices_do(dtype, shape, monkeypatch):
    """Catches another order of words, and words of another width."""
    values = jnp.asarray(np.random.default_rng(0).normal(size=shape) * 100).astype(dtype)
    on_host = digests.hash_arrays(values)
    monkeypatch.setattr(digests, '_sums_on_host', lambda x: pytest.fail('by the host'))
    monkeypatch.setattr(digests, 'SMALL_BYTES', -1)
    assert digests.hash_arrays(values) == on_host


def test_the_host_takes_words_of_eight_bytes_in_halves(monkeypatch):
    with jax.enable_x64(True):
        values = np.random.default_rng(0).normal(size=(4, 3))
        on_host = digests.hash_arrays(values)
        monkeypatch.setattr(digests, 'SMALL_BYTES', -1)
        assert digests.hash_arrays(values) == on_host


def test_order_and_place_count(where):
    x = array()
    assert digests.hash_arrays(x) != digests.hash_arrays(x[::-1])
    assert digests.hash_arrays(x) != digests.hash_arrays(x.T.copy())
    swapped = x.copy()
    swapped[3, 5], swapped[7, 11] = x[7, 11], x[3, 5]
    assert digests.hash_arrays(x) != digests.hash_arrays(swapped)


def test_signed_zeros_and_nans_are_told_apart(where):
    zeros = [np.float32([0.0]), np.float32([-0.0])]
    nans = [np.uint32([0x7FC00000]).view(np.float32), np.uint32([0x7FC00001]).view(np.float32)]
    assert len(set(digests.hash_arrays([*zeros, *nans]))) == 4


@pytest.mark.parametrize('shape', [(16, 24), (520, 8)])  # 256 rows and fewer one by one
@pytest.mark.parametrize('cut', [('a', None), (None, 'a'), (None, None)])
def test_the_mesh_does_not_matter(where, cut, shape):
    """Nor that an array on one device is taken some rows at a time, with a row that is left."""
    mesh, whole = Mesh(np.array(jax.devices()), ('a',)), array(shape=shape)
    laid_out = jax.device_put(whole, NamedSharding(mesh, PartitionSpec(*cut)))
    assert digests.hash_arrays(laid_out) == digests.hash_arrays(whole)


def test_what_a_checkpoint_once_stored_is_still_its_digest(where):
    """Stored in checkpoints: another formula would take all of them for damaged."""
    tree = {'a': np.arange(6, dtype=np.float32).reshape(2, 3), 'b': np.int32(3)}
    assert digests.hash_arrays(tree) == ['349bad64374dcba9', '53f1e9ddee71f942']


def test_a_changed_leaf_is_named():
    stored = digests.hash_arrays({'mlp': {'up': array(), 'down': array()}})
    changed = {'mlp': {'up': array() * 2, 'down': array()}}
    with pytest.raises(digests.DamagedCheckpoint, match=r"\['mlp'\]\['up'\] of there"):
        digests.check_arrays(stored, changed, 'there')
    with pytest.raises(digests.DamagedCheckpoint, match='holds 1 arrays, with 2 digests'):
        digests.check_arrays(stored, {'up': array()}, 'there')
    digests.check_arrays(stored, {'mlp': {'up': array(), 'down': array()}}, 'there')


def test_records_compare_whatever_the_order_of_their_keys():
    assert digests.hash_record({'a': 1, 'b': 2.5}) == digests.hash_record({'b': 2.5, 'a': 1})
    assert digests.hash_record({'a': 1}) != digests.hash_record({'a': 2})
