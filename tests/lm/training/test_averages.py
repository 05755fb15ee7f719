"""Weights that evaluation uses. Equivalence: resumed = uninterrupted, mapped = single, eight
devices = one. Property: the recorded loss is reproduced. Contract: refusals.
"""

import jax
import numpy as np
import pytest

from eval.convert.fold import write_workdir
from eval.suites.perplexity import perplexity
from lm.devices.mesh import make_mesh
from lm.devices.shardings import state_layout, state_shardings
from lm.inference.load import load
from lm.record.checkpoint import TreeMismatch
from lm.record.metrics import read_rows
from lm.run.start import initial_state
from lm.run.tables import optimizer_state_bytes
from lm.storage.files import read_json
from lm.training.state import make_hyper
from modules.params import named_leaves
from tests import helpers
from tests.helpers import checked_config, packed_batch, stack, tiny_learner, train_step
from tests.sweep_helpers import base, cell_config, cell_folders, silent_experiment, write_corpus
from train import DONE, train, train_sweep

FREE = {'optim.average': 'schedule_free', 'optim.b1': 0.0}
EMA = {'optim.average': 'ema', 'optim.average_decay': 0.5}
# Whatever the length of the run, as one of them is cut.
AHEAD = {
    'optim.average': 'ema_nesterov',
    'optim.ema_nesterov_start': 0.0,
    'optim.ema_nesterov_stop': 1.0,
}
OUTER = {'optim.average': 'outer_nesterov', 'optim.outer_every': 2}
TAIL = {'optim.average': 'tail_ema', 'optim.tail_ema_fraction': 1.0, 'optim.tail_ema_decay': 0.5}
AVERAGES = {
    'ema': EMA,
    'schedule_free': FREE,
    'ema_nesterov': AHEAD,
    'outer_nesterov': OUTER,
    'tail_ema': TAIL,
}
COPIES = {'outer_nesterov': 2}  # of the weights in the state; of other averages 1
BETAS = (0.9, 0.5)


@pytest.fixture(scope='module', autouse=True)
def compile_without_optimizations():
    """Spends no time on making programs fast."""
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture(scope='module')
def raw_config(tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp('corpus'))
    return base(corpus, optim_schedule='constant', model_n_layers=1, train_checkpoint_every=0)


@pytest.fixture(scope='module')
def runs(raw_config, tmp_path_factory):
    """Returns {average: the workdir of a run}, read-only."""
    folder = tmp_path_factory.mktemp('runs')
    for name, changes in AVERAGES.items():
        assert train(cell_config(raw_config, changes), folder / name) == DONE
    return {name: folder / name for name in AVERAGES}


@pytest.fixture
def schedule_free_run(runs):
    return runs['schedule_free']


@pytest.fixture(scope='module')
def swept_runs(raw_config, tmp_path_factory):
    """The folders of two runs of one program, with the BETAS of Schedule-Free."""
    workdir = tmp_path_factory.mktemp('swept') / 'sweep'
    raw_config = {
        **raw_config,
        'optim': {**raw_config['optim'], 'average': 'schedule_free', 'b1': 0.0},
    }
    assert train_sweep(raw_config, {'optim.schedule_free_beta': BETAS}, workdir) == DONE
    return list(cell_folders(workdir).values())


def losses(workdir, name):
    return [row[name] for row in read_rows(workdir / 'metrics.jsonl') if name in row]


def assert_equal_trees(actual, expected):
    actual, expected = named_leaves(actual), named_leaves(expected)
    assert actual.keys() == expected.keys()
    for path, leaf in expected.items():
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


def two_steps(changes):
    """Returns (learner, hyper, initial state, state after two steps)."""
    config = checked_config({'model.n_layers': 1} | changes)
    states, hyper = [helpers.initial_state(config)], make_hyper(config)
    for seed in (0, 1):
        state, _ = train_step(config)(states[-1], packed_batch(seed), hyper)
        states.append(jax.device_get(state))
    return tiny_learner(config), hyper, states[0], states[-1]


def eval_params(learner, hyper, state):
    return learner.select_eval_weights(state.weights, state.average, hyper).params


@pytest.mark.full
def test_recorded_loss_is_reproduced_from_checkpoint(runs, swept_runs):
    """Catches an evaluation of the trained weights, in the run or from its checkpoint."""
    for workdir in (*runs.values(), *swept_runs):
        recorded = losses(workdir, 'validation_ce')[-1]
        np.testing.assert_allclose(
            perplexity(load(workdir)).numbers['validation_ce'], recorded, rtol=1e-6
        )
        assert read_json(workdir / 'summary.json')['best_validation_ce'] <= recorded


@pytest.mark.full
def test_swept_runs_equal_single_runs(raw_config, schedule_free_run, swept_runs, tmp_path):
    """Equality is bitwise; the second run's numbers differ from the program's defaults.

    Catches a number that does not belong to the run, in the step or in evaluation.
    """
    single_run = tmp_path / 'alone'
    assert (
        train(cell_config(raw_config, FREE | {'optim.schedule_free_beta': BETAS[1]}), single_run)
        == DONE
    )
    for swept_run, expected_run in zip(swept_runs, (schedule_free_run, single_run), strict=True):
        for name in ('loss', 'validation_ce'):
            assert losses(swept_run, name) == losses(expected_run, name)
        assert_equal_trees(load(swept_run).weights, load(expected_run).weights)
    assert losses(schedule_free_run, 'validation_ce') != losses(single_run, 'validation_ce')


@pytest.mark.full
@pytest.mark.parametrize('name', AVERAGES)
def test_resumed_run_equals_uninterrupted(raw_config, runs, name, tmp_path):
    """Equality is bitwise, for the trained and the evaluated weights."""
    cut, changes = tmp_path / 'cut', AVERAGES[name]
    assert train(cell_config(raw_config, changes | {'train.steps': 4}), cut) == DONE
    assert train(cell_config(raw_config, changes), cut, continue_changed=True) == DONE
    for recorded in ('loss', 'validation_ce'):
        assert losses(cut, recorded) == losses(runs[name], recorded)
    assert_equal_trees(load(cut).weights, load(runs[name]).weights)


@pytest.mark.full
@pytest.mark.parametrize('name', ['none', 'ema'])
def test_other_average_cannot_resume(raw_config, schedule_free_run, name):
    changes = {'optim.average': name, 'optim.b1': 0.0}
    with pytest.raises(TreeMismatch, match=rf"optim.average: 'schedule_free' -> '{name}'(.|\n)*/z"):
        train(cell_config(raw_config, changes), schedule_free_run, continue_changed=True)


@pytest.mark.full
def test_run_starts_from_average(raw_config, schedule_free_run):
    """Its own average starts there too, as for a converted checkpoint."""
    config = cell_config(raw_config, EMA | {'train.init_from': str(schedule_free_run)})
    state = initial_state(config, silent_experiment(config))
    assert_equal_trees(state.params, load(schedule_free_run).weights.params)
    assert_equal_trees(state.average['average'], state.params)
    assert int(state.average['updates']) == 0


@pytest.mark.full
def test_converted_weights_are_evaluated_unchanged(schedule_free_run, tmp_path):
    source = load(schedule_free_run)
    write_workdir(
        tmp_path / 'out', source.recipe, source.weights, source.tokenizer, source.step, source.meta
    )
    assert_equal_trees(load(tmp_path / 'out').weights, source.weights)


@pytest.mark.parametrize('changes', AVERAGES.values(), ids=AVERAGES)
class TestEachAverage:
    """Contracts that every average meets."""

    @pytest.mark.full
    def test_average_on_eight_devices_matches_one(self, changes):
        learner, hyper, _, expected = two_steps(changes)
        batches = stack([packed_batch(0), packed_batch(1)])
        final = helpers.trained_on_all_devices(learner, batches, hyper)
        helpers.assert_trees_close(final, expected, rtol=1e-4, atol=1e-5)

    def test_average_is_sharded_like_weights_and_counted(self, changes):
        """The average is as large as the weights, plus scalars; without embeddings, smaller."""
        config = checked_config(changes)
        if config.average.name == 'tail_ema':
            shapes = state_layout(tiny_learner(config))[0]
            averaged = named_leaves(shapes.average['average']).keys()
            assert averaged == named_leaves(shapes.params).keys() - {'embedding'}
            return
        learner = tiny_learner(config)
        shardings = state_shardings(learner, make_mesh(config.mesh))
        shapes = state_layout(learner)[0]
        assert shardings.params in shardings.average.values()
        plain = checked_config({path: None for path in changes} | {'optim.average': 'none'})
        extra_bytes = optimizer_state_bytes(shapes) - optimizer_state_bytes(
            state_layout(tiny_learner(plain))[0]
        )
        params = sum(4 * leaf.size for leaf in jax.tree.leaves(shapes.params))
        copies = COPIES.get(config.average.name, 1)
        assert copies * params < extra_bytes < copies * params + 20

    @pytest.mark.full
    def test_frozen_weights_are_unchanged(self, changes):
        """Frozen weights are bitwise equal, in the average too."""
        learner, hyper, start, state = two_steps(
            changes | {'train.trainable': 'norms', 'model.norm': 'layernorm'}
        )
        is_trained = named_leaves(learner.description.trainable)
        for params in (state.params, eval_params(learner, hyper, state)):
            before = named_leaves(start.params)
            for path, leaf in named_leaves(params).items():
                assert np.array_equal(leaf, before[path]) != is_trained[path], path


@pytest.mark.full
def test_step_averages_updated_weights():
    """Two steps of an ema, by hand. Catches an average of the weights before the step."""
    config = checked_config({'model.n_layers': 1} | EMA)
    learner, hyper, start, second = two_steps(EMA)
    first, _ = train_step(config)(start, packed_batch(0), hyper)
    expected = jax.tree.map(lambda a, b: (0.5 * a + b) / 1.5, first.params, second.params)
    average = eval_params(learner, hyper, second)
    helpers.assert_trees_close(average, expected, rtol=1e-5, atol=1e-7)


@pytest.mark.full
def test_projection_applies_to_average():
    """Norms of matrices are the initial ones, and the average differs from the weights."""
    learner, hyper, start, state = two_steps(
        EMA | {'model.reparam': 'normalize_and_project', 'optim.lr': 0.1}
    )
    averaged = named_leaves(eval_params(learner, hyper, state))
    for path, spec in named_leaves(learner.description.specs).items():
        before, weight = (named_leaves(tree)[path] for tree in (start.params, state.params))
        assert not np.array_equal(averaged[path], weight), path
        if spec.role == 'hidden':
            norm, expected = np.linalg.norm(averaged[path]), np.linalg.norm(before)
            np.testing.assert_allclose(norm, expected, rtol=1e-5, err_msg=path)
            assert np.linalg.norm(named_leaves(state.average)[f'average/{path}']) < 0.999 * expected
