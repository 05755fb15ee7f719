"""Equivalence: sharded computations match those on a single device."""

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


def make_test_mesh(**sizes):
    return make_mesh(MeshConfig(**{'data': 1} | sizes))


def run_on_mesh(mesh, function, *arrays):
    program = jax.jit(
        trace_on_mesh(mesh, function),
        in_shardings=replicated_sharding(mesh),
        keep_unused=True,
    )
    return program(*arrays)


def draw(*shape):
    return RNG.standard_normal(shape).astype(np.float32)


def local_shapes(mesh, letters, *arrays):
    """Returns the shape of each array on one device."""
    shapes = []

    def compute(*shards):
        shapes.extend(x.shape for x in shards)
        return shards[0]

    copy = run_on_mesh(mesh, lambda *args: map_shards(compute, args, letters, letters[0]), *arrays)
    np.testing.assert_array_equal(copy, arrays[0])
    return shapes


def test_letters_define_sharding():
    mesh = make_test_mesh(data=2, context=2, tensor=2)
    q, mask, scale = draw(4, 2, 6, 3), draw(4, 1, 6, 3), draw(3)
    assert local_shapes(mesh, ('BNT', 'BNT', None), q, mask, scale) == [
        (2, 1, 3, 3),
        (2, 1, 3, 3),  # shared by all heads: whole
        (3,),
    ]
    assert row_letters(q) == 'BNT' and row_letters(q[0]) == 'BT' and row_letters(q[0, 0]) == 'M'


@pytest.mark.parametrize(
    ('k_heads', 'local_heads'), [(2, (1, 1)), (1, (1, 1)), (3, (4, 3))], ids=['cut', 'one', 'odd']
)
def test_query_and_key_heads_are_sharded_together(k_heads, local_heads):
    """Or not at all. Catches query heads paired with other key heads: an odd number shards
    neither.
    """
    n_heads = 4 if k_heads == 3 else 2
    mesh = make_test_mesh(data=4, tensor=2)
    q, k = draw(4, n_heads, 5), draw(4, k_heads, 5)
    assert [shape[1] for shape in local_shapes(mesh, ('BN', 'BK'), q, k)] == [*local_heads]


def test_partial_sums_cover_all_axes():
    """Sums run over all axes that shard rows, and no others."""
    mesh, x = make_test_mesh(data=2, context=2, tensor=2), draw(4, 6, 3)
    total = run_on_mesh(
        mesh,
        lambda x: map_shards(lambda shard: jnp.sum(shard, (0, 1))[None], (x,), ('BT',), PARTS),
        x,
    )
    assert total.shape == (4, 3)
    np.testing.assert_allclose(np.sum(total, 0), np.sum(x, (0, 1)), rtol=1e-5, atol=1e-5)


@pytest.mark.full
@pytest.mark.parametrize('shape', [(4, 6, 16), (4, 2, 6, 16)])
def test_rms_norm_on_sharded_activations(shape):
    """Includes the gradient of the scale, which is a sum over all devices."""
    mesh, x, scale, g = (
        make_test_mesh(data=2, context=2, tensor=2),
        draw(*shape),
        draw(16),
        draw(*shape),
    )

    def gradients(kernel, x, scale):
        def loss(x, scale):
            return jnp.sum(kernel(x, scale, 1e-5) * g)

        return jax.grad(loss, (0, 1))(x, scale)

    kernel, plain = (RMS_NORM_KERNELS[name].for_platform('tpu') for name in ('pallas', 'reference'))
    with pltpu.force_tpu_interpret_mode():
        sharded = run_on_mesh(mesh, lambda *args: gradients(kernel, *args), x, scale)
    for actual, expected in zip(sharded, gradients(plain, x, scale), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-4, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize('sizes', [{'data': 2, 'context': 2, 'tensor': 2}, {'context': 8}])
@pytest.mark.parametrize('window', [None, 5])
def test_visible_mean_on_sharded_rows(sizes, window):
    """Includes gradients; documents and windows cross devices. Catches another device's tokens, and
    sums that restart on each device.
    """
    v, g = draw(4, 2, 24, 8), draw(4, 2, 24, 8)
    segments = np.sort(RNG.integers(0, 3, (4, 24)).astype(np.int32), 1)

    def mean_and_gradient(v, is_full):
        sequence = packed_rows(segments)
        mean, pull = jax.vjp(lambda v: visible_mean(v, sequence, window, is_full), v)
        return mean, *pull(jnp.asarray(g))

    for is_full in (np.bool_(False), np.bool_(True)):
        sharded = run_on_mesh(make_test_mesh(**sizes), mean_and_gradient, v, is_full)
        single = jax.jit(mean_and_gradient)(v, is_full)
        for actual, expected in zip(sharded, single, strict=True):
            np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-6)


@pytest.mark.default_rows('sinks-sizes0')
@pytest.mark.parametrize(
    'sizes',
    [
        {'context': 2, 'tensor': 4},
        pytest.param({'data': 2, 'context': 4}, marks=pytest.mark.full),
        pytest.param({'data': 4, 'tensor': 2}, marks=pytest.mark.full),
    ],
)
@pytest.mark.parametrize('term', ['', 'window', 'sinks', 'bias', 'prefix'])
def test_blocked_attention_on_sharded_rows(sizes, term):
    """Each device has its queries at their positions in the row; documents cross devices. Two key
    heads serve four query heads, which four devices do not divide. With gradients.
    """
    q, g = draw(4, 4, 24, 8), draw(4, 4, 24, 8)
    k, v = draw(4, 2, 24, 8), draw(4, 2, 24, 8)
    segments = np.sort(RNG.integers(0, 3, (4, 24)).astype(np.int32), 1)
    scores, arrays = Scores(), {}
    if term == 'window':
        scores = Scores(window=7)
    elif term == 'sinks':
        scores, arrays = Scores(sinks=True), {'sinks_N': draw(4)}
    elif term == 'bias':
        scores, arrays = Scores(key_bias=True), {'key_bias_BKS': draw(4, 2, 24)}
    elif term == 'prefix':
        prefix = np.where(np.arange(24)[None] < 9, 1, 0).astype(np.int32)
        scores, arrays = Scores(prefix=True), {'prefix_BT': np.repeat(prefix, 4, 0)}
    floats = {name: x for name, x in arrays.items() if x.dtype == np.float32}

    def gradients(kernel, q, k, v, floats):
        def loss(q, k, v, floats):
            return jnp.sum(g * kernel(q, k, v, scores, segments, **arrays | floats))

        return jax.grad(loss, (0, 1, 2, 3))(q, k, v, floats)

    actual = run_on_mesh(
        make_test_mesh(**sizes), lambda *args: gradients(blocked_attention, *args), q, k, v, floats
    )
    expected = jax.jit(lambda *args: gradients(reference, *args))(q, k, v, floats)
    jax.tree.map(
        lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-4), actual, expected
    )


@pytest.mark.parametrize('sizes', [{'data': 2, 'fsdp': 4}, {'fsdp': 2, 'tensor': 2, 'context': 2}])
@pytest.mark.parametrize('vocab', [16, 18])
def test_table_gradient_is_scattered(sizes, vocab):
    """All devices, only `tensor`, or none divide the vocabulary."""
    table, tokens, g = draw(vocab, 8), RNG.integers(0, vocab, (8, 6)), draw(8, 6, 8)

    def gradient(table):
        return jax.grad(lambda table: jnp.sum(look_up_rows(table, tokens) * g))(table)

    expected = np.zeros_like(table)
    np.add.at(expected, tokens, g)
    actual = run_on_mesh(make_test_mesh(**sizes), gradient, table)
    np.testing.assert_allclose(actual, expected, rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(gradient(table), expected, rtol=1e-5, atol=1e-5)


def test_whole_matrices_round_trip():
    mesh, x = make_test_mesh(fsdp=4, tensor=2), draw(4, 8, 2, 6)
    spec = ParamSpec('hidden', ('layer', 'embed', 'heads', 'head_dim'), ('embed',))

    def round_trip(x):
        return from_whole_matrices(spec, newton_schulz(whole_matrices(spec, x), 5, 1e-7), x)

    actual = run_on_mesh(mesh, round_trip, x)
    assert actual.sharding.shard_shape(x.shape) == (4, 2, 1, 6)
    np.testing.assert_allclose(actual, round_trip(x), rtol=1e-5, atol=1e-5)
    sharded = run_on_mesh(mesh, lambda x: shard_matrices(shard_parameter(x, spec.axes), 1), x)
    assert sharded.sharding.shard_shape(x.shape) == (1, 8, 2, 6)
    assert not shards_parameters()
