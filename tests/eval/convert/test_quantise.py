"""Reference: each method in plain loops. Property: GPTQ has a smaller error of outputs than nearest
values, BAQ's inputs have equal losses. Contract: models and flags that are refused.
"""

import dataclasses
import itertools
import shutil

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.convert import __main__ as convert
from eval.convert.fold import write_workdir
from eval.convert.learned_rounding import make_problem
from eval.convert.prune import read_text_rows, to_weights
from eval.convert.quantise import (
    METHODS,
    ROW_LENGTH,
    Quantisation,
    Quantiser,
    allocate_bits,
    distribute_levels,
    find_exponent,
    gptq,
    round_to_nearest,
    round_to_powers,
)
from eval.convert.scores import DAMPING
from eval.load import load
from lm.config.fields import MeshConfig
from lm.data.tokenizers import ByteTokenizer
from lm.devices.mesh import make_mesh
from lm.devices.shardings import abstract_state
from lm.record.checkpoint import read_meta, read_state
from lm.record.digests import DamagedCheckpoint
from lm.storage.filling import MARK, PARTS
from lm.training.state import Weights
from modules.params import as_matrices, named_leaves
from modules.precision.codes import (
    OutputGrid,
    PackedWeight,
    measure_ranges,
    pack,
    unpack,
    unpack_weight,
)
from tests.eval.convert.test_commands import checkpoint
from tests.helpers import tiny_learner

RNG = np.random.default_rng
INPUTS, OUTPUTS = 24, 10
WEIGHTS = RNG(0).normal(size=(INPUTS, OUTPUTS))
X = RNG(1).normal(size=(200, INPUTS)) @ RNG(2).normal(size=(INPUTS, INPUTS))
MOMENTS = X.T @ X / len(X)
FLOAT32 = 1e-6  # rounding of the ends of a grid


def round_output(column, bits):
    """Rounds the weights of one output, in plain Python."""
    low, high = min(min(column), 0.0), max(max(column), 0.0)
    scale = (high - low) / (2**bits - 1)
    zero = round(-low / scale)
    return [scale * (min(max(round(w / scale) + zero, 0), 2**bits - 1) - zero) for w in column]


@pytest.mark.parametrize('bits', [2, 4, 8])
@pytest.mark.parametrize('block', [0, 8, 7])
def test_rounding_to_nearest(bits, block):
    """Catches a scale of inputs in place of outputs, and a block that is left out."""
    size, expected = block or INPUTS, np.empty_like(WEIGHTS)
    for o in range(OUTPUTS):
        for i in range(0, INPUTS, size):
            expected[i : i + size, o] = round_output(list(WEIGHTS[i : i + size, o]), bits)
    rounded = round_to_nearest(WEIGHTS, bits, block).values()
    np.testing.assert_allclose(rounded, expected, atol=FLOAT32)


def round_on_grid(levels, weights, values):
    """Rounds values on the grid of some weights."""
    grid = OutputGrid(measure_ranges(weights, levels), levels)
    return grid.decode(grid.encode(values))


def test_grid_has_zero_and_its_ends():
    """Of positive weights too; a single level is the mean; zeros stay."""
    positive = np.abs(WEIGHTS) + 1
    rounded = round_to_nearest(positive, 4, 0).values()
    assert np.all(np.isclose(rounded.max(0), positive.max(0)))
    assert round_on_grid(16, positive, np.zeros((1, OUTPUTS))) == pytest.approx(0.0)
    assert np.all(np.isclose(round_on_grid(1, positive, positive), positive.mean(0)))
    assert not round_to_nearest(np.zeros((4, 3)), 4, 0).values().any()


def test_powers():
    """An exponent of 1 is an even grid; a smaller one has finer steps near 0. The best exponent of
    Gaussian weights in four bits is below 1.
    """
    scale = np.abs(WEIGHTS).max(0) / 7
    even = round_to_powers(WEIGHTS, 4, 0, 1.0).values()
    np.testing.assert_allclose(even, scale * np.round(WEIGHTS / scale), atol=FLOAT32)
    c = np.round(7 * np.sqrt(np.abs(WEIGHTS) / np.abs(WEIGHTS).max(0)))
    expected = np.sign(WEIGHTS) * np.abs(WEIGHTS).max(0) * (c / 7) ** 2
    roots = round_to_powers(WEIGHTS, 4, 0, 0.5).values()
    np.testing.assert_allclose(roots, expected, atol=FLOAT32)
    values = np.unique(np.abs(round_to_powers(RNG(0).normal(size=(5000, 1)), 4, 0, 0.5).values()))
    np.testing.assert_allclose(values / values[-1], (np.arange(8) / 7) ** 2, atol=1e-12)
    large = {'w': RNG(0).normal(size=(3, 400, 50))}
    exponent = find_exponent(large, Quantisation('power', 4))
    assert 0.4 < exponent < 1


def test_gptq_follows_published_code():
    """The loop over columns of IST-DASLab/gptq, with its own inverse. Catches an error that is
    divided by H^-1 in place of its root, and weights before i that change.
    """
    w, h = WEIGHTS.T.copy(), 2 * MOMENTS
    h += DAMPING * np.mean(np.diag(h)) * np.eye(INPUTS)
    inverse = np.linalg.cholesky(np.linalg.inv(h)).T
    expected = np.empty_like(w)
    for i in range(INPUTS):
        expected[:, i] = round_on_grid(8, WEIGHTS, w[None, :, i])[0]
        error = (w[:, i] - expected[:, i]) / inverse[i, i]
        w[:, i:] -= np.outer(error, inverse[i, i:])
    rounded, losses = gptq(WEIGHTS, MOMENTS, 8)
    np.testing.assert_allclose(rounded.values(), expected.T, atol=1e-10)
    assert losses.shape == (INPUTS,) and np.all(losses >= 0)


def output_error(rounded):
    return np.sum((X @ (rounded.values() - WEIGHTS)) ** 2)


@pytest.mark.parametrize('block', [0, 8])
@pytest.mark.parametrize('bits', [3, 4])
def test_gptq_lowers_output_errors(bits, block):
    """By a tenth at least, with correlated inputs; without correlation it rounds to nearest."""
    rounded, _ = gptq(WEIGHTS, MOMENTS, 2**bits, block)
    assert output_error(rounded) < 0.9 * output_error(round_to_nearest(WEIGHTS, bits, block))
    plain, _ = gptq(WEIGHTS, np.eye(INPUTS), 2**bits, block)
    nearest = round_to_nearest(WEIGHTS, bits, block)
    np.testing.assert_allclose(plain.values(), nearest.values(), atol=1e-12)


def relative_error(rounded):
    change = rounded - WEIGHTS
    return np.sum(change * (MOMENTS @ change)) / np.sum(WEIGHTS * (MOMENTS @ WEIGHTS))


@pytest.mark.parametrize('block', [0, 8])
def test_learned_rounding_lowers_output_errors(block):
    """AdaQuant has at most 0.9 of the error of nearest values, and AdaRound less than AdaQuant and
    GPTQ. Catches scales of another block, and fractions that are not rounded.
    """
    settings = Quantisation('adaround', 3, block)
    nearest = relative_error(round_to_nearest(WEIGHTS, 3, block).values())
    learned = {
        name: METHODS[name].round(WEIGHTS, MOMENTS, settings, None)
        for name in ('gptq', 'adaquant', 'adaround')
    }
    errors = {name: relative_error(matrix.values()) for name, matrix in learned.items()}
    assert errors['adaquant'] < 0.9 * nearest
    assert errors['adaround'] < min(errors['adaquant'], errors['gptq'])
    assert learned['adaround'].codes_IO.max() == 7
    ranges = [learned[name].ranges_GKO for name in ('adaquant', 'adaround')]
    np.testing.assert_array_equal(*ranges)
    assert np.any(ranges[0] != learned['gptq'].ranges_GKO)
    dead = METHODS['adaround'].round(WEIGHTS, np.zeros_like(MOMENTS), settings, None)
    np.testing.assert_allclose(dead.values(), round_to_nearest(WEIGHTS, 3, block).values())


def test_problem_is_the_equation():
    """Reference: L in float64, at rounded weights."""
    nearest = round_to_nearest(WEIGHTS, 3, 8)
    problem = make_problem(WEIGHTS, MOMENTS, nearest.ranges_GKO, 8)
    expected = relative_error(nearest.values())
    assert problem.error(jnp.float32(nearest.values())) == pytest.approx(expected, rel=1e-4)
    scale_IO, zero_IO = problem.grid(8)
    values = scale_IO * (nearest.codes_IO.astype(np.float32) - zero_IO)
    np.testing.assert_allclose(values, nearest.values(), atol=1e-5)


def test_integer_program_is_optimal():
    """Reference: all 3^5 choices. The matrices have different sizes."""
    rng = RNG(0)
    matrices = [
        (size, {2: 3 * loss, 4: loss, 8: 0.1 * loss})
        for size, loss in zip((10, 20, 30, 40, 50), rng.random(5), strict=True)
    ]
    sizes = np.array([size for size, _ in matrices])
    best = min(
        (sum(losses[n] for n, (_, losses) in zip(bits, matrices, strict=True)), bits)
        for bits in itertools.product((2, 4, 8), repeat=5)
        if np.dot(bits, sizes) <= 4 * sizes.sum()
    )
    assert tuple(allocate_bits(matrices, 4)) == best[1]
    assert len(set(best[1])) > 1


@pytest.mark.full
def test_mixed_bits_keep_their_mean():
    """Each matrix has its own bits and equals the one that all bits alike give."""
    model = checkpoint({'model.n_layers': 2})
    model = dataclasses.replace(model, weights=jax.device_put(model.weights))
    mixed = Quantiser(model, TOKENS_BT).quantise(Quantisation('rtn', 4, mix=(2, 4, 8)))
    assert 3 < mixed.mean_bits <= 4
    equal = {bits: Quantiser(model).quantise(Quantisation('rtn', bits)) for bits in (2, 4, 8)}
    chosen = set()
    for path, weight in mixed.params.items():
        if isinstance(weight, PackedWeight):
            for i, matrix in enumerate(weight.matrices):
                bits = int(np.log2(matrix.levels_I[0]))
                same = equal[bits].params[path].matrices[i]
                np.testing.assert_array_equal(matrix.values(), same.values())
                chosen.add(bits)
            restored = unpack_weight(weight.arrays, weight.record())
            np.testing.assert_array_equal(restored.values(), weight.values())
    assert len(chosen) > 1


def test_dead_inputs_are_rounded_to_nearest():
    """The text may not reach an expert, which matters elsewhere. Catches weights set to 0."""
    moments = MOMENTS.copy()
    moments[3], moments[:, 3] = 0.0, 0.0
    rounded, losses = gptq(WEIGHTS, moments, 16)
    nearest = round_to_nearest(WEIGHTS, 4, 0).values()
    np.testing.assert_allclose(rounded.values()[3], nearest[3])
    none, _ = gptq(WEIGHTS, np.zeros_like(MOMENTS), 16)
    np.testing.assert_allclose(none.values(), nearest)
    assert np.all(np.isfinite(losses))


def test_levels_equalise_losses():
    """Losses that fall by 2^theta a bit become equal, and the geometric mean of the levels is that
    of equal bits. An input without loss gets one level.
    """
    losses = np.exp(RNG(0).normal(size=400))
    levels = distribute_levels(losses, 6)
    remaining = losses * (levels / 2**6) ** -1.95
    assert np.std(np.log(remaining)) < 0.02
    assert np.mean(np.log2(levels)) == pytest.approx(6, abs=0.01)
    assert distribute_levels(np.array([0.0, 1.0, 4.0]), 4)[0] == 1
    assert np.all(distribute_levels(np.zeros(3), 4) == 16)
    assert distribute_levels(np.array([1e-30, 1e30]), 8).max() == 2**16  # codes have 16 bits


TOKENS_BT = RNG(0).integers(1, 16, (3, 8), dtype=np.int32)


@pytest.mark.full
@pytest.mark.parametrize('method', METHODS)
def test_only_block_weights_are_rounded(method):
    """Each output has at most 2^bits values; embeddings, norms and the readout stay; logits
    change.
    """
    model = checkpoint({'model.activation': 'swiglu', 'model.n_kv_heads': 1})
    model = dataclasses.replace(model, weights=jax.device_put(model.weights))
    tokens_BT = TOKENS_BT if METHODS[method].needs_moments else None
    quantised = Quantiser(model, tokens_BT).quantise(Quantisation(method, 3))
    before, n_weights = named_leaves(model.weights.params), 0
    matrices = {'query', 'key', 'value', 'out', 'up', 'gate', 'down'}
    for path, leaf in quantised.params.items():
        if path.rpartition('/')[2] not in matrices:
            np.testing.assert_array_equal(leaf, before[path], path)
            continue
        assert isinstance(leaf, PackedWeight)
        leaf = leaf.values()
        spec = named_leaves(model.learner.description.specs)[path]
        stack = np.asarray(as_matrices(spec, leaf))
        n_weights += stack.size
        assert leaf.dtype == np.float32 and np.any(leaf != before[path])
        for column in (
            stack.reshape(-1, *stack.shape[-2:]).transpose(0, 2, 1).reshape(-1, stack.shape[-2])
        ):
            assert method == 'baq' or len(np.unique(column)) <= 8
    assert quantised.n_weights == n_weights
    assert quantised.mean_bits == pytest.approx(3, abs=0 if method != 'baq' else 0.3)
    assert 0.02 < quantised.error < 0.6
    assert (quantised.exponent is not None) == (method == 'power')


@pytest.mark.parametrize(
    ('arguments', 'match'),
    [
        (('gptk', 4), "Did you mean 'gptq'"),
        (('rtn', 1), '--bits must be 2 to 8; got 1'),
        (('rtn', 9), '--bits must be 2 to 8; got 9'),
        (('rtn', 4, -1), '--block must be at least 0; got -1'),
        (('rtn', 4, 0, (2, 9)), '--mix must be 2 to 8; got 9'),
        (('rtn', 4, 0, (4, 8)), 'as it is their mean; got --bits=4 and --mix=4,8'),
        (('baq', 4, 0, (2, 8)), '--method=baq distributes bits itself'),
        (('baq', 4, 16), 'has one scale for an output, but --block=16. Leave --block out'),
    ],
)
def test_unknown_choices_are_refused(arguments, match):
    with pytest.raises(ValueError, match=match):
        Quantisation(*arguments)


def test_text_is_read_if_it_is_needed():
    with pytest.raises(ValueError, match='--method=gptq reads a text: add --text=SOURCE'):
        Quantisation('gptq', 4).check_text(None)
    with pytest.raises(ValueError, match='reads no text: leave out --text=x'):
        Quantisation('rtn', 4).check_text('x')
    Quantisation('rtn', 4).check_text(None)
    with pytest.raises(ValueError, match='--mix reads a text: add --text=SOURCE'):
        Quantisation('rtn', 4, mix=(2, 8)).check_text(None)


def test_reparametrisation_is_refused():
    model = checkpoint({'model.reparam': 'weight_norm'}, weights=Weights({}, (), {}))
    with pytest.raises(ValueError, match='fold --to=none'):
        Quantiser(model).quantise(Quantisation('rtn', 4))


@pytest.mark.full
@pytest.mark.parametrize('method', METHODS)
def test_quantise_command(tmp_path, capsys, method):
    """The workdir is as small as printed, and its weights are those that were rounded, bitwise."""
    model = checkpoint({'optim.average': 'ema'})
    meta = {'vocab_size': model.meta['vocab_size'], 'data': None}
    write_workdir(tmp_path / 'run', model.recipe, model.weights, ByteTokenizer(), 3, meta)
    (tmp_path / 'a.txt').write_text('\x01\x02\x03\x04\x05\x06\x07\x08\x09')
    source = f'text:{tmp_path}/a.txt' if METHODS[method].needs_moments else None
    options = {'checkpoint': str(tmp_path / 'run'), 'out': str(tmp_path / 'out'), 'text': source}
    convert.run(['quantise'], options | {'method': method, 'bits': 4, 'block': 0, 'mix': []})
    printed = capsys.readouterr().out
    assert 'rounded 4,096 weights of the blocks to' in printed
    loaded, original = load(tmp_path / 'out'), load(tmp_path / 'run')
    assert loaded.meta['quantised']['method'] == method
    tokens_BT = read_text_rows(original, source, '--text', ROW_LENGTH) if source else None
    quantised = Quantiser(original, tokens_BT).quantise(Quantisation(method, 4))
    assert f'{quantised.n_bytes / 1e6:,.3f} MB instead of 0.016 MB' in printed
    for path, leaf in named_leaves(loaded.weights.params).items():
        expected = quantised.params[path]
        if isinstance(expected, PackedWeight):
            expected = expected.values()
        np.testing.assert_array_equal(leaf, expected, path)
    stored = loaded.meta['packed']['layers/mlp/up']['arrays']
    assert stored['codes'][0] == 'uint8' and not loaded.weights.params.keys() & {'codes'}


@pytest.mark.full
def test_interrupted_command_goes_on(tmp_path, capsys, monkeypatch):
    """Rounds only the other parameters, to the same folder. Other bits, another model and another
    text begin anew.
    """
    for name, seed in (('run', 0), ('other', 1)):
        model = checkpoint({'train.seed': seed})
        weights = jax.tree.map(lambda x, seed=seed: x + seed, model.weights)
        meta = {'vocab_size': model.meta['vocab_size'], 'data': None}
        write_workdir(tmp_path / name, model.recipe, weights, ByteTokenizer(), 3, meta)
    for name in 'ab':
        (tmp_path / f'{name}.txt').write_text(f'\x01\x02\x03{name}')
    rounded, interrupt_at = [], [3]
    round_param = Quantiser.round_param

    def interrupt(quantiser, path, *args):
        if len(rounded) == interrupt_at[0]:
            raise KeyboardInterrupt
        rounded.append(path)
        return round_param(quantiser, path, *args)

    def quantise(folder, run='run', text='a', bits=4):
        rounded.clear()
        options = {'checkpoint': str(tmp_path / run), 'out': str(tmp_path / folder), 'mix': []}
        options |= {'text': f'text:{tmp_path}/{text}.txt', 'method': 'gptq', 'bits': bits}
        convert.run(['quantise'], options | {'block': 0})
        return capsys.readouterr().out

    monkeypatch.setattr(Quantiser, 'round_param', interrupt)
    with pytest.raises(KeyboardInterrupt):
        quantise('out')
    with pytest.raises(ValueError, match='is incomplete: the command that wrote it'):
        load(tmp_path / 'out')
    interrupt_at[0] = -1
    shutil.copytree(tmp_path / 'out', tmp_path / 'half')
    for changes in ({'run': 'other'}, {'text': 'b'}, {'bits': 3}):
        shutil.copytree(tmp_path / 'half', tmp_path / 'anew', dirs_exist_ok=True)
        assert 'rounded before' not in quantise('anew', **changes) and len(rounded) == 6
        shutil.rmtree(tmp_path / 'anew')
    assert '3 parameters were rounded before' in quantise('out') and len(rounded) == 3
    assert {path.name for path in (tmp_path / 'out').iterdir()} & {MARK, PARTS} == set()
    quantise('whole')
    jax.tree.map(
        np.testing.assert_array_equal,
        load(tmp_path / 'out').weights.params,
        load(tmp_path / 'whole').weights.params,
    )


@pytest.mark.full
def test_packed_weights_load_everywhere(tmp_path):
    """On eight devices and for a run that resumes; a conversion of them is not packed, and another
    record is refused.
    """
    model = checkpoint({})
    meta = {'vocab_size': model.meta['vocab_size'], 'data': None}
    quantised = Quantiser(model).quantise(Quantisation('rtn', 2, 8))
    weights = to_weights(model, quantised.params)
    packed = tmp_path / 'packed'
    write_workdir(packed, model.recipe, weights, ByteTokenizer(), 3, meta)
    loaded = load(packed)
    learner = tiny_learner(model.recipe)
    mesh = make_mesh(MeshConfig(data=2, fsdp=2, tensor=2))
    state, _ = read_state(packed / 'checkpoints', 3, abstract_state(learner, mesh))
    jax.tree.map(np.testing.assert_array_equal, state.params, loaded.weights.params)
    assert state.params['layers']['mlp']['up'].sharding.mesh.size == 8
    convert.write_like(loaded, tmp_path / 'copy', loaded.weights, {})
    copy = load(tmp_path / 'copy')
    assert 'packed' in loaded.meta and 'packed' not in copy.meta
    jax.tree.map(np.testing.assert_array_equal, copy.weights.params, loaded.weights.params)
    meta_path = packed / 'checkpoints' / '3' / 'meta' / 'metadata'
    meta_path.write_text(meta_path.read_text().replace('"block": 8', '"block": 16'))
    with pytest.raises(DamagedCheckpoint, match='does not match its digest'):
        read_meta(packed / 'checkpoints', 3)


@pytest.mark.parametrize('levels', [2, 3, 4, 15, 16, 17, 256, 257, 65536])
def test_packed_codes_are_exact(levels):
    """Takes log2 of the levels for each code, up to a fraction of a word. Catches an order of
    digits, and words that overflow.
    """
    codes_IO = RNG(0).integers(0, levels, (7, 130))
    codes_IO[0] = levels - 1
    levels_I = np.full(7, levels)
    packed = pack(codes_IO, levels_I)
    assert packed.dtype == np.uint8
    assert 8 * packed.size <= np.log2(levels) * codes_IO.size * 1.15 + 64
    np.testing.assert_array_equal(unpack(packed, levels_I, 130), codes_IO)


def test_parameter_is_assembled_from_its_matrices():
    """Catches axes that are moved by the order in place of its inverse."""
    weight, order = np.float32(RNG(0).normal(size=(2, 3, 4))), (1, 2, 0)
    matrix = weight.transpose(order).reshape(3, 8)
    packed = PackedWeight([round_to_nearest(matrix, 8, 0)], order, weight.shape)
    np.testing.assert_array_equal(packed.assemble([matrix]), weight)
    np.testing.assert_allclose(packed.values(), weight, atol=0.02)


def test_levels_may_differ_between_inputs():
    """Inputs of a single level take no bits."""
    levels_I = RNG(0).integers(1, 9, 60)
    codes_IO = RNG(1).integers(0, levels_I[:, None], (60, 11))
    packed = pack(codes_IO, levels_I)
    np.testing.assert_array_equal(unpack(packed, levels_I, 11), codes_IO)
    assert pack(codes_IO[:3], np.ones(3, int)).size == 0
    assert not unpack(pack(codes_IO[:3], np.ones(3, int)), np.ones(3, int), 11).any()
