"""Reference: the kernels for GPUs, interpreted, against float64. Equivalence: mapped, scanned,
computed again, cut over devices. Contract: what is refused.

What is right, and how near, is said where the TPU's kernels are tested.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from modules.kernels.common import gpu_rows
from modules.kernels.cross_entropy import CROSS_ENTROPY_KERNELS
from modules.kernels.cross_entropy import api as fused_loss
from modules.kernels.rms_norm import RMS_NORM_KERNELS
from modules.kernels.softmax import SOFTMAX_KERNELS
from modules.kernels.softmax import api as fused_softmax
from tests.modules import test_cross_entropy_kernels as of_loss
from tests.modules import test_rms_norm_kernels as of_norm
from tests.modules import test_softmax_kernels as of_softmax

softmax = functools.partial(fused_softmax.softmax, platform='gpu')
statistics = functools.partial(fused_loss.statistics, platform='gpu')


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Two programs a GPU, so that each has several rows, and the last one fewer."""
    monkeypatch.setattr(gpu_rows, 'PROCESSORS', 1)
    monkeypatch.setattr(gpu_rows, 'MAX_PROGRAMS', 2)
    with plgpu.force_gpu_interpret_mode(plgpu.InterpretGPUParams()):
        yield


@pytest.mark.default_rows('(3, 3, 42)-bfloat16', '(5, 1000)-float32')
@pytest.mark.parametrize(
    ('shape', 'dtype'),
    [
        ((5, 1), 'float32'),
        ((3, 3, 42), 'bfloat16'),
        ((5, 1000), 'float32'),
        ((3, 4097), 'bfloat16'),
        ((3, 4608), 'float32'),
    ],
    ids=str,
)
def test_rms_norm_of_rows_and_its_gradients(shape, dtype):
    """Rows that are narrower than a slice, that slices do not divide, that registers do not hold.
    Catches columns of two slices that count twice, and rows that no program has or two have.
    """
    x, g, scale = of_norm.drawn(shape, dtype)
    kernel = functools.partial(RMS_NORM_KERNELS['pallas'].for_platform('gpu'), eps=of_norm.EPS)
    y, (dx, d_scale) = of_norm.both_ways(kernel, (x, scale), g)
    assert y.dtype == dx.dtype == jnp.dtype(dtype)
    right_y, right_dx, right_scale = of_norm.in_float64(x, scale, g)
    rows, width = x.size // shape[-1], shape[-1]
    of_norm.close(y, right_y, dtype, width)
    of_norm.close(dx, right_dx, dtype, width)
    of_norm.close(d_scale, right_scale, 'float32', rows * np.sqrt(width))


@pytest.mark.default_rows('False')
@pytest.mark.parametrize('has_scale', [True, False])
def test_rms_norm_in_another_type(has_scale):
    """Called as layers do: float32 out of bfloat16; a row of zeros is finite."""
    x, g, scale = of_norm.drawn((5, 200), 'bfloat16')
    x = x.at[3].set(0)
    kernel = functools.partial(
        RMS_NORM_KERNELS['pallas'].for_platform('gpu'), eps=of_norm.EPS, out_dtype=jnp.float32
    )
    given = scale if has_scale else None
    y, (dx, d_scale) = of_norm.both_ways(kernel, (x, given), g.astype(jnp.float32))
    assert y.dtype == jnp.float32 and dx.dtype == x.dtype
    ones = scale if has_scale else np.ones(200)
    right_y, right_dx, right_scale = of_norm.in_float64(x, ones, g)
    of_norm.close(y, right_y, 'float32', 200)
    of_norm.close(dx, right_dx, 'bfloat16', 200)
    if has_scale:
        of_norm.close(d_scale, right_scale, 'float32', 5)
    else:
        assert d_scale is None


PLAIN = [
    ((7, 1), 'float32', 'online'),
    ((5, 42), 'bfloat16', 'two_pass'),
    ((5, 1000), 'float32', 'online'),
    ((5, 4608), 'float32', 'two_pass'),
    ((5, 4097), 'bfloat16', 'online'),
]


@pytest.mark.default_rows('(5, 42)-bfloat16-two_pass', '(5, 1000)-float32-online')
@pytest.mark.parametrize(('shape', 'dtype', 'form'), PLAIN, ids=str)
def test_softmax_is_exact(shape, dtype, form):
    """Rows at 1e4 and -1e4, scaled by 2000, with -inf and of it alone. Catches a thread's sum that
    is not scaled to the row's, and a last slice that counts what the one before it has.
    """
    x, g = of_softmax.draw(shape, dtype, 'wild')
    of_softmax.assert_is_softmax(of_softmax.run(functools.partial(softmax, form=form), x, g), x, g)


@pytest.mark.default_rows('(2, 2, 4, 42)-two_pass-float32')
@pytest.mark.parametrize(
    ('shape', 'form', 'dtype'),
    [
        ((1, 2, 6, 200), 'online', 'bfloat16'),
        ((2, 2, 4, 42), 'two_pass', 'float32'),
        ((1, 2, 2, 4200), 'online', 'float32'),
    ],
    ids=str,
)
def test_what_queries_see_cap_and_lose_to_sinks(shape, form, dtype):
    """All at once; what is hidden is NaN. Catches sinks or a mask of other rows or heads, columns
    beyond a narrow row, a softcap without its derivative.
    """
    (x, g), more = of_softmax.draw(shape, dtype), of_softmax.everything(shape)
    hidden_x = jnp.where(more['mask'], x, jnp.nan)
    ours = of_softmax.run(functools.partial(softmax, form=form), hidden_x, g, **more)
    of_softmax.assert_is_softmax(ours, x, g, **more)


def test_a_sink_of_every_row():
    x, g = of_softmax.draw((5, 140), 'float32')
    sink = jnp.asarray(np.random.default_rng(1).normal(size=5), jnp.float32)
    of_softmax.assert_is_softmax(of_softmax.run(softmax, x, g, sink=sink), x, g, sink=sink)


@pytest.mark.default_rows('5-1000-float32', '10-42-bfloat16')
@pytest.mark.parametrize(
    ('rows', 'width', 'dtype'),
    [
        (3, 1, 'float32'),
        (10, 42, 'bfloat16'),
        (5, 1000, 'float32'),
        (5, 4097, 'float32'),
        (5, 9000, 'bfloat16'),
    ],
    ids=str,
)
def test_statistics_of_a_loss_and_their_gradient(rows, width, dtype):
    """Catches a label that is one off, a count of what two slices have, a NaN of -inf."""
    arrays = of_loss.draw(rows, width, dtype)

    def both(logits, labels, cotangents):
        found, pull = jax.vjp(lambda x: statistics(x, labels), logits)
        return *found, *pull(tuple(cotangents))

    of_loss.assert_are_those_of_float64(of_loss.jitted(both)(*arrays), arrays)


@pytest.mark.full
def test_a_label_that_is_no_column_has_a_logit_of_nothing():
    """As where columns are cut over devices. Catches the logit of the first column."""
    logits, _, _ = of_loss.draw(3, 140)
    label_logit_M = statistics(logits, jnp.asarray([-1, 140, 2], jnp.int32))[1]
    np.testing.assert_array_equal(label_logit_M, [0, 0, logits[2, 2]])


@pytest.mark.full
def test_mapped_runs_have_their_own():
    """Two runs with a scale, a mask and labels each. Catches rows that get another run's."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 140)), jnp.float32)
    scale = jnp.asarray(rng.normal(size=(2, 140)), jnp.float32)
    mask = jnp.asarray(rng.random((2, 140)) < 0.7)
    labels = jnp.asarray(rng.integers(0, 140, (2, 3)), jnp.int32)

    def of(platform, name):
        def objective(x, scale, mask, labels):
            normal = RMS_NORM_KERNELS[name].for_platform(platform)(x, scale, of_norm.EPS)
            p = SOFTMAX_KERNELS[name].for_platform(platform)(normal, mask)
            found = CROSS_ENTROPY_KERNELS[name].for_platform(platform)(
                normal + p, labels, 1e-2, 0.1
            )
            return jnp.sum(found['objective'] * jnp.arange(3))

        mapped = jax.vmap(jax.value_and_grad(objective, argnums=(0, 1)))
        return jax.jit(mapped)(x, scale, mask, labels)

    ours, right = of('gpu', 'pallas'), of('cpu', 'reference')
    for one, other in zip(jax.tree.leaves(ours), jax.tree.leaves(right), strict=True):
        of_norm.close(one, other, 'float32', 140)


@pytest.mark.parametrize(
    ('compute', 'words'),
    [
        (lambda x: softmax(x.astype(jnp.float16)), 'bfloat16 and float32; got float16'),
        (
            lambda x: RMS_NORM_KERNELS['pallas'].for_platform('gpu')(
                jnp.zeros((2, 20_000)), None, 1e-6
            ),
            'at most 16,384 entries of this type; got 20,000. Choose reference',
        ),
    ],
)
def test_bad_input_is_refused(compute, words):
    with pytest.raises(ValueError, match=words):
        compute(jnp.zeros((4, 8)))
