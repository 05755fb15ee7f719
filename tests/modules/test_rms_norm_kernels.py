"""Reference: RMSNorm's kernels against float64, the TPU's interpreted. Equivalence: mapped,
scanned, recomputed, sharded. Contract: rejected input, and how often rows are read.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from lm.devices.mesh import trace_on_mesh
from modules.kernels.common import tpu_rows
from modules.kernels.rms_norm import RMS_NORM_KERNELS

EPS = 1e-3
EXACT_ROUNDING = {'xla_allow_excess_precision': False}  # a sum in bfloat16 is rounded
ROUNDING = {'float32': 2.0**-23, 'bfloat16': 2.0**-8}
# Columns: one, fewer than a register has, odd numbers, and a large number.
SHAPES = [(5, 1), (3, 7, 42), (100, 64), (33, 1000), (9, 4097), (2, 50_257)]


@pytest.fixture(autouse=True)
def interpret_kernels(request):
    """Runs TPU kernels on the CPU, with NaN in unwritten memory.

    With `interpreted_without_effects` they run without effects, which remat rejects.
    """
    if 'interpreted_without_effects' in request.fixturenames:
        yield
    else:
        with pltpu.force_tpu_interpret_mode():
            yield


@pytest.fixture
def interpreted_without_effects(monkeypatch):
    monkeypatch.setattr(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))


@pytest.fixture
def small_blocks(monkeypatch):
    """Limits blocks to 16 rows, so that few rows have several blocks."""
    monkeypatch.setattr(tpu_rows, 'MAX_ROWS', 16)


def draw(shape, dtype, seed=0):
    """Draws x, the gradient of the output, and the scale."""
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2)]
    return *arrays, jnp.asarray(rng.normal(size=shape[-1]), jnp.float32)


def numpy_rms_norm(x, scale, g):
    """Returns (y, the gradients of x and of the scale) in float64."""
    x, scale, g = (np.asarray(a, np.float64) for a in (x, scale, g))
    inverse = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS)
    normal, inner = x * inverse, g * scale
    dx = inverse * (inner - normal * np.mean(inner * normal, -1, keepdims=True))
    return normal * scale, dx, np.sum((g * normal).reshape(-1, len(scale)), 0)


def forward_and_gradients(function, arguments, cotangents):
    @functools.partial(jax.jit, compiler_options=EXACT_ROUNDING)
    def run(arguments, cotangents):
        y, pull = jax.vjp(function, *arguments)
        return y, pull(cotangents)

    return run(arguments, cotangents)


def assert_close(actual, expected, dtype, summed=1):
    """Checks to the rounding of `summed` added numbers, which grows as their square root."""
    expected = np.asarray(expected, np.float64)
    largest = max(1.0, np.abs(expected).max())
    atol = 4 * (ROUNDING[dtype] + ROUNDING['float32'] * np.sqrt(summed)) * largest
    np.testing.assert_allclose(np.asarray(actual, np.float64), expected, rtol=0, atol=atol)


@pytest.mark.default_rows(
    'reference-(3, 7, 42)-float32',
    'pallas-(3, 7, 42)-float32',
    'pallas-(3, 7, 42)-bfloat16',
    'pallas-(33, 1000)-float32',
    'pallas-(9, 4097)-bfloat16',
)
@pytest.mark.parametrize('dtype', ROUNDING)
@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('name', RMS_NORM_KERNELS)
def test_norm_and_gradients(name, shape, dtype, small_blocks):
    """Catches rows beyond the end that are summed, and blocks that are summed twice."""
    x, g, scale = draw(shape, dtype)
    kernel = functools.partial(RMS_NORM_KERNELS[name].for_platform('tpu'), eps=EPS)
    y, (dx, d_scale) = forward_and_gradients(kernel, (x, scale), g)
    assert y.dtype == dx.dtype == jnp.dtype(dtype)
    expected_y, expected_dx, expected_d_scale = numpy_rms_norm(x, scale, g)
    rows, width = x.size // shape[-1], shape[-1]
    assert_close(y, expected_y, dtype, width)
    assert_close(dx, expected_dx, dtype, width)
    assert_close(d_scale, expected_d_scale, 'float32', rows * np.sqrt(width))


@pytest.mark.default_rows('pallas-False-float32')
@pytest.mark.parametrize('dtype', ROUNDING)
@pytest.mark.parametrize('has_scale', [True, False])
@pytest.mark.parametrize('name', RMS_NORM_KERNELS)
def test_norm_with_out_dtype(name, has_scale, dtype, small_blocks):
    """Called as layers do: float32 out of bfloat16; a row of zeros is finite."""
    x, g, scale = draw((50, 42), dtype)
    x = x.at[3].set(0)
    kernel = functools.partial(
        RMS_NORM_KERNELS[name].for_platform('tpu'), eps=EPS, out_dtype=jnp.float32
    )
    scale_or_none = scale if has_scale else None
    y, (dx, d_scale) = forward_and_gradients(kernel, (x, scale_or_none), g.astype(jnp.float32))
    assert y.dtype == jnp.float32 and dx.dtype == x.dtype
    ones = scale if has_scale else np.ones(42)
    expected_y, expected_dx, expected_d_scale = numpy_rms_norm(x, ones, g)
    assert_close(y, expected_y, 'float32', 42)
    assert_close(dx, expected_dx, dtype, 42)
    if has_scale:
        assert_close(d_scale, expected_d_scale, 'float32', 50)
    else:
        assert d_scale is None


def gradients(kernel, x, scale):
    def objective(x, scale):
        return jnp.sum(jnp.sin(kernel(x, scale, EPS)))

    return jax.grad(objective, argnums=(0, 1))(x, scale)


def test_norm_under_vmap_scan_and_remat(small_blocks, interpreted_without_effects):
    """A sweep with scanned layers under remat combines them."""
    x, scale = draw((2, 3, 20, 42), 'float32')[0], draw((2, 3, 42), 'float32')[0]

    def compute(name):
        kernel = jax.checkpoint(RMS_NORM_KERNELS[name].for_platform('tpu'), static_argnums=2)

        def layer(x, scale):
            dx, d_scale = jax.vmap(jax.vmap(functools.partial(gradients, kernel)))(x, scale)
            return x + dx, d_scale

        scales = jnp.stack([scale, -scale])
        return jax.jit(lambda: jax.lax.scan(layer, x, scales))()

    for actual, expected in zip(compute('pallas'), compute('reference'), strict=True):
        assert_close(actual, expected, 'float32', 42)


@pytest.mark.full
@pytest.mark.parametrize('rows', [16, 3])
def test_rows_are_sharded(rows):
    """Eight devices agree with one; only the gradient of the scale is communicated. Rows that eight
    does not divide are computed on every device.
    """
    mesh = jax.make_mesh((1, 8), ('run', 'data'), (jax.sharding.AxisType.Auto,) * 2)
    x, _, scale = draw((rows, 5, 42), 'float32')
    row_sharding = NamedSharding(
        mesh, PartitionSpec(None, None) if rows == 3 else PartitionSpec('data')
    )
    replicated = NamedSharding(mesh, PartitionSpec())
    compute_gradients = functools.partial(gradients, RMS_NORM_KERNELS['pallas'].for_platform('tpu'))
    program = jax.jit(
        trace_on_mesh(mesh, compute_gradients),
        in_shardings=(row_sharding, replicated),
        out_shardings=(row_sharding, replicated),
    )
    actual = program(jax.device_put(x, row_sharding), jax.device_put(scale, replicated))
    expected = gradients(RMS_NORM_KERNELS['reference'].for_platform('tpu'), x, scale)
    for actual_array, expected_array in zip(actual, expected, strict=True):
        assert_close(actual_array, expected_array, 'float32', 42 * rows)


def test_pass_is_one_kernel():
    x, _, scale = draw((16, 42), 'float32')
    text = str(
        jax.make_jaxpr(
            functools.partial(gradients, RMS_NORM_KERNELS['pallas'].for_platform('tpu'))
        )(x, scale)
    )
    assert text.count('pallas_call[') == 2


@pytest.mark.parametrize(
    'shape, dtype, message',
    [
        ((2, 8), 'float16', 'supports bfloat16 and float32; got float16'),
        ((2, 2**20), 'float32', 'at most [0-9,]+ entries of this type; got 1,048,576'),
    ],
)
def test_unsupported_rows_are_rejected(shape, dtype, message):
    with pytest.raises(ValueError, match=f'kernels.rms_norm=pallas .*{message}.* Choose reference'):
        jax.eval_shape(
            lambda x: RMS_NORM_KERNELS['pallas'].for_platform('tpu')(x, None, EPS),
            jax.ShapeDtypeStruct(shape, dtype),
        )
