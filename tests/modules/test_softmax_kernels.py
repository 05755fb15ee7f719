"""Reference: softmax, in plain operations and as a TPU kernel (interpreted), and its gradient are
those of closed forms in float64. Equivalence: the forms of the kernels, mapped,
scanned, computed again, and cut over devices. Contract: one kernel forward, one backward; bad input
is refused.
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
def interpreted():
    with pltpu.force_tpu_interpret_mode():
        yield


def softmax_exactly(x, g, mask=True, sink=None, softcap=0.0):
    """(p, dx, dsink in the shape of the rows) in float64."""
    x, g = (np.asarray(a, np.float64) for a in (x, g))
    bounded = np.tanh(x / softcap) if softcap else np.zeros_like(x)
    z = np.where(mask, softcap * bounded if softcap else x, -np.inf)
    lanes = z if sink is None else np.concatenate([z, sink_column(sink, x)], -1)
    top = np.max(lanes, -1, keepdims=True)
    top[top == -np.inf] = 0
    terms = np.exp(lanes - top)
    total = np.sum(terms, -1, keepdims=True)
    p = terms / np.where(total == 0, 1, total)
    p, taken = p[..., : x.shape[-1]], p[..., -1]
    mean = np.sum(p * g, -1, keepdims=True)
    return p, p * (g - mean) * (1 - bounded**2), -taken * mean[..., 0]


def sink_column(sink, x):
    return np.broadcast_to(np.asarray(sink, np.float64), x.shape[:-1])[..., None]


def draw(shape, dtype, spread='usual'):
    """x and a cotangent; with spread `wild`, rows at 1e4 and -1e4, scaled by 2000, with entries and
    all of -inf, in turns.
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


def everything(shape, seed=0):
    """All of what queries may be given: a sink of each head, and the mask of all heads, by which a
    query sees some of the earlier keys of its document; one sees nothing.
    """
    rng = np.random.default_rng(seed)
    batch, heads, queries, keys = shape
    mask = np.tril(rng.random((batch, 1, queries, keys)) < 0.7, keys - queries)
    mask[:, :, queries // 2] = False
    of_queries, of_keys = (np.sort(rng.integers(0, 3, (batch, 1, n)), -1) for n in (queries, keys))
    mask &= of_queries[..., None] == of_keys[..., None, :]
    sink = jnp.asarray(rng.normal(size=(heads, 1)), jnp.float32)
    return {'mask': jnp.asarray(mask), 'sink': sink, 'softcap': 2.0}


def with_gradients(compute, x, g, sink=None, **more):
    """The output, dx, and dsink where there is a sink."""
    if sink is None:
        out, pull = jax.vjp(lambda x: compute(x, **more), x)
    else:
        out, pull = jax.vjp(lambda x, sink: compute(x, sink=sink, **more), x, sink)
    return out, *pull(g)


def run(compute, x, g, **more):
    return jax.jit(lambda x, g: with_gradients(compute, x, g, **more))(x, g)


def assert_close(actual, wanted, dtype, width, least=1e-2):
    """To 4 roundings of the type, and sqrt(width) / 4 of float32, of the largest number, or of
    `least` where that is more.
    """
    error = 4 * ROUNDING[dtype] + np.sqrt(width) / 4 * ROUNDING['float32']
    actual, wanted = (np.asarray(a, np.float64) for a in (actual, wanted))
    assert actual.shape == wanted.shape
    atol = error * max(np.abs(wanted).max(), least)
    np.testing.assert_allclose(actual, wanted, rtol=0, atol=atol)


def assert_is_softmax(ours, x, g, **more):
    """ours: what `run` returns, of x where it is seen."""
    p, dx, rows_dsink = softmax_exactly(x, g, **more)
    assert [a.dtype for a in ours[:2]] == [x.dtype] * 2
    assert_close(ours[0], p, x.dtype.name, x.shape[-1])
    assert_close(ours[1], dx, x.dtype.name, x.shape[-1])
    if 'sink' in more:
        sink = more['sink']
        own = (1,) * (x.ndim - 1 - sink.ndim) + sink.shape
        shared = tuple(axis for axis, length in enumerate(own) if length == 1)
        dsink = rows_dsink.sum(shared, keepdims=True).reshape(sink.shape)
        least = np.sqrt(rows_dsink.size / sink.size) * np.abs(rows_dsink).max()
        assert_close(ours[2], dsink, x.dtype.name, x.shape[-1], least)


PLAIN = [
    ((7, 1), 'float32', 'online', 'rows'),
    ((2, 5, 42), 'bfloat16', 'online', 'rows'),
    ((10, 1000), 'float32', 'two_pass', 'rows'),
    ((5, 4097), 'bfloat16', 'online', 'blocks'),
    ((5, 4097), 'float32', 'two_pass', 'blocks'),
    ((1, 50257), 'float32', 'online', 'blocks'),
]


@pytest.fixture
def in_memory(monkeypatch, held):
    """A TPU's fast memory that holds whole rows, or `blocks` of their columns alone."""
    if held == 'blocks':
        monkeypatch.setattr(tpu, 'max_columns', lambda *_: 0)


@pytest.mark.default_rows('(2, 5, 42)-bfloat16-online-rows', '(5, 4097)-float32-two_pass-blocks')
@pytest.mark.usefixtures('interpreted', 'in_memory')
@pytest.mark.parametrize(('shape', 'dtype', 'form', 'held'), PLAIN, ids=str)
def test_softmax_is_exact(shape, dtype, form, held):
    """Rows at 1e4 and -1e4, scaled by 2000, with -inf and of it alone. Catches no or a wrong
    shift, NaN of -inf less itself, a tail of columns that counts, a sum in bfloat16.
    """
    x, g = draw(shape, dtype, 'wild')
    for compute in (base.reference, functools.partial(softmax, form=form)):
        assert_is_softmax(run(compute, x, g), x, g)


@pytest.fixture
def small_blocks(monkeypatch):
    """So that a small array has several blocks: 64 rows of 128 columns."""
    monkeypatch.setattr(tpu, 'COLUMNS', 128)
    monkeypatch.setattr(tpu_blocks, 'MAX_ROWS', 64)


@pytest.mark.full
@pytest.mark.usefixtures('interpreted', 'in_memory', 'small_blocks')
@pytest.mark.parametrize(
    ('held', 'form', 'dtype'),
    [
        ('rows', 'online', 'float32'),
        ('blocks', 'online', 'bfloat16'),
        ('blocks', 'two_pass', 'float32'),
    ],
)
def test_what_queries_see_cap_and_lose_to_sinks(held, form, dtype):
    """All at once, in blocks that end in the middle of rows, of columns and of a register's lanes;
    what is hidden is NaN. Catches sinks of other rows or heads, a mask of another block, a softcap
    without its derivative, a sink without its gradient, NaN of a row that sees nothing.
    """
    shape = (1, 2, 150, 200)
    (x, g), more = draw(shape, dtype), everything(shape)
    hidden_x = jnp.where(more['mask'], x, jnp.nan)
    computes = [functools.partial(softmax, form=form)]
    if held == 'rows':
        computes.append(base.reference)
    for compute in computes:
        assert_is_softmax(run(compute, hidden_x, g, **more), x, g, **more)


@pytest.mark.full
@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize('name', ['mask', 'sink', 'softcap'])
def test_what_queries_see_cap_and_lose_alone(name):
    """Catches leading axes that are taken for rows where one of these counts queries."""
    shape = (2, 2, 16, 40)
    (x, g), more = draw(shape, 'float32'), everything(shape)
    alone = {name: more[name]}
    assert_is_softmax(run(softmax, x, g, **alone), x, g, **alone)


@pytest.mark.full
@pytest.mark.usefixtures('interpreted', 'small_blocks')
def test_a_sink_of_every_row(monkeypatch):
    """More rows than lanes of one register, in one block and in several. Catches numbers of rows
    that are put into others' lanes, or that a later block of the same lanes wipes out.
    """
    x, g = draw((150, 40), 'float32')
    sink = jnp.asarray(np.random.default_rng(1).normal(size=150), jnp.float32)
    assert_is_softmax(run(softmax, x, g, sink=sink), x, g, sink=sink)
    monkeypatch.setattr(tpu_blocks, 'MAX_ROWS', 1024)
    assert_is_softmax(run(softmax, x, g, sink=sink), x, g, sink=sink)


def test_a_pass_is_one_kernel():
    """Forward and backward, whatever is asked. Catches operations beside the kernels on arrays of
    x's size.
    """
    shape = (2, 2, 16, 256)
    (x, g), more = draw(shape, 'float32'), everything(shape)

    def softmax_and_gradient(x, sink):
        out, pull = jax.vjp(lambda x, sink: softmax(x, **{**more, 'sink': sink}), x, sink)
        return out, pull(g)

    equations = jax.make_jaxpr(softmax_and_gradient)(x, more['sink']).eqns
    kernels = [equation for equation in equations if 'pallas_call' in str(equation.primitive)]
    names = [str(kernel.params['name']) for kernel in kernels]
    assert names == ['softmax', 'softmax_backward']
    others = [equation for equation in equations if equation not in kernels]
    large = {str(e.primitive) for e in others for v in e.outvars if v.aval.size == x.size}
    assert large <= {'reshape'}, large


@pytest.mark.full
@pytest.mark.usefixtures('interpreted')
def test_softmax_maps_and_scans(monkeypatch):
    """Under vmap in vmap, of which one is not of the first axis, in a scan. Catches a rule that
    takes a mapped axis for rows, or a mask for one of each of the mapped.
    """

    # JAX's interpreter, other than its compiler, wants semantics of mapped axes too.
    def without_semantics(*arguments, **options):
        return call_on_tpu(*arguments, **{**options, 'semantics': None})

    monkeypatch.setattr(tpu_blocks, 'call_on_tpu', without_semantics)
    x, g = draw((2, 2, 6, 3, 40), 'float32')  # [scanned, mapped, T, mapped, S]
    mask = everything((1, 1, 6, 40))['mask'][0, 0]

    def total(compute, x):
        def layer(carry, x):
            each = functools.partial(compute, mask=mask, sink=jnp.float32(0.3), softcap=3.0)
            p = jax.vmap(jax.vmap(each, in_axes=1, out_axes=1))(x)
            return carry + jnp.sum(p * g[0]), None

        return jax.lax.scan(layer, 0.0, x)[0]

    results = [
        jax.jit(jax.value_and_grad(functools.partial(total, compute)))(x)
        for compute in (softmax, base.reference)
    ]
    for ours, right in zip(*results, strict=True):
        assert_close(ours, right, 'float32', 40)


def test_softmax_is_computed_again():
    """Under `jax.checkpoint`, which the interpreter lacks. Catches a pass that cannot be, or what
    it saves kept all the same.
    """
    x, g = draw((4, 40), 'float32')
    gradient = jax.grad(lambda x: jnp.sum(g * jax.checkpoint(softmax)(jnp.sin(x))))
    text = str(jax.make_jaxpr(gradient)(x))
    names = re.findall(r'name=(softmax\w*)', text)
    assert sorted(set(names)) == ['softmax', 'softmax_backward']
    assert text.count('pallas_call[') == 3, names


@pytest.mark.full
@pytest.mark.usefixtures('interpreted')
@pytest.mark.parametrize('batch', [4, 3])
def test_softmax_is_cut_over_the_devices_of_a_mesh(batch):
    """On 2 x 4 devices as on one, the sink's gradient too; three rows do not divide. Catches a
    sink's gradient of one device's rows, or of those of `run` twice, and rows that are not cut.
    """
    mesh = jax.sharding.Mesh(np.array(jax.devices()).reshape(2, 4), ('run', 'data'))
    shape = (batch, 2, 5, 40)
    (x, g), more = draw(shape, 'float32'), everything(shape)
    compute = trace_on_mesh(
        mesh, lambda x, g, sink: with_gradients(softmax, x, g, **{**more, 'sink': sink})
    )
    rows = batch_sharding(mesh) if batch == 4 else replicated_sharding(mesh)
    shardings = (rows, rows, replicated_sharding(mesh))
    cut = jax.jit(compute, in_shardings=shardings)
    assert_is_softmax(cut(x, g, more['sink']), x, g, **more)
    rows_each = 1 if batch == 4 else 3
    assert f'f32[1,{2 * rows_each},5,40]' in str(jax.make_jaxpr(compute)(x, g, more['sink']))


@pytest.mark.parametrize(
    ('compute', 'words'),
    [
        (lambda x: softmax(x.astype(jnp.float16)), 'bfloat16 and float32; got float16'),
        (
            lambda x: softmax(x, form='rows'),
            "form must be one of online, two_pass; got 'rows'",
        ),
        (lambda x: softmax(x, jnp.ones((3, 8), bool)), r'mask must broadcast to \(4, 8\)'),
        (lambda x: softmax(x, jnp.ones(8)), 'a mask is boolean.*got float32'),
        (lambda x: softmax(x, sink=jnp.ones(8)), r'sink must broadcast to \(1?,? ?4,?\)'),
    ],
)
def test_bad_input_is_refused(compute, words):
    """In words, before anything is compiled. Catches an error out of the kernel's tracing."""
    with pytest.raises(ValueError, match=words):
        compute(jnp.zeros((4, 8)))
