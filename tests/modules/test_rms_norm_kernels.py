"""Reference: RMSNorm's kernels against float64, a TPU's interpreted. Equivalence: mapped, scanned,
computed again, cut over devices. Contract: what is refused, and how often rows are read.
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
ROUNDED = {'xla_allow_excess_precision': False}  # a sum in bfloat16 is one
ROUNDING = {'float32': 2.0**-23, 'bfloat16': 2.0**-8}
# Columns: none, fewer than a register's, an odd number of them, of the large ones one.
SHAPES = [(5, 1), (3, 7, 42), (100, 64), (33, 1000), (9, 4097), (2, 50_257)]


@pytest.fixture(autouse=True)
def interpreted(request):
    """TPU kernels run on the CPU; memory that nobody wrote has NaN in it. `plainly_interpreted` has
    them without effects, which remat refuses.
    """
    if 'plainly_interpreted' in request.fixturenames:
        yield
    else:
        with pltpu.force_tpu_interpret_mode():
            yield


@pytest.fixture
def plainly_interpreted(monkeypatch):
    monkeypatch.setattr(pl, 'pallas_call', functools.partial(pl.pallas_call, interpret=True))


@pytest.fixture
def small_blocks(monkeypatch):
    """Blocks of 16 rows, so that few rows have several of them."""
    monkeypatch.setattr(tpu_rows, 'MAX_ROWS', 16)


def drawn(shape, dtype, seed=0):
    """x, the gradient of the result, the scale."""
    rng = np.random.default_rng(seed)
    arrays = [jnp.asarray(rng.normal(size=shape), dtype) for _ in range(2)]
    return *arrays, jnp.asarray(rng.normal(size=shape[-1]), jnp.float32)


def in_float64(x, scale, g):
    """(y, the gradients of x and of the scale)."""
    x, scale, g = (np.asarray(a, np.float64) for a in (x, scale, g))
    inverse = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPS)
    normal, inner = x * inverse, g * scale
    dx = inverse * (inner - normal * np.mean(inner * normal, -1, keepdims=True))
    return normal * scale, dx, np.sum((g * normal).reshape(-1, len(scale)), 0)


def both_ways(function, arguments, cotangents):
    @functools.partial(jax.jit, compiler_options=ROUNDED)
    def run(arguments, cotangents):
        y, pull = jax.vjp(function, *arguments)
        return y, pull(cotangents)

    return run(arguments, cotangents)


def close(ours, right, dtype, summed=1):
    """summed: numbers added up, whose rounding grows as the root of how many they are."""
    right = np.asarray(right, np.float64)
    largest = max(1.0, np.abs(right).max())
    atol = 4 * (ROUNDING[dtype] + ROUNDING['float32'] * np.sqrt(summed)) * largest
    np.testing.assert_allclose(np.asarray(ours, np.float64), right, rtol=0, atol=atol)


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
    x, g, scale = drawn(shape, dtype)
    kernel = functools.partial(RMS_NORM_KERNELS[name].for_platform('tpu'), eps=EPS)
    y, (dx, d_scale) = both_ways(kernel, (x, scale), g)
    assert y.dtype == dx.dtype == jnp.dtype(dtype)
    right_y, right_dx, right_scale = in_float64(x, scale, g)
    rows, width = x.size // shape[-1], shape[-1]
    close(y, right_y, dtype, width)
    close(dx, right_dx, dtype, width)
    close(d_scale, right_scale, 'float32', rows * np.sqrt(width))


@pytest.mark.default_rows('pallas-False-float32')
@pytest.mark.parametrize('dtype', ROUNDING)
@pytest.mark.parametrize('has_scale', [True, False])
@pytest.mark.parametrize('name', RMS_NORM_KERNELS)
def test_norm_in_another_type(name, has_scale, dtype, small_blocks):
    """Called as layers do: float32 out of bfloat16; a row of zeros is finite."""
    x, g, scale = drawn((50, 42), dtype)
    x = x.at[3].set(0)
    kernel = functools.partial(
        RMS_NORM_KERNELS[name].for_platform('tpu'), eps=EPS, out_dtype=jnp.float32
    )
    given = scale if has_scale else None
    y, (dx, d_scale) = both_ways(kernel, (x, given), g.astype(jnp.float32))
    assert y.dtype == jnp.float32 and dx.dtype == x.dtype
    ones = scale if has_scale else np.ones(42)
    right_y, right_dx, right_scale = in_float64(x, ones, g)
    close(y, right_y, 'float32', 42)
    close(dx, right_dx, dtype, 42)
    if has_scale:
        close(d_scale, right_scale, 'float32', 50)
    else:
        assert d_scale is None


def gradients(kernel, x, scale):
    def objective(x, scale):
        return jnp.sum(jnp.sin(kernel(x, scale, EPS)))

    return jax.grad(objective, argnums=(0, 1))(x, scale)


def test_mapped_twice_scanned_and_computed_again(small_blocks, plainly_interpreted):
    """As in a sweep whose layers are scanned under remat."""
    x, scale = drawn((2, 3, 20, 42), 'float32')[0], drawn((2, 3, 42), 'float32')[0]

    def of(name):
        kernel = jax.checkpoint(RMS_NORM_KERNELS[name].for_platform('tpu'), static_argnums=2)

        def layer(x, scale):
            dx, d_scale = jax.vmap(jax.vmap(functools.partial(gradients, kernel)))(x, scale)
            return x + dx, d_scale

        scales = jnp.stack([scale, -scale])
        return jax.jit(lambda: jax.lax.scan(layer, x, scales))()

    for ours, right in zip(of('pallas'), of('reference'), strict=True):
        close(ours, right, 'float32', 42)


@pytest.mark.full
@pytest.mark.parametrize('rows', [16, 3])
def test_on_eight_devices_each_has_its_rows(rows):
    """Equal to one device; nothing but the gradient of the scale crosses. Rows that eight do not
    divide are computed on every device.
    """
    mesh = jax.make_mesh((1, 8), ('run', 'data'), (jax.sharding.AxisType.Auto,) * 2)
    x, _, scale = drawn((rows, 5, 42), 'float32')
    cut = NamedSharding(mesh, PartitionSpec(None, None) if rows == 3 else PartitionSpec('data'))
    whole = NamedSharding(mesh, PartitionSpec())
    of_kernel = functools.partial(gradients, RMS_NORM_KERNELS['pallas'].for_platform('tpu'))
    program = jax.jit(
        trace_on_mesh(mesh, of_kernel), in_shardings=(cut, whole), out_shardings=(cut, whole)
    )
    found = program(jax.device_put(x, cut), jax.device_put(scale, whole))
    right = gradients(RMS_NORM_KERNELS['reference'].for_platform('tpu'), x, scale)
    for ours, expected in zip(found, right, strict=True):
        close(ours, expected, 'float32', 42 * rows)


def test_rows_are_read_by_one_kernel_forward_and_one_backward():
    x, _, scale = drawn((16, 42), 'float32')
    text = str(
        jax.make_jaxpr(
            functools.partial(gradients, RMS_NORM_KERNELS['pallas'].for_platform('tpu'))
        )(x, scale)
    )
    assert text.count('pallas_call[') == 2


@pytest.mark.parametrize(
    'shape, dtype, message',
    [
        ((2, 8), 'float16', 'takes bfloat16 and float32; got float16'),
        ((2, 2**20), 'float32', 'at most [0-9,]+ entries of this type; got 1,048,576'),
    ],
)
def test_what_the_kernel_cannot_hold_is_refused(shape, dtype, message):
    with pytest.raises(ValueError, match=f'kernels.rms_norm=pallas .*{message}.* Choose reference'):
        jax.eval_shape(
            lambda x: RMS_NORM_KERNELS['pallas'].for_platform('tpu')(x, None, EPS),
            jax.ShapeDtypeStruct(shape, dtype),
        )
