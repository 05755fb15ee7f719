"""Equivalence: what is computed on each device for its own part is what one device computes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from lm.config.fields import MeshConfig
from lm.devices.mesh import make_mesh, replicated_sharding, trace_on_mesh
from modules.attention.softmax import visible_mean
from modules.embedding import look_up_rows
from modules.kernels.attention.base import Scores, reference
from modules.kernels.attention.blocked import blocked_attention
from modules.kernels.rms_norm import RMS_NORM_KERNELS
from modules.optim.matrices import from_whole_matrices, whole_matrices
from modules.optim.muon import newton_schulz
from modules.parallel.axes import shard_matrices, shard_parameter, shards_parameters
from modules.parallel.kernel_calls import PARTS, map_shards, row_letters
from modules.params import ParamSpec
from modules.sequence import packed_rows

RNG = np.random.default_rng(0)


def mesh_of(**sizes):
    return make_mesh(MeshConfig(**{'data': 1} | sizes))


def on(mesh, function, *arrays):
    program = jax.jit(
        trace_on_mesh(mesh, function),
        in_shardings=replicated_sharding(mesh),
        keep_unused=True,
    )
    return program(*arrays)


def drawn(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def shapes_seen(mesh, letters, *arrays):
    """Of each array, on one device."""
    seen = []

    def compute(*own):
        seen.extend(x.shape for x in own)
        return own[0]

    found = on(mesh, lambda *given: map_shards(compute, given, letters, letters[0]), *arrays)
    np.testing.assert_array_equal(found, arrays[0])
    return seen


def test_letters_say_how_arrays_are_cut():
    mesh = mesh_of(data=2, context=2, tensor=2)
    q, mask, scale = drawn(4, 2, 6, 3), drawn(4, 1, 6, 3), drawn(3)
    assert shapes_seen(mesh, ('BNT', 'BNT', None), q, mask, scale) == [
        (2, 1, 3, 3),
        (2, 1, 3, 3),  # one for all heads: whole
        (3,),
    ]
    assert row_letters(q) == 'BNT' and row_letters(q[0]) == 'BT' and row_letters(q[0, 0]) == 'M'


@pytest.mark.parametrize(
    ('k_heads', 'own'), [(2, (1, 1)), (1, (1, 1)), (3, (4, 3))], ids=['cut', 'one', 'odd']
)
def test_heads_and_their_keys_are_cut_together_or_not_at_all(k_heads, own):
    """Catches query heads that meet the key heads of others: an odd number of these cuts none."""
    n_heads = 4 if k_heads == 3 else 2
    mesh = mesh_of(data=4, tensor=2)
    q, k = drawn(4, n_heads, 5), drawn(4, k_heads, 5)
    assert [shape[1] for shape in shapes_seen(mesh, ('BN', 'BK'), q, k)] == [*own]


def test_parts_of_sums_are_put_together():
    """Over all axes that rows are cut over, and no others."""
    mesh, x = mesh_of(data=2, context=2, tensor=2), drawn(4, 6, 3)
    total = on(
        mesh,
        lambda x: map_shards(lambda own: jnp.sum(own, (0, 1))[None], (x,), ('BT',), PARTS),
        x,
    )
    assert total.shape == (4, 3)
    np.testing.assert_allclose(np.sum(total, 0), np.sum(x, (0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('shape', [(4, 6, 16), (4, 2, 6, 16)])
def test_rms_norm_of_cut_tokens_and_heads(shape):
    """With the gradient of the scale, which is a sum over all devices."""
    mesh, x, scale, g = (
        mesh_of(data=2, context=2, tensor=2),
        drawn(*shape),
        drawn(16),
        drawn(*shape),
    )

    def gradients(kernel, x, scale):
        def loss(x, scale):
            return jnp.sum(kernel(x, scale, 1e-5) * g)

        return jax.grad(loss, (0, 1))(x, scale)

    kernel, plain = (RMS_NORM_KERNELS[name].for_platform('tpu') for name in ('pallas', 'reference'))
    with pltpu.force_tpu_interpret_mode():
        found = on(mesh, lambda *given: gradients(kernel, *given), x, scale)
    for ours, right in zip(found, gradients(plain, x, scale), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize('sizes', [{'data': 2, 'context': 2, 'tensor': 2}, {'context': 8}])
@pytest.mark.parametrize('window', [None, 5])
def test_means_of_values_in_cut_rows(sizes, window):
    """With gradients, of documents and windows that cross devices. Catches the tokens of another
    device, and sums that begin again at each.
    """
    v, g = drawn(4, 2, 24, 8), drawn(4, 2, 24, 8)
    segments = np.sort(RNG.integers(0, 3, (4, 24)).astype(np.int32), 1)

    def mean_and_gradient(v, is_full):
        sequence = packed_rows(segments)
        mean, pull = jax.vjp(lambda v: visible_mean(v, sequence, window, is_full), v)
        return mean, *pull(jnp.asarray(g))

    for is_full in (np.bool_(False), np.bool_(True)):
        found = on(mesh_of(**sizes), mean_and_gradient, v, is_full)
        right = jax.jit(mean_and_gradient)(v, is_full)
        for ours, wanted in zip(found, right, strict=True):
            np.testing.assert_allclose(ours, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.default_rows('sinks-sizes0')
@pytest.mark.parametrize(
    'sizes',
    [
        {'context': 2, 'tensor': 4},
        pytest.param({'data': 2, 'context': 4}, marks=pytest.mark.full),
        pytest.param({'data': 4, 'tensor': 2}, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize('more', ['', 'window', 'sinks', 'bias', 'prefix'])
def test_attention_of_cut_rows_and_heads(sizes, more):
    """Each device its queries, by their places in the row, with documents that cross devices; keys
    of two heads for four, which four devices do not divide. With gradients.
    """
    q, g = drawn(4, 4, 24, 8), drawn(4, 4, 24, 8)
    k, v = drawn(4, 2, 24, 8), drawn(4, 2, 24, 8)
    segments = np.sort(RNG.integers(0, 3, (4, 24)).astype(np.int32), 1)
    scores, arrays = Scores(), {}
    if more == 'window':
        scores = Scores(window=7)
    elif more == 'sinks':
        scores, arrays = Scores(sinks=True), {'sinks_N': drawn(4)}
    elif more == 'bias':
        scores, arrays = Scores(key_bias=True), {'key_bias_BKS': drawn(4, 2, 24)}
    elif more == 'prefix':
        number = np.where(np.arange(24)[None] < 9, 1, 0).astype(np.int32)
        scores, arrays = Scores(prefix=True), {'prefix_BT': np.repeat(number, 4, 0)}
    floats = {name: x for name, x in arrays.items() if x.dtype == np.float32}

    def gradients(kernel, q, k, v, floats):
        def loss(q, k, v, floats):
            return jnp.sum(g * kernel(q, k, v, scores, segments, **arrays | floats))

        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, floats)

    found = on(
        mesh_of(**sizes), lambda *given: gradients(blocked_attention, *given), q, k, v, floats
    )
    right = jax.jit(lambda *given: gradients(reference, *given))(q, k, v, floats)
    jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), found, right)


@pytest.mark.parametrize('sizes', [{'data': 2, 'fsdp': 4}, {'fsdp': 2, 'tensor': 2, 'context': 2}])
@pytest.mark.parametrize('vocab', [16, 18])
def test_the_gradient_of_a_table_is_scattered(sizes, vocab):
    """A vocabulary that all devices divide, and one that `tensor` alone does, or none."""
    table, tokens, g = drawn(vocab, 8), RNG.integers(0, vocab, (8, 6)), drawn(8, 6, 8)

    def gradient(table):
        return jax.grad(lambda table: jnp.sum(look_up_rows(table, tokens) * g))(table)

    right = np.zeros_like(table)
    np.add.at(right, tokens, g)
    found = on(mesh_of(**sizes), gradient, table)
    np.testing.assert_allclose(found, right, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient(table), right, rtol=1e-5, atol=1e-5)


def test_matrices_of_layers_lie_whole_and_come_back():
    mesh, x = mesh_of(fsdp=4, tensor=2), drawn(4, 8, 2, 6)
    spec = ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',))

    def there_and_back(x):
        return from_whole_matrices(spec, newton_schulz(whole_matrices(spec, x), 5, 1e-7), x)

    found = on(mesh, there_and_back, x)
    assert found.sharding.shard_shape(x.shape) == (4, 2, 1, 6)
    np.testing.assert_allclose(found, there_and_back(x), rtol=1e-5, atol=1e-5)
    apart = on(mesh, lambda x: shard_matrices(shard_parameter(x, spec.axes), 1), x)
    assert apart.sharding.shard_shape(x.shape) == (1, 8, 2, 6)
    assert not shards_parameters()
