"""Reference: softmax, in plain operations and as a TPU kernel (interpreted), and its gradient match
closed forms in float64. Equivalence: the kernel forms, mapped, scanned, recomputed, and sharded.
Contract: one kernel forward, one backward; bad input is rejected.
"""

import functools
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from lm.devices.mesh import batch_sharding, replicated_sharding, trace_on_mesh
from modules.kernels.common.tpu_rows import call_on_tpu
from modules.kernels.softmax import api, base, tpu, tpu_blocks

softmax = functools.partial(api.softmax, platform='tpu')
ROUNDING = {'float32': 2**-23, 'bfloat16': 2**-8}


@pytest.fixture
def interpret_kernels():
    with pltpu.force_tpu_interpret_mode():
        yield


def numpy_softmax(x, g, mask=True, sink=None, softcap=0.0):
    """Returns (p, dx, dsink in the shape of the rows) in float64."""
    x, g = (np.asarray(a, np.float64) for a in (x, g))
    bounded = np.tanh(x / softcap) if softcap else np.zeros_like(x)
    z = np.where(mask, softcap * bounded if softcap else x, -np.inf)
    lanes = z if sink is None else np.concatenate([z, sink_column(sink, x)], -1)
    max_logit = np.max(lanes, -1, keepdims=True)
    max_logit[max_logit == -np.inf] = 0
    terms = np.exp(lanes - max_logit)
    total = np.sum(terms, -1, keepdims=True)
    p = terms / np.where(total == 0, 1, total)
    p, sink_probs = p[..., : x.shape[-1]], p[..., -1]
    mean = np.sum(p * g, -1, keepdims=True)
    return p, p * (g - mean) * (1 - bounded**2), -sink_probs * mean[..., 0]


def sink_column(sink, x):
    return np.broadcast_to(np.asarray(sink, np.float64), x.shape[:-1])[..., None]


def draw(shape, dtype, spread='usual'):
    """Draws x and a cotangent.

    With spread `wild`, rows are at 1e4 and -1e4, scaled by 2000, with some or only -inf, in turns.
    """
    rng = np.random.default_rng(shape[-1])
    x, g = rng.normal(size=(2, *shape))
    if spread == 'wild':
        rows = x.reshape(-1, shape[-1])
        rows[0::5] += 1e4
        rows[1::5] -= 1e4
        rows[2::5] *= 2000
        rows[3::5, ::3] = -np.inf
        rows[4::5] = -np.inf
    return jnp.asarray(x, dtype), jnp.asarray(g, dtype)


def draw_options(shape, seed=0):
    """Draws all optional arguments: a sink per head, and a mask shared by heads.

    The mask shows a query some of the earlier keys of its document; one query sees nothing.
    """
    rng = np.random.default_rng(seed)
    batch, heads, queries, keys = shape
    mask = np.tril(rng.random((batch, 1, queries, keys)) < 0.7, keys - queries)
    mask[:, :, queries // 2] = False
    query_documents, key_documents = (
        np.sort(rng.integers(0, 3, (batch, 1, n)), -1) for n in (queries, keys)
    )
    mask &= query_documents[..., None] == key_documents[..., None, :]
    sink = jnp.asarray(rng.normal(size=(heads, 1)), jnp.float32)
    return {'mask': jnp.asarray(mask), 'sink': sink, 'softcap': 2.0}


def forward_and_gradients(compute, x, g, sink=None, **options):
    """Returns the output, dx, and dsink if there is a sink."""
    if sink is None:
        y, pull = jax.vjp(lambda x: compute(x, **options), x)
    else:
        y, pull = jax.vjp(lambda x, sink: compute(x, sink=sink, **options), x, sink)
    return y, *pull(g)


def run(compute, x, g, **options):
    return jax.jit(lambda x, g: forward_and_gradients(compute, x, g, **options))(x, g)


def assert_close(actual, expected, dtype, width, floor=1e-2):
    """Checks to 4 roundings of the type plus sqrt(width) / 4 of float32.

    Relative to the largest number, or to `floor` if that is larger.
    """
    error = 4 * ROUNDING[dtype] + np.sqrt(width) / 4 * ROUNDING['float32']
    actual, expected = (np.asarray(a, np.float64) for a in (actual, expected))
    assert actual.shape == expected.shape
    atol = error * max(np.abs(expected).max(), floor)
    np.testing.assert_allclose(actual, expected, rtol=0, atol=atol)


def assert_matches_softmax(actual, x, g, **options):
    """Checks the outputs of `run`, of x where it is visible."""
    p, dx, rows_dsink = numpy_softmax(x, g, **options)
    assert [a.dtype for a in actual[:2]] == [x.dtype] * 2
    assert_close(actual[0], p, x.dtype.name, x.shape[-1])
    assert_close(actual[1], dx, x.dtype.name, x.shape[-1])
    if 'sink' in options:
        sink = options['sink']
        sink_shape = (1,) * (x.ndim - 1 - sink.ndim) + sink.shape
        broadcast_axes = tuple(axis for axis, length in enumerate(sink_shape) if length == 1)
        dsink = rows_dsink.sum(broadcast_axes, keepdims=True).reshape(sink.shape)
        floor = np.sqrt(rows_dsink.size / sink.size) * np.abs(rows_dsink).max()
        assert_close(actual[2], dsink, x.dtype.name, x.shape[-1], floor)


PLAIN = [
    ((7, 1), 'float32', 'online', 'rows'),
    ((2, 5, 42), 'bfloat16', 'online', 'rows'),
    ((10, 1000), 'float32', 'two_pass', 'rows'),
    ((5, 4097), 'bfloat16', 'online', 'blocks'),
    ((5, 4097), 'float32', 'two_pass', 'blocks'),
    ((1, 50257), 'float32', 'online', 'blocks'),
]


@pytest.fixture
def limit_columns(monkeypatch, held):
    """Makes vector memory hold whole rows, or only `blocks` of their columns."""
    if held == 'blocks':
        monkeypatch.setattr(tpu, 'max_columns', lambda *_: 0)


@pytest.mark.default_rows('(2, 5, 42)-bfloat16-online-rows', '(5, 4097)-float32-two_pass-blocks')
@pytest.mark.usefixtures('interpret_kernels', 'limit_columns')
@pytest.mark.parametrize(('shape', 'dtype', 'form', 'held'), PLAIN, ids=str)
def test_softmax_matches_float64(shape, dtype, form, held):
    """Rows at 1e4 and -1e4, scaled by 2000, with some or only -inf. Catches a missing or wrong
    shift, NaN from -inf minus -inf, counted padding, a sum in bfloat16.
    """
    x, g = draw(shape, dtype, 'wild')
    for compute in (base.reference, functools.partial(softmax, form=form)):
        assert_matches_softmax(run(compute, x, g), x, g)


@pytest.fixture
def small_blocks(monkeypatch):
    """Makes a small array have several blocks: 64 rows of 128 columns."""
    monkeypatch.setattr(tpu, 'COLUMNS', 128)
    monkeypatch.setattr(tpu_blocks, 'MAX_ROWS', 64)


@pytest.mark.full
@pytest.mark.usefixtures('interpret_kernels', 'limit_columns', 'small_blocks')
@pytest.mark.parametrize(
    ('held', 'form', 'dtype'),
    [
        ('rows', 'online', 'float32'),
        ('blocks', 'online', 'bfloat16'),
        ('blocks', 'two_pass', 'float32'),
    ],
)
def test_mask_softcap_and_sinks_together(held, form, dtype):
    """All at once, in blocks that end within rows, columns and a register's lanes; hidden entries
    are NaN. Catches sinks of other rows or heads, a mask of another block, a softcap without its
    derivative, a sink without its gradient, NaN from a row that sees nothing.
    """
    shape = (1, 2, 150, 200)
    (x, g), options = draw(shape, dtype), draw_options(shape)
    hidden_x = jnp.where(options['mask'], x, jnp.nan)
    computes = [functools.partial(softmax, form=form)]
    if held == 'rows':
        computes.append(base.reference)
    for compute in computes:
        assert_matches_softmax(run(compute, hidden_x, g, **options), x, g, **options)


@pytest.mark.full
@pytest.mark.usefixtures('interpret_kernels')
@pytest.mark.parametrize('name', ['mask', 'sink', 'softcap'])
def test_mask_softcap_and_sinks_separately(name):
    """Catches leading axes that are merged with rows although an option depends on the query."""
    shape = (2, 2, 16, 40)
    (x, g), options = draw(shape, 'float32'), draw_options(shape)
    option = {name: options[name]}
    assert_matches_softmax(run(softmax, x, g, **option), x, g, **option)


@pytest.mark.full
@pytest.mark.usefixtures('interpret_kernels', 'small_blocks')
def test_sink_per_row(monkeypatch):
    """More rows than lanes of a register, in one block and in several. Catches numbers written to
    other rows' lanes, or overwritten by a later block of the same lanes.
    """
    x, g = draw((150, 40), 'float32')
    sink = jnp.asarray(np.random.default_rng(1).normal(size=150), jnp.float32)
    assert_matches_softmax(run(softmax, x, g, sink=sink), x, g, sink=sink)
    monkeypatch.setattr(tpu_blocks, 'MAX_ROWS', 1024)
    assert_matches_softmax(run(softmax, x, g, sink=sink), x, g, sink=sink)


def test_pass_is_one_kernel():
    """Forward and backward, with all options. Catches operations beside the kernels on arrays of
    x's size.
    """
    shape = (2, 2, 16, 256)
    (x, g), options = draw(shape, 'float32'), draw_options(shape)

    def softmax_and_gradient(x, sink):
        y, pull = jax.vjp(lambda x, sink: softmax(x, **{**options, 'sink': sink}), x, sink)
        return y, pull(g)

    equations = jax.make_jaxpr(softmax_and_gradient)(x, options['sink']).eqns
    kernels = [equation for equation in equations if 'pallas_call' in str(equation.primitive)]
    names = [str(kernel.params['name']) for kernel in kernels]
    assert names == ['softmax', 'softmax_backward']
    other_equations = [equation for equation in equations if equation not in kernels]
    large = {str(e.primitive) for e in other_equations for v in e.outvars if v.aval.size == x.size}
    assert large <= {'reshape'}, large


@pytest.mark.full
@pytest.mark.usefixtures('interpret_kernels')
def test_softmax_under_vmap_and_scan(monkeypatch):
    """Nested vmaps, one not over the first axis, inside a scan. Catches a rule that mistakes a
    mapped axis for rows, or duplicates the mask for each mapped index.
    """

    # JAX's interpreter, unlike its compiler, needs semantics of mapped axes too.
    def without_semantics(*arguments, **options):
        return call_on_tpu(*arguments, **{**options, 'semantics': None})

    monkeypatch.setattr(tpu_blocks, 'call_on_tpu', without_semantics)
    x, g = draw((2, 2, 6, 3, 40), 'float32')  # [scanned, mapped, T, mapped, S]
    mask = draw_options((1, 1, 6, 40))['mask'][0, 0]

    def total(compute, x):
        def layer(carry, x):
            masked_softmax = functools.partial(
                compute, mask=mask, sink=jnp.float32(0.3), softcap=3.0
            )
            p = jax.vmap(jax.vmap(masked_softmax, in_axes=1, out_axes=1))(x)
            return carry + jnp.sum(p * g[0]), None

        return jax.lax.scan(layer, 0.0, x)[0]

    values_and_gradients = [
        jax.jit(jax.value_and_grad(functools.partial(total, compute)))(x)
        for compute in (softmax, base.reference)
    ]
    for actual, expected in zip(*values_and_gradients, strict=True):
        assert_close(actual, expected, 'float32', 40)


def test_checkpoint_recomputes_softmax():
    """Runs under `jax.checkpoint`, which the interpreter lacks. Catches a pass that fails there, or
    residuals that are kept nevertheless.
    """
    x, g = draw((4, 40), 'float32')
    gradient = jax.grad(lambda x: jnp.sum(g * jax.checkpoint(softmax)(jnp.sin(x))))
    text = str(jax.make_jaxpr(gradient)(x))
    names = re.findall(r'name=(softmax\w*)', text)
    assert sorted(set(names)) == ['softmax', 'softmax_backward']
    assert text.count('pallas_call[') == 3, names


@pytest.mark.full
@pytest.mark.usefixtures('interpret_kernels')
@pytest.mark.parametrize('batch', [4, 3])
def test_softmax_is_sharded(batch):
    """2 x 4 devices agree with one device, also in the sink's gradient; three rows do not divide.
    Catches a sink's gradient from one device's rows only, or counted twice over `run`, and
    unsharded rows.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ('run', 'data'))
    shape = (batch, 2, 5, 40)
    (x, g), options = draw(shape, 'float32'), draw_options(shape)
    compute = trace_on_mesh(
        mesh, lambda x, g, sink: forward_and_gradients(softmax, x, g, **{**options, 'sink': sink})
    )
    rows = batch_sharding(mesh) if batch == 4 else replicated_sharding(mesh)
    shardings = (rows, rows, replicated_sharding(mesh))
    sharded = jax.jit(compute, in_shardings=shardings)
    assert_matches_softmax(sharded(x, g, options['sink']), x, g, **options)
    local_rows = 1 if batch == 4 else 3
    assert f'f32[1,{2 * local_rows},5,40]' in str(jax.make_jaxpr(compute)(x, g, options['sink']))


@pytest.mark.parametrize(
    ('compute', 'words'),
    [
        (lambda x: softmax(x.astype(jnp.float16)), 'bfloat16 and float32; got float16'),
        (
            lambda x: softmax(x, form='rows'),
            "form must be one of online, two_pass; got 'rows'",
        ),
        (lambda x: softmax(x, jnp.ones((3, 8), bool)), r'mask must broadcast to \(4, 8\)'),
        (lambda x: softmax(x, jnp.ones(8)), 'a mask must be boolean.*got float32'),
        (lambda x: softmax(x, sink=jnp.ones(8)), r'sink must broadcast to \(1?,? ?4,?\)'),
    ],
)
def test_bad_input_is_rejected(compute, words):
    """Raised before anything is compiled. Catches an error from the kernel's tracing."""
    with pytest.raises(ValueError, match=words):
        compute(jnp.zeros((4, 8)))
