"""Equivalence: losses by chunks of sharded tokens match the loss of all tokens on one device.
Property: devices exchange the readout once, and nothing between chunks.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.sharding import NamedSharding, PartitionSpec

from lm.config.fields import MeshConfig
from lm.devices.mesh import make_mesh, replicated_sharding, trace_on_mesh
from modules.kernels.cross_entropy import CROSS_ENTROPY_KERNELS, tpu
from modules.kernels.matmul import direct
from modules.losses import LOSSES, add_error_probability, chunk_loss, logits_loss
from modules.parallel.axes import ACTIVATIONS, PARAMETERS, partition
from modules.parallel.loss_sums import token_spec
from modules.products import Readout
from tpu.collectives import list_collectives
from tpu.hlo import Module

B, T, D, V = 16, 12, 16, 64
CHUNK = 48  # three tokens of each row, or of each shard with `context`; the last has fewer
ROWS, SHARDED, BOTH = {'data': 8}, {'fsdp': 8}, {'data': 2, 'fsdp': 2, 'context': 2}
VOCABULARY, EXPERTS = {'data': 2, 'fsdp': 2, 'tensor': 2}, {'data': 2, 'expert': 4}
MESHES = [ROWS, SHARDED, BOTH, {'data': 4, 'tensor': 2}, VOCABULARY, EXPERTS]
FEW = 200  # bytes: sums of the loss


def mesh_id(sizes):
    return '-'.join(f'{n}{axis}' for axis, n in sizes.items())


def make_test_mesh(sizes):
    return make_mesh(MeshConfig(**{'data': 1} | sizes))


def draw_problem(dtype='float32', rows=B, tokens=T):
    """Draws (x, the table or matrix [D, V], the bias, labels, weights)."""
    rng = np.random.default_rng(0)
    stored = jnp.promote_types(dtype, jnp.float32)
    return (
        jnp.asarray(rng.normal(size=(rows, tokens, D)), dtype),
        jnp.asarray(rng.normal(size=(D, V)), stored),
        jnp.asarray(rng.normal(size=V), stored),
        jnp.asarray(rng.integers(0, V, (rows, tokens))),
        jnp.asarray(rng.integers(0, 2, (rows, tokens)), stored),
    )


def value_and_gradients(loss, tied=False, softcap=3.0, of='objective', **numbers):
    """Returns (x, weight or table, b, labels, weights) -> (sums, gradients of the first three)."""

    def compute(x, weight, bias, labels, weights):
        def total(x, weight, bias):
            weight_DV = 0.5 * weight.T if tied else weight
            readout = Readout(weight_DV, bias, softcap, direct, x.dtype, is_table=tied)
            sums = loss(x, readout, labels, weights, **numbers)
            return sums[of] / 7, sums

        (_, sums), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, weight, bias)
        return sums, gradients

    return compute


def compile_on_mesh(mesh, compute, arrays, tied=False):
    """Compiles for a mesh, with the shardings of a training step."""
    x, weight, bias, labels, weights = arrays

    def sharding(rules, names, array):
        return NamedSharding(mesh, partition(mesh, rules, names, array.shape))

    weight_sharding = sharding(
        PARAMETERS, ('vocab', 'embed') if tied else ('embed', 'vocab'), weight
    )
    differentiated = sharding(ACTIVATIONS, 'BTD', x), weight_sharding, replicated_sharding(mesh)
    label_sharding = sharding(ACTIVATIONS, 'BT', labels)
    return (
        jax.jit(
            trace_on_mesh(mesh, compute),
            in_shardings=(*differentiated, label_sharding, label_sharding),
            out_shardings=(replicated_sharding(mesh), differentiated),
        )
        .lower(x, weight, bias, labels, weights)
        .compile()
    )


def run_on_one_device(compute, arrays):
    return jax.jit(compute)(*arrays)


def assert_close(actual, expected, rtol):
    """Checks relative to the largest number of each array."""
    for actual_array, expected_array in zip(
        jax.tree.leaves(actual), jax.tree.leaves(expected), strict=True
    ):
        actual_array, expected_array = np.float64(actual_array), np.float64(expected_array)
        np.testing.assert_allclose(
            actual_array, expected_array, rtol=0, atol=rtol * np.abs(expected_array).max()
        )


@functools.cache
def expected_loss(tied):
    arrays = draw_problem()
    arrays = (arrays[0], arrays[1].T, *arrays[2:]) if tied else arrays
    return arrays, run_on_one_device(value_and_gradients(LOSSES['cross_entropy'], tied), arrays)


@functools.cache
def program(tied, **sizes):
    loss = chunk_loss(LOSSES['cross_entropy'], CHUNK)
    return compile_on_mesh(
        make_test_mesh(sizes), value_and_gradients(loss, tied), expected_loss(tied)[0], tied
    )


@pytest.mark.default_rows('2data-2fsdp-2tensor-own')
@pytest.mark.parametrize('tied', [False, True], ids=['own', 'tied'])
@pytest.mark.parametrize('sizes', MESHES, ids=mesh_id)
def test_loss_on_mesh_matches_one_device(sizes, tied):
    """Sums, and gradients by x, the weight or its table, and the bias. Catches a sum over too few
    devices or too many, and a shard of the weight that belongs to another device.
    """
    arrays, expected = expected_loss(tied)
    assert_close(program(tied, **sizes)(*arrays), expected, 1e-6)


@pytest.mark.full
@pytest.mark.parametrize('name', sorted(LOSSES))
@pytest.mark.parametrize(
    'sizes',
    [
        BOTH,
        *(
            pytest.param(sizes, marks=pytest.mark.full)
            for sizes in (VOCABULARY, {'data': 2, 'fsdp': 4})
        ),
    ],
    ids=mesh_id,
)
def test_every_loss_on_a_mesh(sizes, name):
    """Compares in float64. With `context`, a loss of whole rows is left to XLA."""
    softcap = 0.0 if LOSSES[name].linear_readout else 3.0
    with jax.enable_x64(True):
        arrays = draw_problem('float64')
        expected = run_on_one_device(value_and_gradients(LOSSES[name], softcap=softcap), arrays)
        loss = value_and_gradients(chunk_loss(LOSSES[name], CHUNK), softcap=softcap)
        assert_close(compile_on_mesh(make_test_mesh(sizes), loss, arrays)(*arrays), expected, 1e-12)


@pytest.mark.default_rows('2data-2fsdp-2context-own')
@pytest.mark.parametrize('tied', [False, True], ids=['own', 'tied'])
@pytest.mark.parametrize('sizes', [ROWS, SHARDED, BOTH, EXPERTS], ids=mesh_id)
def test_chunks_need_no_communication(sizes, tied):
    """A sharded readout is gathered once, and its gradient summed once. Catches a loop sharded by
    XLA.
    """
    text = program(tied, **sizes).as_text()
    collectives = [c for c in list_collectives(Module(text)) if c.largest > FEW]
    assert ' while(' in text and {c.rounds for c in collectives} == {1}
    whole, n = D * V * 4, sizes.get('fsdp', 1)
    gathered = [c.bytes for c in collectives if c.kind == 'all-gather']
    scattered = [c.bytes for c in collectives if c.kind == 'reduce-scatter']
    assert (gathered, scattered) == (([whole], [whole // n]) if n > 1 else ([], []))
    assert max(c.largest for c in collectives if c.kind == 'all-reduce') <= whole // n
    assert {c.kind for c in collectives} <= {'all-gather', 'reduce-scatter', 'all-reduce'}


def test_vocabulary_stays_sharded():
    """It is sharded over `tensor`, inside the loop too. Catches a gather of all logits, or of the
    gradient.
    """
    collectives = list_collectives(Module(program(False, **VOCABULARY).as_text()))
    assert max(c.largest for c in collectives) <= D * V * 4 // VOCABULARY['tensor']


@pytest.mark.full
def test_narrow_products_have_wide_sums():
    """bfloat16: the weight is gathered in the type of products. The gradients of 96 chunks of a
    device, of one token each, are added in float32, 1e-3 off, where bfloat16 would be 0.1 off.
    """
    x, weight, bias, labels, weights = draw_problem('bfloat16', 8, 96)
    arrays = jnp.abs(x), 0.1 * weight, bias, jnp.zeros_like(labels), jnp.ones_like(weights)
    plain, chunks = (chunk_loss(LOSSES['cross_entropy'], chunk) for chunk in (0, 8))
    exact = arrays[0].astype('float32'), arrays[1].astype('bfloat16').astype('float32'), *arrays[2:]
    _, (_, expected, _) = run_on_one_device(value_and_gradients(plain, softcap=0.0), exact)
    mesh, compute = make_test_mesh(SHARDED), value_and_gradients(chunks, softcap=0.0)
    _, (_, actual, _) = compile_on_mesh(mesh, compute, arrays)(*arrays)
    assert actual.dtype == jnp.float32
    np.testing.assert_allclose(actual, expected, rtol=0, atol=1e-3 * np.abs(expected).max())
    text = jax.jit(trace_on_mesh(mesh, compute)).lower(*arrays).as_text()
    (gather,) = (line for line in text.splitlines() if 'all_gather"' in line)
    assert f'tensor<{D // 8}x{V}xbf16>' in gather and f'tensor<{D}x{V}xbf16>' in gather


@pytest.mark.default_rows('2data-2fsdp-2tensor')
@pytest.mark.parametrize('sizes', [BOTH, VOCABULARY], ids=mesh_id)
def test_every_term_has_a_gradient(sizes):
    """Besides the objective's, which the forward pass computes."""
    arrays, numbers = draw_problem(), {'of': 'z_loss', 'z_loss': 0.5}
    expected = run_on_one_device(value_and_gradients(LOSSES['cross_entropy'], **numbers), arrays)
    loss = chunk_loss(LOSSES['cross_entropy'], CHUNK)
    actual = compile_on_mesh(make_test_mesh(sizes), value_and_gradients(loss, **numbers), arrays)(
        *arrays
    )
    assert_close(actual, expected, 2e-6)


@pytest.mark.full
@pytest.mark.parametrize('sizes', [SHARDED, VOCABULARY], ids=mesh_id)
def test_fused_loss_on_mesh(sizes, monkeypatch):
    """Inside a device's own loop, beside the error probability. Catches a kernel that is sharded
    over axes that the loop already uses.
    """
    monkeypatch.setattr(tpu, 'ALIASES', {})  # the interpreter's blocks must divide arrays
    kernel = CROSS_ENTROPY_KERNELS['pallas'].for_platform('tpu')
    arrays, numbers = draw_problem(), {'z_loss': 0.1, 'label_smoothing': 0.0}

    def differentiate(loss):
        return value_and_gradients(add_error_probability(loss), **numbers)

    expected = run_on_one_device(differentiate(LOSSES['cross_entropy']), arrays)
    with pltpu.force_tpu_interpret_mode():
        loss = differentiate(chunk_loss(add_error_probability(logits_loss(kernel)), CHUNK))
        actual = compile_on_mesh(make_test_mesh(sizes), loss, arrays)(*arrays)
    assert_close(actual, expected, 3e-6)


def compute_runs(mesh, many, loss):
    """Computes two runs, in one program by `many` and one after the other."""
    problems = [draw_problem(), tuple(x[::-1] for x in draw_problem())]
    stacked = jax.tree.map(lambda *runs: jnp.stack(runs), *problems)
    numbers = {'z_loss': 0.1, 'label_smoothing': 0.0}
    chunks = value_and_gradients(chunk_loss(loss, CHUNK), **numbers)
    run_sharding = NamedSharding(mesh, PartitionSpec('run'))
    sharded = jax.jit(trace_on_mesh(mesh, many(chunks)), in_shardings=run_sharding)
    plain = value_and_gradients(LOSSES['cross_entropy'], **numbers)
    expected = [run_on_one_device(plain, problem) for problem in problems]
    return sharded(*stacked), jax.tree.map(lambda *runs: jnp.stack(runs), *expected)


def map_runs(mesh, compute):
    """Loops over a device's runs, each device separately along `run`."""
    return jax.shard_map(
        lambda *arrays: jax.lax.map(lambda run: compute(*run), arrays),
        mesh=mesh,
        in_specs=PartitionSpec('run'),
        out_specs=PartitionSpec('run'),
        axis_names={'run'},
        check_vma=False,
    )


@pytest.mark.full
@pytest.mark.parametrize('way', ['vmap', 'loop', 'vmap of kernels'])
@pytest.mark.parametrize('sizes', [{'data': 2, 'fsdp': 2}, {'fsdp': 2, 'tensor': 2}], ids=mesh_id)
def test_sweep_runs_on_mesh(sizes, way, monkeypatch):
    """Catches an axis of runs that is sharded twice."""
    monkeypatch.setattr(tpu, 'ALIASES', {})
    mesh = make_mesh(MeshConfig(**{'data': 1, 'run': 2} | sizes), runs=2)
    map_all, loss = functools.partial(jax.vmap, spmd_axis_name='run'), LOSSES['cross_entropy']
    if way == 'loop':
        map_all = functools.partial(map_runs, mesh)
    if way == 'vmap of kernels':
        loss = logits_loss(CROSS_ENTROPY_KERNELS['pallas'].for_platform('tpu'))
    with pltpu.force_tpu_interpret_mode():
        assert_close(*compute_runs(mesh, map_all, loss), 3e-6)


@pytest.mark.default_rows('2data-2fsdp-2context')
@pytest.mark.parametrize('sizes', [ROWS, BOTH], ids=mesh_id)
def test_gradients_have_derivatives(sizes):
    """Forward over reverse, as `sophia_h` has it, and reverse over reverse."""
    x, weight, bias, labels, weights = draw_problem()

    def slope(loss, weight):
        readout = Readout(weight, bias, 0.0, direct, jnp.dtype('float32'))
        return jax.grad(lambda r: loss(x, r, labels, weights)['objective'])(readout).weight_DV

    def derivatives(loss, weight):
        forward = jax.jvp(functools.partial(slope, loss), (weight,), (jnp.cos(weight),))[1]
        return forward, jax.grad(lambda w: jnp.sum(slope(loss, w) * jnp.cos(weight)))(weight)

    plain, chunks = (chunk_loss(LOSSES['cross_entropy'], chunk) for chunk in (0, CHUNK))
    expected = run_on_one_device(functools.partial(derivatives, plain), (weight,))
    sharded = trace_on_mesh(make_test_mesh(sizes), functools.partial(derivatives, chunks))
    actual = jax.jit(sharded, in_shardings=replicated_sharding(make_test_mesh(sizes)))(weight)
    assert_close(actual, expected, 3e-6)


@pytest.mark.default_rows('whole rows')
@pytest.mark.parametrize(
    ('sizes', 'rows', 'tokens', 'name'),
    [
        (ROWS, 3, 12, 'cross_entropy'),
        (BOTH, 4, 9, 'cross_entropy'),
        (BOTH, 4, 12, 'dco'),
        ({'data': 1}, 4, 12, 'cross_entropy'),
    ],
    ids=['rows', 'tokens', 'whole rows', 'one device'],
)
def test_indivisible_tokens_are_left_to_xla(sizes, rows, tokens, name):
    """XLA shards them without manual axes, with equal numbers. Catches rows that are padded or
    lost.
    """
    arrays = draw_problem('float32', rows, tokens)
    compute = value_and_gradients(chunk_loss(LOSSES[name], 12))
    devices = jax.devices()[:1] if sizes == {'data': 1} else None
    mesh = make_mesh(MeshConfig(**{'data': 1} | sizes), devices)
    sharded = jax.jit(trace_on_mesh(mesh, compute), in_shardings=replicated_sharding(mesh))
    assert 'manual' not in sharded.lower(*arrays).as_text()
    assert_close(
        sharded(*arrays), run_on_one_device(value_and_gradients(LOSSES[name]), arrays), 2e-6
    )


def test_enclosing_shard_map_keeps_tokens_local():
    """Catches a sum over devices for a caller that needs the sum of its own tokens."""
    mesh, specs = make_test_mesh(ROWS), []

    def on_device(x):
        specs.append(token_spec(x.shape[:2], False))
        return x

    rows = PartitionSpec('data')
    jax.eval_shape(
        jax.shard_map(on_device, mesh=mesh, in_specs=rows, out_specs=rows), jnp.ones((B, T, D))
    )
    assert specs == [None]
