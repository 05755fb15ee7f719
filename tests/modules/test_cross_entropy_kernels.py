"""Reference: the cross-entropy kernels match NumPy in float64, to rounding that grows with the
square root of the row. Equivalence: they match the loss in plain operations, mapped, in loops and
sharded. Run in the interpreter of TPU kernels, where unwritten memory is NaN.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import PartitionSpec

from lm.devices.mesh import batch_sharding, trace_on_mesh
from modules.kernels.common import tpu_rows
from modules.kernels.cross_entropy import api, base, tpu
from modules.losses.base import cross_entropy as plain_cross_entropy

ROUNDING = {'float32': 2**-24, 'bfloat16': 2**-8}  # of half a unit of the last place
statistics = functools.partial(api.statistics, platform='tpu')
FORMS = ('row', 'online')  # of the forward kernel: whole rows, or blocks of columns
CONSTANT = 4  # of the tolerances: CONSTANT * rounding * sqrt(width), relative to what is summed


@pytest.fixture(autouse=True)
def interpret_kernels(monkeypatch):
    """Interprets kernels with shuffled grids and small blocks, so that rows are split.

    Not in place, as the interpreter cannot do that if blocks do not divide an array.
    """
    monkeypatch.setattr(tpu, 'ALIASES', {})
    monkeypatch.setattr(tpu_rows, 'DEFAULT_BYTES', 2**19)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(random_seed=3)):
        yield


def draw(rows, width, dtype='float32'):
    """Draws logits, labels at both ends and between, and cotangents of the three statistics.

    In every five rows one has logits of 10^4, one of -10^4, one some of -inf, and one only -inf.
    """
    rng = np.random.default_rng(rows + width)
    logits = 3 * rng.normal(size=(rows, width))
    logits[0::5] += 1e4
    logits[1::5] -= 1e4
    logits[2::5, : 2 * width // 3] = logits[2::5, width - width // 4 :] = -np.inf
    logits[3::5] = -np.inf
    labels = rng.integers(0, width, rows)
    labels[0::3], labels[1::3] = width - 1, 0
    cotangents = jnp.asarray(rng.normal(size=(3, rows)), 'float32')
    return jnp.asarray(logits, dtype), jnp.asarray(labels, 'int32'), cotangents


def numpy_statistics(logits, labels, cotangents):
    """Returns [the statistics and the gradient], and the size of their terms, which sets the
    rounding.
    """
    x, labels = np.asarray(logits, np.float64), np.asarray(labels)
    a, b, c = np.asarray(cotangents, np.float64)[..., None]
    present, rows = x != -np.inf, np.arange(len(x))
    count = np.maximum(present.sum(-1), 1)
    has_logits = present.any(-1)
    max_logit = np.where(has_logits, x.max(-1), 0.0)
    log_z = np.where(
        has_logits, max_logit + np.log(np.exp(x - max_logit[:, None]).sum(-1) + ~has_logits), 0.0
    )
    label = np.where(has_logits, x[rows, labels], 0.0)
    mean = np.where(present, x, 0.0).sum(-1) / count
    p = np.exp(x - log_z[:, None])
    is_label = np.arange(x.shape[1]) == labels[:, None]
    terms = [a * p, b * is_label, c / count[:, None]]
    gradient = np.where(present, sum(terms), 0.0)
    size = np.abs(np.where(present, x, 0.0)).max(-1) + 1
    return [log_z, label, mean, gradient], [size, size, size, sum(map(np.abs, terms))]


@pytest.fixture
def use_form(monkeypatch, form):
    """Selects kernels of one form; None: the form that suits the width."""
    if form is not None:
        monkeypatch.setattr(tpu, 'DEFAULT_BYTES', {'row': 2**60, 'online': 0}[form])


def statistics_and_gradient(logits, labels, cotangents):
    row_statistics, pull = jax.vjp(lambda x: statistics(x, labels), logits)
    return *row_statistics, *pull(tuple(cotangents))


def compile_fresh(function, *static):
    """Compiles anew for each test, as the interpreter and block sizes differ."""
    return jax.jit(functools.partial(function, *static))


@pytest.mark.default_rows('20-42-bfloat16-row')
@pytest.mark.parametrize(
    ('rows', 'width', 'dtype', 'form'),
    [
        (3, 1, 'float32', None),
        (20, 42, 'bfloat16', 'row'),
        (5, 1000, 'float32', 'online'),
        (70, 1000, 'bfloat16', 'online'),
        (300, 42, 'float32', 'row'),
        (150, 1000, 'float32', 'row'),
        (6, 4097, 'float32', 'online'),
        (6, 4097, 'bfloat16', 'online'),
        (5, 50257, 'bfloat16', None),
    ],
    ids=str,
)
def test_statistics_and_gradient_match_float64(rows, width, dtype, use_form):
    """Catches counted padding of a block, a block's maximum used for the row, labels off by one or
    of another block, rows with another row's numbers, a NaN from -inf.
    """
    arrays = draw(rows, width, dtype)
    actual = compile_fresh(statistics_and_gradient)(*arrays)
    assert_matches_float64(actual, arrays)


def assert_matches_float64(outputs, arrays):
    """Checks the three statistics and the gradient."""
    width, dtype = arrays[0].shape[1], arrays[0].dtype.name
    assert [array.dtype for array in outputs] == ['float32'] * 3 + [dtype]
    for array, reference, size in zip(outputs, *numpy_statistics(*arrays), strict=True):
        actual, expected = (np.asarray(a, np.float64) for a in (array, reference))
        assert not np.isnan(actual).any()
        np.testing.assert_array_equal(np.isinf(actual), np.isinf(expected))
        sum_error = CONSTANT * ROUNDING['float32'] * np.sqrt(width) * size
        storage_error = ROUNDING[dtype] * np.abs(expected) if actual.ndim == 2 else 0.0
        finite = np.isfinite(expected)
        difference = np.abs(actual[finite] - expected[finite])
        assert np.all(difference <= (sum_error + storage_error)[finite])


@pytest.mark.full
def test_reference_matches_float64():
    """Catches a gradient through -inf, which automatic differentiation turns into NaN."""
    logits, labels, cotangents = draw(10, 42)
    row_statistics, pull = jax.vjp(lambda x: base.statistics(x, labels), logits)
    expected, sizes = numpy_statistics(logits, labels, cotangents)
    gradient = pull(tuple(cotangents))[0]
    for actual, statistic, size in zip(row_statistics, expected[:3], sizes[:3], strict=True):
        np.testing.assert_array_less(
            np.abs(np.where(np.isinf(statistic), 0.0, actual - statistic)), 1e-5 * size
        )
    ordinary = np.abs(expected[0]) < 1e3  # a single float32 for log_z is 10^-3 off at 10^4
    np.testing.assert_allclose(gradient[ordinary], expected[3][ordinary], rtol=0, atol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.full
@pytest.mark.parametrize('form', FORMS)
def test_gradient_overwrites_logits(use_form, monkeypatch):
    """The interpreter shares the logits' memory if blocks divide them. Catches a kernel that reads
    a logit after overwriting it.
    """
    monkeypatch.setattr(tpu, 'ALIASES', {'logits': 'gradient'})
    arrays = draw(128, 768)
    actual = compile_fresh(statistics_and_gradient)(*arrays)
    expected, sizes = numpy_statistics(*arrays)
    assert np.all(np.abs(actual[3] - expected[3]) <= 1e-5 * sizes[3])


def objective(per_token, logits, labels, numbers):
    terms = per_token(logits, labels, numbers[0], numbers[1])
    weights = jnp.arange(1.0, 1 + len(labels))
    return jnp.sum(weights * terms['objective']) + jnp.sum(terms['z_loss'] - 2 * terms['ce']), terms


def map_twice(run):
    """Maps over runs of runs: logits along their last axis, labels over the inner runs."""
    inner = jax.vmap(run, in_axes=(2, 0, 0))
    return jax.vmap(inner, in_axes=(3, None, 0))


def scan_rows(run):
    def over(logits, labels, numbers):
        return jax.lax.scan(lambda _, row: (None, run(*row)), None, (logits, labels, numbers))[1]

    return over


@pytest.mark.full
@pytest.mark.parametrize('way', ['once', 'nested', 'scanned'])
def test_kernel_matches_plain_loss(way):
    """Values and gradient with both weights traced. Catches a swapped weight, mixed runs, a
    gradient of only one term.
    """
    rng = np.random.default_rng(0)
    lead = {'nested': (2, 3), 'scanned': (2,)}.get(way, ())
    logits = rng.normal(size=(*lead, 5, 42)).astype('float32')
    labels = rng.integers(0, 42, (*(lead[1:] if way == 'nested' else lead), 5), dtype='int32')
    numbers = rng.uniform(size=(*lead, 2)).astype('float32')
    if way == 'nested':
        logits = np.moveaxis(logits, (0, 1), (3, 2))

    def gradient(per_token):
        run = jax.value_and_grad(functools.partial(objective, per_token), has_aux=True)
        return compile_fresh({'nested': map_twice, 'scanned': scan_rows}.get(way, lambda f: f)(run))

    def compute_plain(logits, labels, z_loss, label_smoothing):
        per_token = plain_cross_entropy.__wrapped__
        return per_token(logits, labels, z_loss=z_loss, label_smoothing=label_smoothing)

    actual, expected = (
        gradient(per_token)(logits, labels, numbers)
        for per_token in (functools.partial(api.cross_entropy, platform='tpu'), compute_plain)
    )
    assert jax.tree.structure(actual) == jax.tree.structure(expected)
    jax.tree.map(
        functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), actual, expected
    )


def test_checkpoint_recomputes_statistics():
    """Lowered for TPUs, as the interpreter has no effects under `jax.checkpoint`."""
    logits, labels, cotangents = draw(16, 128)

    @jax.checkpoint
    def loss(logits):
        row_statistics = statistics(jnp.sin(logits), labels)
        return sum(jnp.vdot(*pair) for pair in zip(row_statistics, cotangents, strict=True))

    with pltpu.force_tpu_interpret_mode(None):
        lowered = jax.jit(jax.value_and_grad(loss)).trace(logits).lower(lowering_platforms=('tpu',))
    text = lowered.as_text()
    assert text.count('kernel_name = "cross_entropy"') == 2
    assert text.count('kernel_name = "cross_entropy_backward"') == 1


@pytest.mark.full
def test_rows_are_sharded():
    """Rows sharded over `data` give the results of one device. Catches rows that are gathered or
    mixed.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ('run', 'data'))
    arrays = draw(8, 42)
    run = statistics_and_gradient
    rows = batch_sharding(mesh)
    cotangent_sharding = jax.sharding.NamedSharding(mesh, PartitionSpec(None, 'data'))
    sharded = jax.jit(trace_on_mesh(mesh, run), in_shardings=(rows, rows, cotangent_sharding))
    for actual, expected in zip(sharded(*arrays), compile_fresh(run)(*arrays), strict=True):
        np.testing.assert_allclose(actual, expected, rtol=1e-6)
    assert 'tensor<2x42xf32>' in sharded.lower(*arrays).as_text()


@pytest.mark.parametrize('form', FORMS)
def test_nan_rows_and_labels_without_column(use_form):
    """A NaN is not taken for a masked logit, and padding of the last block matches no label."""
    logits = np.zeros((4, 2100), 'float32')
    logits[1, -1] = np.nan
    labels = jnp.array([-1, 0, 2100, 2099])
    row_statistics = compile_fresh(lambda x: statistics(x + 1, labels))(logits)
    log_z, label_logit, _ = row_statistics
    np.testing.assert_array_equal(np.isnan(log_z), [False, True, False, False])
    np.testing.assert_array_equal(label_logit, [0.0, 1.0, 0.0, 1.0])


def test_unsupported_types_are_rejected():
    """The error is raised before anything is compiled, with an alternative."""
    labels = jnp.zeros(16, 'int32')

    def shapes(dtype, width):
        logits = jax.ShapeDtypeStruct((16, width), dtype)
        return jax.eval_shape(lambda x: statistics(x, labels), logits)

    with pytest.raises(ValueError, match=r'bfloat16 and float32; got float16. Choose reference'):
        shapes('float16', 8)
    assert shapes('float32', 300_000)[0].shape == (16,)
