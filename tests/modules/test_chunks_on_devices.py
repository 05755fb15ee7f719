"""Equivalence: losses by chunks of tokens that lie on several devices are those of all tokens on
one. Property: devices send each other the readout once, and nothing between chunks.
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
CHUNK = 48  # three tokens of each row, or with `context` of each of its parts; the last has fewer
ROWS, SHARDED, BOTH = {'data': 8}, {'fsdp': 8}, {'data': 2, 'fsdp': 2, 'context': 2}
VOCABULARY, EXPERTS = {'data': 2, 'fsdp': 2, 'tensor': 2}, {'data': 2, 'expert': 4}
MESHES = [ROWS, SHARDED, BOTH, {'data': 4, 'tensor': 2}, VOCABULARY, EXPERTS]
FEW = 200  # bytes: sums of the loss


def id_of(sizes):
    return '-'.join(f'{n}{axis}' for axis, n in sizes.items())


def mesh_of(sizes):
    return make_mesh(MeshConfig(**{'data': 1} | sizes))


def problem(dtype='float32', rows=B, tokens=T):
    """(x, the table or matrix [D, V], the bias, labels, weights)."""
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
    """compute(x, W or its table, b, labels, weights) -> (sums, gradients of the first three)."""

    def compute(x, weight, bias, labels, weights):
        def total(x, weight, bias):
            weight_DV = 0.5 * weight.T if tied else weight
            readout = Readout(weight_DV, bias, softcap, direct, x.dtype, is_table=tied)
            sums = loss(x, readout, labels, weights, **numbers)
            return sums[of] / 7, sums

        (_, sums), gradients = jax.value_and_grad(total, (0, 1, 2), has_aux=True)(x, weight, bias)
        return sums, gradients

    return compute


def compiled(mesh, compute, given, tied=False):
    """For a mesh, on which all lies as a training step has it."""
    x, weight, bias, labels, weights = given

    def placed(rules, names, array):
        return NamedSharding(mesh, partition(mesh, rules, names, array.shape))

    of_weight = placed(PARAMETERS, ('vocab', 'embed') if tied else ('embed', 'vocab'), weight)
    differentiated = placed(ACTIVATIONS, 'BTD', x), of_weight, replicated_sharding(mesh)
    of_labels = placed(ACTIVATIONS, 'BT', labels)
    return (
        jax.jit(
            trace_on_mesh(mesh, compute),
            in_shardings=(*differentiated, of_labels, of_labels),
            out_shardings=(replicated_sharding(mesh), differentiated),
        )
        .lower(x, weight, bias, labels, weights)
        .compile()
    )


def on_one(compute, given):
    return jax.jit(compute)(*given)


def assert_close(found, wanted, rtol):
    """Relative to the largest number of each array."""
    for ours, right in zip(jax.tree.leaves(found), jax.tree.leaves(wanted), strict=True):
        ours, right = np.float64(ours), np.float64(right)
        np.testing.assert_allclose(ours, right, rtol=0, atol=rtol * np.abs(right).max())


@functools.cache
def wanted(tied):
    given = problem()
    given = (given[0], given[1].T, *given[2:]) if tied else given
    return given, on_one(value_and_gradients(LOSSES['cross_entropy'], tied), given)


@functools.cache
def program(tied, **sizes):
    loss = chunk_loss(LOSSES['cross_entropy'], CHUNK)
    return compiled(mesh_of(sizes), value_and_gradients(loss, tied), wanted(tied)[0], tied)


@pytest.mark.default_rows('2data-2fsdp-2tensor-own')
@pytest.mark.parametrize('tied', [False, True], ids=['own', 'tied'])
@pytest.mark.parametrize('sizes', MESHES, ids=id_of)
def test_on_a_mesh_it_is_the_loss_on_one_device(sizes, tied):
    """Sums, and gradients in x, the weight or its table, and the bias. Catches a sum over too few
    devices or too many, and a part of the weight that another device should have.
    """
    given, right = wanted(tied)
    assert_close(program(tied, **sizes)(*given), right, 1e-6)


@pytest.mark.full
@pytest.mark.parametrize('name', sorted(LOSSES))
@pytest.mark.parametrize(
    'sizes',
    [
        BOTH,
        *(
            pytest.param(one, marks=pytest.mark.full)
            for one in (VOCABULARY, {'data': 2, 'fsdp': 4})
        ),
    ],
    ids=id_of,
)
def test_every_loss_on_a_mesh(sizes, name):
    """float64. With `context`, a loss of whole rows is left to XLA."""
    softcap = 0.0 if LOSSES[name].linear_readout else 3.0
    with jax.enable_x64(True):
        given = problem('float64')
        right = on_one(value_and_gradients(LOSSES[name], softcap=softcap), given)
        loss = value_and_gradients(chunk_loss(LOSSES[name], CHUNK), softcap=softcap)
        assert_close(compiled(mesh_of(sizes), loss, given)(*given), right, 1e-12)


@pytest.mark.default_rows('2data-2fsdp-2context-own')
@pytest.mark.parametrize('tied', [False, True], ids=['own', 'tied'])
@pytest.mark.parametrize('sizes', [ROWS, SHARDED, BOTH, EXPERTS], ids=id_of)
def test_nothing_is_sent_between_chunks(sizes, tied):
    """The readout is gathered once where it is cut, and its gradient summed once. Catches a loop
    that XLA cuts.
    """
    made = program(tied, **sizes)
    sent = [one for one in list_collectives(Module(made.as_text())) if one.largest > FEW]
    assert ' while(' in made.as_text() and {one.rounds for one in sent} == {1}
    whole, n = D * V * 4, sizes.get('fsdp', 1)
    gathered = [one.bytes for one in sent if one.kind == 'all-gather']
    scattered = [one.bytes for one in sent if one.kind == 'reduce-scatter']
    assert (gathered, scattered) == (([whole], [whole // n]) if n > 1 else ([], []))
    assert max(one.largest for one in sent if one.kind == 'all-reduce') <= whole // n
    assert {one.kind for one in sent} <= {'all-gather', 'reduce-scatter', 'all-reduce'}


def test_the_vocabulary_stays_cut():
    """By `tensor`, inside too: catches a gather of all logits, or of the gradient."""
    sent = list_collectives(Module(program(False, **VOCABULARY).as_text()))
    assert max(one.largest for one in sent) <= D * V * 4 // VOCABULARY['tensor']


@pytest.mark.full
def test_products_are_narrow_and_their_sums_are_not():
    """bfloat16: the weight is gathered as products take it; the gradients of 96 chunks of a device,
    of one token each, are added up in float32, 1e-3 off, where bfloat16 would be 0.1.
    """
    x, weight, bias, labels, weights = problem('bfloat16', 8, 96)
    given = jnp.abs(x), 0.1 * weight, bias, jnp.zeros_like(labels), jnp.ones_like(weights)
    plain, chunks = (chunk_loss(LOSSES['cross_entropy'], chunk) for chunk in (0, 8))
    exact = given[0].astype('float32'), given[1].astype('bfloat16').astype('float32'), *given[2:]
    _, (_, right, _) = on_one(value_and_gradients(plain, softcap=0.0), exact)
    mesh, compute = mesh_of(SHARDED), value_and_gradients(chunks, softcap=0.0)
    _, (_, found, _) = compiled(mesh, compute, given)(*given)
    assert found.dtype == jnp.float32
    np.testing.assert_allclose(found, right, rtol=0, atol=1e-3 * np.abs(right).max())
    text = jax.jit(trace_on_mesh(mesh, compute)).lower(*given).as_text()
    (gather,) = (line for line in text.splitlines() if 'all_gather"' in line)
    assert f'tensor<{D // 8}x{V}xbf16>' in gather and f'tensor<{D}x{V}xbf16>' in gather


@pytest.mark.default_rows('2data-2fsdp-2tensor')
@pytest.mark.parametrize('sizes', [BOTH, VOCABULARY], ids=id_of)
def test_every_term_has_its_gradient(sizes):
    """Not that of the objective, which the forward pass makes."""
    given, numbers = problem(), {'of': 'z_loss', 'z_loss': 0.5}
    right = on_one(value_and_gradients(LOSSES['cross_entropy'], **numbers), given)
    loss = chunk_loss(LOSSES['cross_entropy'], CHUNK)
    found = compiled(mesh_of(sizes), value_and_gradients(loss, **numbers), given)(*given)
    assert_close(found, right, 2e-6)


@pytest.mark.full
@pytest.mark.parametrize('sizes', [SHARDED, VOCABULARY], ids=id_of)
def test_the_kernel_of_cross_entropy_on_a_mesh(sizes, monkeypatch):
    """Inside of a device's own loop, with the error probability beside it. Catches a kernel that
    is cut over the axes that the loop has taken.
    """
    monkeypatch.setattr(tpu, 'ALIASES', {})  # the interpreter's blocks must divide arrays
    kernel = CROSS_ENTROPY_KERNELS['pallas'].for_platform('tpu')
    given, numbers = problem(), {'z_loss': 0.1, 'label_smoothing': 0.0}

    def of(loss):
        return value_and_gradients(add_error_probability(loss), **numbers)

    right = on_one(of(LOSSES['cross_entropy']), given)
    with pltpu.force_tpu_interpret_mode():
        loss = of(chunk_loss(add_error_probability(logits_loss(kernel)), CHUNK))
        found = compiled(mesh_of(sizes), loss, given)(*given)
    assert_close(found, right, 3e-6)


def runs_and_their_gradients(mesh, many, loss):
    """Of two runs, in one program by `many` and one after the other."""
    given = [problem(), tuple(x[::-1] for x in problem())]
    of_both = jax.tree.map(lambda *runs: jnp.stack(runs), *given)
    numbers = {'z_loss': 0.1, 'label_smoothing': 0.0}
    chunks = value_and_gradients(chunk_loss(loss, CHUNK), **numbers)
    over = NamedSharding(mesh, PartitionSpec('run'))
    cut = jax.jit(trace_on_mesh(mesh, many(chunks)), in_shardings=over)
    plain = value_and_gradients(LOSSES['cross_entropy'], **numbers)
    one_by_one = [on_one(plain, own) for own in given]
    return cut(*of_both), jax.tree.map(lambda *runs: jnp.stack(runs), *one_by_one)


def one_after_the_other(mesh, compute):
    """A device's runs, where it is on its own along `run`."""
    return jax.shard_map(
        lambda *given: jax.lax.map(lambda own: compute(*own), given),
        mesh=mesh,
        in_specs=PartitionSpec('run'),
        out_specs=PartitionSpec('run'),
        axis_names={'run'},
        check_vma=False,
    )


@pytest.mark.full
@pytest.mark.parametrize('how', ['vmap', 'loop', 'vmap of kernels'])
@pytest.mark.parametrize('sizes', [{'data': 2, 'fsdp': 2}, {'fsdp': 2, 'tensor': 2}], ids=id_of)
def test_runs_of_a_sweep(sizes, how, monkeypatch):
    """Catches an axis of runs that is cut twice."""
    monkeypatch.setattr(tpu, 'ALIASES', {})
    mesh = make_mesh(MeshConfig(**{'data': 1, 'run': 2} | sizes), runs=2)
    many, loss = functools.partial(jax.vmap, spmd_axis_name='run'), LOSSES['cross_entropy']
    if how == 'loop':
        many = functools.partial(one_after_the_other, mesh)
    if how == 'vmap of kernels':
        loss = logits_loss(CROSS_ENTROPY_KERNELS['pallas'].for_platform('tpu'))
    with pltpu.force_tpu_interpret_mode():
        assert_close(*runs_and_their_gradients(mesh, many, loss), 3e-6)


@pytest.mark.default_rows('2data-2fsdp-2context')
@pytest.mark.parametrize('sizes', [ROWS, BOTH], ids=id_of)
def test_gradients_have_derivatives(sizes):
    """Forward over reverse, as `sophia_h` has it, and reverse over reverse."""
    x, weight, bias, labels, weights = problem()

    def slope(loss, weight):
        readout = Readout(weight, bias, 0.0, direct, jnp.dtype('float32'))
        return jax.grad(lambda r: loss(x, r, labels, weights)['objective'])(readout).weight_DV

    def both(loss, weight):
        forward = jax.jvp(functools.partial(slope, loss), (weight,), (jnp.cos(weight),))[1]
        return forward, jax.grad(lambda w: jnp.sum(slope(loss, w) * jnp.cos(weight)))(weight)

    plain, chunks = (chunk_loss(LOSSES['cross_entropy'], chunk) for chunk in (0, CHUNK))
    right = on_one(functools.partial(both, plain), (weight,))
    cut = trace_on_mesh(mesh_of(sizes), functools.partial(both, chunks))
    found = jax.jit(cut, in_shardings=replicated_sharding(mesh_of(sizes)))(weight)
    assert_close(found, right, 3e-6)


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
def test_what_devices_cannot_go_through_alone_is_left_to_xla(sizes, rows, tokens, name):
    """Explicitly, and with the same numbers. Catches rows that are filled up or lost."""
    given = problem('float32', rows, tokens)
    compute = value_and_gradients(chunk_loss(LOSSES[name], 12))
    devices = jax.devices()[:1] if sizes == {'data': 1} else None
    mesh = make_mesh(MeshConfig(**{'data': 1} | sizes), devices)
    cut = jax.jit(trace_on_mesh(mesh, compute), in_shardings=replicated_sharding(mesh))
    assert 'manual' not in cut.lower(*given).as_text()
    assert_close(cut(*given), on_one(value_and_gradients(LOSSES[name]), given), 2e-6)


def test_a_caller_on_each_device_has_its_tokens_alone():
    """Of an enclosing `shard_map`. Catches a sum over devices of a caller that wants its own."""
    mesh, seen = mesh_of(ROWS), []

    def on_device(x):
        seen.append(token_spec(x.shape[:2], False))
        return x

    rows = PartitionSpec('data')
    jax.eval_shape(
        jax.shard_map(on_device, mesh=mesh, in_specs=rows, out_specs=rows), jnp.ones((B, T, D))
    )
    assert seen == [None]
