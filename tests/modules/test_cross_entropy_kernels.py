"""Reference: the kernels of cross-entropy are numpy's float64, to rounding that grows by the square
root of the row. Equivalence: they are the loss in plain operations, mapped, in loops and cut over
devices. In the interpreter of TPU kernels, whose memory is NaN before it is written.
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
from modules.losses.base import cross_entropy as loss_of_house

ROUNDING = {'float32': 2**-24, 'bfloat16': 2**-8}  # of half a unit of the last place
statistics = functools.partial(api.statistics, platform='tpu')
FORMS = ('row', 'online')  # of the forward kernel: whole rows, or blocks of columns
CONSTANT = 4  # of the tolerances: CONSTANT * rounding * sqrt(width), relative to what is summed


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Grids in another order where they may be; small blocks, so that rows are cut.

    Not in place, as the interpreter cannot where blocks do not divide an array.
    """
    monkeypatch.setattr(tpu, 'ALIASES', {})
    monkeypatch.setattr(tpu_rows, 'DEFAULT_BYTES', 2**19)
    with pltpu.force_tpu_interpret_mode(pltpu.InterpretParams(random_seed=3)):
        yield


def draw(rows, width, dtype='float32'):
    """Logits, labels at both ends and between, and cotangents of the three statistics.

    Of every five rows one has logits of 10^4 and one of -10^4, one some of -inf, one nothing else.
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


def in_float64(logits, labels, cotangents):
    """[the statistics and the gradient], and the size of what each is made of, for its rounding."""
    x, labels = np.asarray(logits, np.float64), np.asarray(labels)
    a, b, c = np.asarray(cotangents, np.float64)[..., None]
    present, rows = x != -np.inf, np.arange(len(x))
    count = np.maximum(present.sum(-1), 1)
    some = present.any(-1)
    most = np.where(some, x.max(-1), 0.0)
    log_z = np.where(some, most + np.log(np.exp(x - most[:, None]).sum(-1) + ~some), 0.0)
    label = np.where(some, x[rows, labels], 0.0)
    mean = np.where(present, x, 0.0).sum(-1) / count
    p = np.exp(x - log_z[:, None])
    is_label = np.arange(x.shape[1]) == labels[:, None]
    parts = [a * p, b * is_label, c / count[:, None]]
    gradient = np.where(present, sum(parts), 0.0)
    size = np.abs(np.where(present, x, 0.0)).max(-1) + 1
    return [log_z, label, mean, gradient], [size, size, size, sum(map(np.abs, parts))]


@pytest.fixture
def in_form(monkeypatch, form):
    """Kernels of one form; None: the one that suits the width."""
    if form is not None:
        monkeypatch.setattr(tpu, 'DEFAULT_BYTES', {'row': 2**60, 'online': 0}[form])


def statistics_and_gradient(logits, labels, cotangents):
    found, pull = jax.vjp(lambda x: statistics(x, labels), logits)
    return *found, *pull(tuple(cotangents))


def jitted(function, *static):
    """Compiled anew for each test, as the interpreter and the sizes of blocks are."""
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
def test_statistics_and_gradient_are_those_of_float64(rows, width, dtype, in_form):
    """Catches the empty end of a block that counts, a block's maximum taken for the row's, labels
    that are one off or of another block, rows that get another row's numbers, a NaN of -inf.
    """
    arrays = draw(rows, width, dtype)
    found = jitted(statistics_and_gradient)(*arrays)
    assert_are_those_of_float64(found, arrays)


def assert_are_those_of_float64(found, arrays):
    """found: the three statistics and the gradient."""
    width, dtype = arrays[0].shape[1], arrays[0].dtype.name
    assert [one.dtype for one in found] == ['float32'] * 3 + [dtype]
    for ours, right, size in zip(found, *in_float64(*arrays), strict=True):
        ours, right = (np.asarray(one, np.float64) for one in (ours, right))
        assert not np.isnan(ours).any()
        np.testing.assert_array_equal(np.isinf(ours), np.isinf(right))
        of_sum = CONSTANT * ROUNDING['float32'] * np.sqrt(width) * size
        stored = ROUNDING[dtype] * np.abs(right) if ours.ndim == 2 else 0.0
        finite = np.isfinite(right)
        difference = np.abs(ours[finite] - right[finite])
        assert np.all(difference <= (of_sum + stored)[finite])


@pytest.mark.full
def test_the_reference_is_float64_too():
    """Catches a gradient through -inf, which automatic differentiation makes a NaN."""
    logits, labels, cotangents = draw(10, 42)
    found, pull = jax.vjp(lambda x: base.statistics(x, labels), logits)
    right, sizes = in_float64(logits, labels, cotangents)
    gradient = pull(tuple(cotangents))[0]
    for ours, wanted, size in zip(found, right[:3], sizes[:3], strict=True):
        np.testing.assert_array_less(
            np.abs(np.where(np.isinf(wanted), 0.0, ours - wanted)), 1e-5 * size
        )
    ordinary = np.abs(right[0]) < 1e3  # one number for log_z is 10^-3 off at 10^4
    np.testing.assert_allclose(gradient[ordinary], right[3][ordinary], rtol=0, atol=1e-6)
    assert np.isfinite(gradient).all()


@pytest.mark.full
@pytest.mark.parametrize('form', FORMS)
def test_in_place(in_form, monkeypatch):
    """The gradient in the logits' memory, which the interpreter shares where blocks divide them.
    Catches one that reads a logit after it is overwritten.
    """
    monkeypatch.setattr(tpu, 'ALIASES', {'logits': 'gradient'})
    arrays = draw(128, 768)
    found = jitted(statistics_and_gradient)(*arrays)
    right, sizes = in_float64(*arrays)
    assert np.all(np.abs(found[3] - right[3]) <= 1e-5 * sizes[3])


def objective(per_token, logits, labels, numbers):
    found = per_token(logits, labels, numbers[0], numbers[1])
    weights = jnp.arange(1.0, 1 + len(labels))
    return jnp.sum(weights * found['objective']) + jnp.sum(found['z_loss'] - 2 * found['ce']), found


def nested(run):
    """Over runs of runs of all three: logits along their last axis, labels of the inner runs."""
    inner = jax.vmap(run, in_axes=(2, 0, 0))
    return jax.vmap(inner, in_axes=(3, None, 0))


def scanned(run):
    def over(logits, labels, numbers):
        return jax.lax.scan(lambda _, each: (None, run(*each)), None, (logits, labels, numbers))[1]

    return over


@pytest.mark.full
@pytest.mark.parametrize('way', ['once', 'nested', 'scanned'])
def test_the_loss_is_that_of_the_house(way):
    """Values and gradient with both weights traced. Catches a weight that is another's, runs that
    are mixed, a gradient of one term alone.
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
        return jitted({'nested': nested, 'scanned': scanned}.get(way, lambda f: f)(run))

    def of_house(logits, labels, z_loss, label_smoothing):
        per_token = loss_of_house.__wrapped__
        return per_token(logits, labels, z_loss=z_loss, label_smoothing=label_smoothing)

    ours, right = (
        gradient(one)(logits, labels, numbers)
        for one in (functools.partial(api.cross_entropy, platform='tpu'), of_house)
    )
    assert jax.tree.structure(ours) == jax.tree.structure(right)
    jax.tree.map(functools.partial(np.testing.assert_allclose, rtol=1e-5, atol=1e-5), ours, right)


def test_a_checkpoint_computes_the_statistics_again():
    """Lowered for TPUs, as the interpreter has no effects in one."""
    logits, labels, cotangents = draw(16, 128)

    @jax.checkpoint
    def loss(logits):
        found = statistics(jnp.sin(logits), labels)
        return sum(jnp.vdot(*pair) for pair in zip(found, cotangents, strict=True))

    with pltpu.force_tpu_interpret_mode(None):
        lowered = jax.jit(jax.value_and_grad(loss)).trace(logits).lower(lowering_platforms=('tpu',))
    text = lowered.as_text()
    assert text.count('kernel_name = "cross_entropy"') == 2
    assert text.count('kernel_name = "cross_entropy_backward"') == 1


@pytest.mark.full
def test_rows_are_cut_over_devices():
    """Over the axis `data`, as on one device: catches rows that are gathered or mixed."""
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ('run', 'data'))
    arrays = draw(8, 42)
    run = statistics_and_gradient
    rows = batch_sharding(mesh)
    over = jax.sharding.NamedSharding(mesh, PartitionSpec(None, 'data'))
    cut = jax.jit(trace_on_mesh(mesh, run), in_shardings=(rows, rows, over))
    for ours, right in zip(cut(*arrays), jitted(run)(*arrays), strict=True):
        np.testing.assert_allclose(ours, right, rtol=1e-6)
    assert 'tensor<2x42xf32>' in cut.lower(*arrays).as_text()


@pytest.mark.parametrize('form', FORMS)
def test_a_diverged_row_is_nan_and_a_label_of_no_column_picks_nothing(in_form):
    """Catches a NaN taken for a masked logit, and a label in the empty end of the last block."""
    logits = np.zeros((4, 2100), 'float32')
    logits[1, -1] = np.nan
    labels = jnp.array([-1, 0, 2100, 2099])
    found = jitted(lambda x: statistics(x + 1, labels))(logits)
    log_z, label_logit, _ = found
    np.testing.assert_array_equal(np.isnan(log_z), [False, True, False, False])
    np.testing.assert_array_equal(label_logit, [0.0, 1.0, 0.0, 1.0])


def test_what_the_kernels_do_not_take_is_refused():
    """Before anything is compiled, with what to do."""
    labels = jnp.zeros(16, 'int32')

    def of(dtype, width):
        logits = jax.ShapeDtypeStruct((16, width), dtype)
        return jax.eval_shape(lambda x: statistics(x, labels), logits)

    with pytest.raises(ValueError, match=r'bfloat16 and float32; got float16. Choose reference'):
        of('float16', 8)
    assert of('float32', 300_000)[0].shape == (16,)
