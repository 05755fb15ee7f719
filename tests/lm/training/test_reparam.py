"""State of reparametrisations. Equivalence: microbatches = one batch, eight devices = one, a loop
over runs = single runs, resumed = uninterrupted. Property: one power iteration per step, in
float32; projection keeps norms. Contract: which weights a run can start from.
"""

import types

import jax
import numpy as np
import pytest

from lm.config.resolve import to_dict, update_recipe
from lm.devices.mesh import batch_sharding, make_mesh
from lm.devices.run_axis import loop
from lm.devices.shardings import abstract_state, state_shardings
from lm.record.checkpoint import read_state
from lm.record.checkpoints import Checkpoints
from lm.run.start import store_weights
from lm.run.tables import parameter_rows, trained_count
from lm.training.state import build_learner, init_state, make_hyper
from lm.training.step import make_eval_step, make_train_step
from modules.params import as_matrices, named_leaves
from modules.spectrum import power_iteration
from tests.helpers import (
    BOS,
    assert_trees_close,
    checked_config,
    initial_state,
    packed_batch,
    stack,
    tiny_config,
    tiny_learner,
    train_step,
)

SMALL = {
    'model.d_model': 8,
    'model.d_ff': 16,
    'model.position': 'none',
    'kernels.implementation': 'reference',
}
SIGMA = SMALL | {'model.reparam': 'sigma', 'optim.lr': 0.03}
CHAIN = SIGMA | {'model.reparam': 'shared+sigma+normalize_and_project'}
UP = 'layers/mlp/up'


def take_steps(config, state=None, steps=1):
    state, hyper = initial_state(config) if state is None else state, make_hyper(config)
    for i in range(steps):
        state, _ = train_step(config)(state, packed_batch(i), hyper)
    return jax.device_get(state)


def perturb_weights(config):
    """Returns a state whose stored weights no longer match its vectors."""
    state, rng = initial_state(config), np.random.default_rng(0)
    noise = jax.tree.map(lambda w: np.float32(0.1 * rng.normal(size=w.shape)), state.params)
    return state.replace(params=jax.tree.map(np.add, state.params, noise))


def named_vectors(state):
    """Returns {'layers/mlp/up': u [L, O], ...}."""
    return named_leaves(state.reparam)


def assert_same_bits(actual, expected):
    jax.tree.map(np.testing.assert_array_equal, actual, expected)


@pytest.mark.full
def test_step_does_one_power_iteration():
    """It starts from the weights before the step, for any number of microbatches. Catches one per
    microbatch.
    """
    config = checked_config(SIGMA | {'train.microbatches': 4})
    before = perturb_weights(config)
    after = take_steps(config, before)
    specs = named_leaves(tiny_learner(config).description.used_specs)
    assert len(named_vectors(after)) == 6
    for path, u in named_vectors(before).items():
        matrices = as_matrices(specs[path], named_leaves(before.params)[f'{path}/matrix'])
        _, expected = power_iteration(matrices, u)
        np.testing.assert_allclose(named_vectors(after)[path], expected, rtol=1e-5, atol=1e-6)
        assert not np.allclose(u, expected, rtol=1e-2, atol=1e-3)


@pytest.mark.full
def test_eight_devices_equal_one():
    """Vectors are replicated and equal the result of one device."""
    config = checked_config(CHAIN)
    learner = tiny_learner(config)
    mesh = make_mesh(learner.recipe.mesh)
    assert mesh.devices.size == 8
    states = state_shardings(learner, mesh)
    step = jax.jit(
        make_train_step(learner),
        in_shardings=(states, batch_sharding(mesh), None),
        out_shardings=(states, None),
    )
    start = perturb_weights(config)
    after, _ = step(start, packed_batch(), make_hyper(config))
    for u in jax.tree.leaves(after.reparam):
        assert u.sharding.is_fully_replicated and len(u.sharding.device_set) == 8
    on_one = take_steps(config, start)
    assert_trees_close(after.reparam, on_one.reparam, rtol=1e-5, atol=1e-6)
    assert_trees_close(after.params, on_one.params, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_looped_run_equals_single_run_bitwise():
    """tests/contracts/test_choices.py tests mapped runs, which are equal up to rounding."""
    config = checked_config(SIGMA)
    mesh = make_mesh(config.mesh, jax.devices()[:1], runs=2)
    together = loop(mesh, make_train_step(tiny_learner(config)))
    starts = [initial_state(config, seed) for seed in (0, 1)]
    hypers, batches = stack([make_hyper(config)] * 2), stack([packed_batch()] * 2)
    states, active = stack(starts), np.ones(2, bool)
    final, _ = jax.jit(together)(active, states, batches, hypers)
    for run, start in enumerate(starts):
        final_run = jax.tree.map(lambda leaf, run=run: leaf[run], final)
        assert_same_bits(final_run, take_steps(config, start))


@pytest.mark.full
def test_skipped_step_keeps_vectors():
    config = checked_config(SIGMA | {'train.on_divergence': 'skip_step'})
    start, infinite = perturb_weights(config), make_hyper(config) | {'optim.lr': np.float32(np.inf)}
    after, metrics = train_step(config)(start, packed_batch(), infinite)
    assert metrics['skipped'] == 1
    assert_same_bits(after.reparam, start.reparam)
    assert_same_bits(after.params, start.params)


@pytest.mark.full
def test_resumed_run_is_bitwise_equal(tmp_path):
    """Vectors and norms are restored. Catches a restart from the weights."""
    config = checked_config(CHAIN)
    half = take_steps(config, steps=2)
    checkpoints = Checkpoints(tmp_path, keep_last=1, keep_best=0)
    checkpoints.save(jax.tree.map(jax.numpy.asarray, half), {'config': to_dict(config)}, None)
    checkpoints.wait()
    checkpoints.close()
    mesh = make_mesh(config.mesh, jax.devices()[:1])
    shapes = abstract_state(tiny_learner(config), mesh)
    state, _ = read_state(tmp_path / 'checkpoints', 2, shapes)
    assert named_vectors(state)
    assert_same_bits(jax.device_get(state), half)
    assert_same_bits(take_steps(config, jax.device_get(state)), take_steps(config, half))


@pytest.mark.full
def test_map_is_computed_in_float32():
    """The dtype of products does not matter: the weights that the model casts are the same."""
    half, full = (
        checked_config(SIGMA | {'model.reparam': 'sigma+weight_standardization', 'model.dtype': d})
        for d in ('bfloat16', 'float32')
    )
    state = perturb_weights(full)
    used = [tiny_learner(config).variables(state.weights)['params'] for config in (half, full)]
    assert_same_bits(*used)
    _, vectors = tiny_learner(half).description.reparam.apply(state.params, state.reparam, True)
    assert {leaf.dtype for leaf in jax.tree.leaves((used, vectors))} == {np.dtype(np.float32)}


@pytest.mark.full
def test_projection_keeps_initial_norms():
    """Steps with decay would change the norms; the optimizer's moments are unaffected."""
    changes = SMALL | {'optim.lr': 0.05, 'optim.weight_decay': 0.5}
    projected, plain = (
        checked_config(changes | {'model.reparam': name})
        for name in ('normalize_and_project', 'none')
    )
    start = initial_state(projected)
    specs = named_leaves(tiny_learner(plain).description.specs)

    def norms(state):
        return {
            path: np.linalg.norm(as_matrices(specs[path], w), axis=(-2, -1))
            for path, w in named_leaves(state.params).items()
            if specs[path].role == 'hidden'
        }

    after, free = (take_steps(config, start, steps=4) for config in (projected, plain))
    assert_trees_close(norms(after), norms(start), rtol=1e-5, atol=0)
    assert all(
        np.all(np.abs(free / norms(start)[path] - 1) > 1e-3) for path, free in norms(free).items()
    )
    assert_same_bits(take_steps(projected, start).opt_state, take_steps(plain, start).opt_state)
    readouts = [take_steps(config, start).params['readout'] for config in (projected, plain)]
    np.testing.assert_array_equal(*readouts)


@pytest.mark.full
def test_frozen_parameters_are_not_projected():
    """Frozen weights are bitwise equal. Catches a map that rounds them after the update."""
    config = checked_config(
        SMALL | {'model.reparam': 'normalize_and_project', 'train.trainable': 'norms'}
    )
    start = perturb_weights(config)
    after = named_leaves(take_steps(config, start).params)
    for path, before in named_leaves(start.params).items():
        assert np.array_equal(after[path], before) == (not path.endswith('scale'))


@pytest.mark.parametrize(
    ('reparam', 'expected'),
    [
        ('shared+sigma', {'layers/mlp/up/matrix': 'shared+sigma', 'readout/gain': 'sigma'}),
        ('normalize_and_project', {UP: 'normalize_and_project', 'final_norm/scale': 'none'}),
        ('none', {UP: 'none'}),
    ],
)
def test_table_shows_each_reparam(reparam, expected):
    roles = {'reparam.roles': 'hidden+readout'} if reparam != 'none' else {}
    config = tiny_config({'model.reparam': reparam} | roles)
    rows = {
        row['parameter']: row
        for row in parameter_rows(tiny_learner(config), make_mesh(config.mesh))
    }
    assert {path: rows[path]['reparam'] for path in expected} == expected
    assert rows['embedding']['reparam'] == 'none'
    assert rows['readout/gain']['shape'] == '1' if reparam == 'shared+sigma' else True


@pytest.mark.parametrize(
    'value', [('sigma', 'weight_norm'), ['sigma', 'weight_norm'], "('sigma', 'weight_norm')"]
)
def test_tuple_explains_spelling(value):
    message = r"join several names with \+ .*: 'sigma\+weight_norm'\. To compare them"
    with pytest.raises(ValueError, match=message):
        tiny_config({'model.reparam': value})


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        (
            {'model.reparam': 'sigma+shared+sigma'},
            r'sigma\+shared\+sigma names the same part twice',
        ),
        ({'model.reparam': 'none+sigma'}, 'cannot be joined with other names'),
        ({'model.reparam': 'sigmareparam'}, "Did you mean 'sigma'"),
        ({'model.reparam': 'sigma', 'reparam.roles': 'vector'}, "'vector' has no matrices"),
        ({'model.reparam': 'sigma', 'reparam.roles': 'hidden+hidden'}, 'names a role twice'),
        ({'model.reparam': 'shared', 'reparam.roles': 'hidden'}, 'is not used by'),
        ({'model.reparam': 'sigma', 'reparam.gamma_start': 'two'}, 'must be one of one, sigma'),
        (
            {'model.reparam': 'spectral_cap', 'reparam.spectral_bound': 0.0},
            'must be between 1e-06 and 1000000.0',
        ),
        ({'model.reparam': 'sigma', 'scaling.init_scale': 1e-10}, 'must be at least 1e-09'),
        ({'model.reparam': 'lora+weight_norm'}, r'one of which is 0. Write weight_norm\+lora'),
        ({'model.reparam': 'normalize_and_project+lora'}, 'does not support the factors of lora'),
    ],
)
def test_invalid_reparams_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        checked_config(changes)


def test_training_missing_lora_is_refused():
    with pytest.raises(
        ValueError, match=r'nothing to train: model\.reparam=sigma does not include lora'
    ):
        tiny_learner(tiny_config({'model.reparam': 'sigma', 'train.trainable': 'lora'}))


def test_lora_factors_with_spectral_optimizer_are_refused():
    """Muon's steps have singular values of one size, and one side of a factor grows with
    the width.
    """
    changes = {'model.reparam': 'lora', 'scaling.name': 'mup', 'scaling.base_width': 8}
    message = (
        r'factors of model\.reparam=lora .*reparam\.rank.* optim\.name, or scaling\.name=standard'
    )
    with pytest.raises(ValueError, match=message):
        tiny_learner(checked_config(changes | {'optim.name': 'muon'}))


def test_tied_embeddings_have_no_readout_to_map():
    config = tiny_config({'model.reparam': 'sigma', 'reparam.roles': 'readout'})
    tied = update_recipe(config, {'model.tie_embeddings': True})
    with pytest.raises(ValueError, match=r"no parameter has the role 'readout' \(with model"):
        build_learner(tied, 16, BOS, 'cpu')


def build_source(changes):
    """Returns a stand-in for the checkpoint of `lm.inference.load`, and its weights."""
    config = checked_config(SMALL | changes)
    weights = perturb_weights(config).weights
    source = types.SimpleNamespace(recipe=config, weights=weights, path='runs/source')
    return source, tiny_learner(config).variables(weights)['params']


def start_from(changes, source, used):
    learner = tiny_learner(checked_config(SMALL | changes))
    stored, state = store_weights(learner, source, used)
    return stored, state, learner.description.reparam.apply(stored, state, False)[0]


@pytest.mark.full
@pytest.mark.parametrize('reparam', ['sigma', 'spectral_norm', 'normalize_and_project'])
def test_same_reparam_keeps_stored_weights(reparam):
    """Stored weights, vectors and initial norms. Catches `init` of the used weights."""
    source, used = build_source({'model.reparam': reparam})
    stored, state, mapped = start_from({'model.reparam': reparam}, source, used)
    assert_same_bits((stored, state), (source.weights.params, source.weights.reparam))
    assert_same_bits(mapped, used)


@pytest.mark.full
@pytest.mark.parametrize(
    ('source_changes', 'changes'),
    [
        ({'model.reparam': 'spectral_norm'}, {'model.reparam': 'sigma'}),
        ({'model.reparam': 'sigma'}, {'model.reparam': 'none'}),
        ({'model.reparam': 'sigma'}, {'model.reparam': 'sigma', 'reparam.roles': 'hidden+readout'}),
        ({'model.reparam': 'weight_norm'}, {'model.reparam': 'weight_compander'}),
        ({'model.reparam': 'shared'}, {'model.reparam': 'shared+weight_norm'}),
        (
            {'model.reparam': 'weight_compander'},
            {'model.reparam': 'weight_compander', 'reparam.compander_slope': 5.0},
        ),
    ],
)
def test_other_reparam_keeps_used_weights(source_changes, changes):
    source, used = build_source(source_changes)
    *_, mapped = start_from(changes, source, used)
    assert_trees_close(mapped, used, rtol=1e-5, atol=1e-6)


@pytest.mark.default_rows('changes5')
@pytest.mark.parametrize(
    'changes',
    [
        {'model.reparam': 'spectral_norm'},
        {'model.reparam': 'sigma', 'reparam.gamma_start': 'one'},
        {'model.reparam': 'weight_standardization'},
        {'model.reparam': 'spectral_cap', 'reparam.spectral_bound': 0.1},
        {'model.reparam': 'weight_compander', 'reparam.compander_width': 0.5},
        {'model.reparam': 'shared'},
    ],
)
def test_unrepresentable_weights_are_refused(changes):
    """Catches a run that starts from other weights than its config names."""
    source, used = build_source({'model.reparam': 'none'})
    message = (
        rf'model.reparam={changes["model.reparam"]}.* cannot represent .* would change by .* of its'
    )
    with pytest.raises(ValueError, match=message):
        start_from(changes, source, used)


def test_one_channel_base_is_not_checked():
    """Catches a model that is refused because of the base of one row that `unit` compares it to."""
    names = {'model.reparam': 'weight_standardization', 'scaling.name': 'unit'}
    specs = tiny_learner(checked_config(SMALL | names)).description.specs
    assert 'gain' in specs['layers']['attention']['key']


@pytest.mark.full
def test_lora_trains_only_its_factors():
    """Training starts from a source: the first loss is the source's evaluation.

    Only trained parameters move or have optimizer state, including DoRA's gain. Catches decay and
    moments of the others.
    """
    source, used = build_source({'model.reparam': 'none'})
    changes = {'model.reparam': 'weight_norm+lora', 'train.trainable': 'lora', 'reparam.rank': 2}
    numbers = {'optim.weight_decay': 0.5, 'optim.lr': 0.03, 'optim.average': 'ema'}
    config = checked_config(SMALL | changes | numbers)
    learner, batch, hyper = tiny_learner(config), packed_batch(), make_hyper(config)
    stored, reparam, mapped = start_from(changes, source, used)
    assert_trees_close(mapped, used, rtol=1e-6, atol=0)
    sums = jax.jit(make_eval_step(tiny_learner(source.recipe)))(source.weights, batch, hyper)
    shapes = jax.eval_shape(lambda: init_state(learner, hyper, jax.random.key(0)))
    state = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    state = state.replace(params=stored, reparam=reparam)
    after, metrics = train_step(config)(state, batch, hyper)
    np.testing.assert_allclose(metrics['ce'], sums['ce'] / sums['tokens'], rtol=1e-6)
    first = named_leaves(after.params)
    after, _ = train_step(config)(after, packed_batch(1), hyper)  # a moves once b is not 0
    trained = {
        path
        for path, is_trained in named_leaves(learner.description.trainable).items()
        if is_trained
    }
    assert {path.rpartition('/')[2] for path in trained} == {'a', 'b', 'gain'}
    start, params = named_leaves(state.params), named_leaves(after.params)
    assert trained == {path for path in start if not np.array_equal(start[path], params[path])}
    moments = [path.partition('/mu/')[2] for path in named_leaves(after.opt_state)]
    assert {path for path in moments if path} == trained
    assert named_leaves(after.average['average']).keys() == trained
    eval_params = named_leaves(
        learner.select_eval_weights(after.weights, after.average, hyper).params
    )
    decay = config.average.options['average_decay']
    for path in start:
        mean = first[path] + (params[path] - first[path]) / (1 + decay)
        expected = mean if path in trained else start[path]
        np.testing.assert_allclose(eval_params[path], expected, rtol=1e-5 if path in trained else 0)
    sizes = [int(np.prod(leaf.shape)) for leaf in jax.tree.leaves(learner.description.shapes)]
    assert trained_count(learner) == sum(start[path].size for path in trained) < sum(sizes)
