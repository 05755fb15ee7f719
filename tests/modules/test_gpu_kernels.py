"""Reference: the kernels for GPUs, interpreted, against float64. Equivalence: mapped, scanned,
recomputed, sharded. Contract: rejected input.

The tests of the TPU kernels define the expected values and tolerances.
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
from tests.modules import test_cross_entropy_kernels as loss_tests
from tests.modules import test_rms_norm_kernels as norm_tests
from tests.modules import test_softmax_kernels as softmax_tests

softmax = functools.partial(fused_softmax.softmax, platform='gpu')
statistics = functools.partial(fused_loss.statistics, platform='gpu')


@pytest.fixture(autouse=True)
def interpret_kernels(monkeypatch):
    """Runs two programs, so that each has several rows, and the last one fewer."""
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
def test_rms_norm_and_gradients(shape, dtype):
    """Rows narrower than a slice, not divisible by slices, and exceeding the registers. Catches
    columns of two slices counted twice, and rows of no program or of two.
    """
    x, g, scale = norm_tests.draw(shape, dtype)
    kernel = functools.partial(RMS_NORM_KERNELS['pallas'].for_platform('gpu'), eps=norm_tests.EPS)
    y, (dx, d_scale) = norm_tests.forward_and_gradients(kernel, (x, scale), g)
    assert y.dtype == dx.dtype == jnp.dtype(dtype)
    expected_y, expected_dx, expected_d_scale = norm_tests.numpy_rms_norm(x, scale, g)
    rows, width = x.size // shape[-1], shape[-1]
    norm_tests.assert_close(y, expected_y, dtype, width)
    norm_tests.assert_close(dx, expected_dx, dtype, width)
    norm_tests.assert_close(d_scale, expected_d_scale, 'float32', rows * np.sqrt(width))


@pytest.mark.default_rows('False')
@pytest.mark.parametrize('has_scale', [True, False])
def test_rms_norm_with_out_dtype(has_scale):
    """Called as layers do: float32 out of bfloat16; a row of zeros is finite."""
    x, g, scale = norm_tests.draw((5, 200), 'bfloat16')
    x = x.at[3].set(0)
    kernel = functools.partial(
        RMS_NORM_KERNELS['pallas'].for_platform('gpu'), eps=norm_tests.EPS, out_dtype=jnp.float32
    )
    scale_or_none = scale if has_scale else None
    y, (dx, d_scale) = norm_tests.forward_and_gradients(
        kernel, (x, scale_or_none), g.astype(jnp.float32)
    )
    assert y.dtype == jnp.float32 and dx.dtype == x.dtype
    ones = scale if has_scale else np.ones(200)
    expected_y, expected_dx, expected_d_scale = norm_tests.numpy_rms_norm(x, ones, g)
    norm_tests.assert_close(y, expected_y, 'float32', 200)
    norm_tests.assert_close(dx, expected_dx, 'bfloat16', 200)
    if has_scale:
        norm_tests.assert_close(d_scale, expected_d_scale, 'float32', 5)
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
def test_softmax_matches_float64(shape, dtype, form):
    """Rows at 1e4 and -1e4, scaled by 2000, with some or only -inf. Catches a thread's sum that is
    not rescaled to the row's, and a last slice that counts entries of the previous one.
    """
    x, g = softmax_tests.draw(shape, dtype, 'wild')
    softmax_tests.assert_matches_softmax(
        softmax_tests.run(functools.partial(softmax, form=form), x, g), x, g
    )


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
def test_mask_softcap_and_sinks_together(shape, form, dtype):
    """All at once; hidden entries are NaN. Catches sinks or masks of other rows or heads, columns
    beyond a narrow row, a softcap without its derivative.
    """
    (x, g), options = softmax_tests.draw(shape, dtype), softmax_tests.draw_options(shape)
    hidden_x = jnp.where(options['mask'], x, jnp.nan)
    actual = softmax_tests.run(functools.partial(softmax, form=form), hidden_x, g, **options)
    softmax_tests.assert_matches_softmax(actual, x, g, **options)


def test_sink_per_row():
    x, g = softmax_tests.draw((5, 140), 'float32')
    sink = jnp.asarray(np.random.default_rng(1).normal(size=5), jnp.float32)
    softmax_tests.assert_matches_softmax(
        softmax_tests.run(softmax, x, g, sink=sink), x, g, sink=sink
    )


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
def test_loss_statistics_and_gradient(rows, width, dtype):
    """Catches a label off by one, entries of two slices counted twice, a NaN from -inf."""
    arrays = loss_tests.draw(rows, width, dtype)

    def statistics_and_gradient(logits, labels, cotangents):
        row_statistics, pull = jax.vjp(lambda x: statistics(x, labels), logits)
        return *row_statistics, *pull(tuple(cotangents))

    loss_tests.assert_matches_float64(
        loss_tests.compile_fresh(statistics_and_gradient)(*arrays), arrays
    )


@pytest.mark.full
def test_label_without_column_has_zero_logit():
    """Columns sharded over devices have such labels. Catches the logit of the first column."""
    logits, _, _ = loss_tests.draw(3, 140)
    label_logit_M = statistics(logits, jnp.asarray([-1, 140, 2], jnp.int32))[1]
    np.testing.assert_array_equal(label_logit_M, [0, 0, logits[2, 2]])


@pytest.mark.full
def test_mapped_runs_do_not_mix():
    """Two runs, each with its scale, mask and labels. Catches rows with another run's."""
    rng = np.random.default_rng(0)
    x = jnp.asarray(rng.normal(size=(2, 3, 140)), jnp.float32)
    scale = jnp.asarray(rng.normal(size=(2, 140)), jnp.float32)
    mask = jnp.asarray(rng.random((2, 140)) < 0.7)
    labels = jnp.asarray(rng.integers(0, 140, (2, 3)), jnp.int32)

    def compute(platform, name):
        def objective(x, scale, mask, labels):
            normal = RMS_NORM_KERNELS[name].for_platform(platform)(x, scale, norm_tests.EPS)
            p = SOFTMAX_KERNELS[name].for_platform(platform)(normal, mask)
            terms = CROSS_ENTROPY_KERNELS[name].for_platform(platform)(
                normal + p, labels, 1e-2, 0.1
            )
            return jnp.sum(terms['objective'] * jnp.arange(3))

        mapped = jax.vmap(jax.value_and_grad(objective, argnums=(0, 1)))
        return jax.jit(mapped)(x, scale, mask, labels)

    actual, expected = compute('gpu', 'pallas'), compute('cpu', 'reference')
    for actual_leaf, expected_leaf in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        norm_tests.assert_close(actual_leaf, expected_leaf, 'float32', 140)


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
def test_bad_input_is_rejected(compute, words):
    with pytest.raises(ValueError, match=words):
        compute(jnp.zeros((4, 8)))
