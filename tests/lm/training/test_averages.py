"""Weights that evaluation uses. Equivalence: resumed = uninterrupted, mapped = alone, eight devices
= one. Property: what is recorded is what is read back. Contract: what is refused.
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
from tests.sweep_helpers import base, cell_folders, changed, silent_experiment, write_corpus
from train import DONE, train, train_sweep

FREE = {'optim.average': 'schedule_free', 'optim.b1': 0.0}
EMA = {'optim.average': 'ema', 'optim.average_decay': 0.5}
AVERAGED = {'ema': EMA, 'schedule_free': FREE}
BETAS = (0.9, 0.5)


@pytest.fixture(scope='module', autouse=True)
def quickly_compiled():
    """No time is spent on making programs fast."""
    jax.config.update('jax_disable_most_optimizations', True)
    yield
    jax.config.update('jax_disable_most_optimizations', False)


@pytest.fixture(scope='module')
def tree(tmp_path_factory):
    corpus = write_corpus(tmp_path_factory.mktemp('corpus'))
    return base(corpus, optim_schedule='constant', model_n_layers=1, train_checkpoint_every=0)


@pytest.fixture(scope='module')
def runs(tree, tmp_path_factory):
    """{average: the workdir of a run}. Not to be written to."""
    folder = tmp_path_factory.mktemp('runs')
    for name, changes in AVERAGED.items():
        assert train(changed(tree, changes), folder / name) == DONE
    return {name: folder / name for name in AVERAGED}


@pytest.fixture
def free(runs):
    return runs['schedule_free']


@pytest.fixture(scope='module')
def swept(tree, tmp_path_factory):
    """The folders of two runs of one program, with the BETAS of Schedule-Free."""
    workdir = tmp_path_factory.mktemp('swept') / 'sweep'
    tree = {**tree, 'optim': {**tree['optim'], 'average': 'schedule_free', 'b1': 0.0}}
    assert train_sweep(tree, {'optim.schedule_free_beta': BETAS}, workdir) == DONE
    return list(cell_folders(workdir).values())


def losses(workdir, name):
    return [row[name] for row in read_rows(workdir / 'metrics.jsonl') if name in row]


def assert_same(actual, wanted):
    actual, wanted = named_leaves(actual), named_leaves(wanted)
    assert actual.keys() == wanted.keys()
    for path, leaf in wanted.items():
        np.testing.assert_array_equal(actual[path], leaf, err_msg=path)


def two_steps(changes):
    """(learner, hyper, the state at the start, after two steps)."""
    config = checked_config({'model.n_layers': 1} | changes)
    states, hyper = [helpers.initial_state(config)], make_hyper(config)
    for seed in (0, 1):
        state, _ = train_step(config)(states[-1], packed_batch(seed), hyper)
        states.append(jax.device_get(state))
    return tiny_learner(config), hyper, states[0], states[-1]


def evaluated(learner, hyper, state):
    return learner.select_eval_weights(state.weights, state.average, hyper).params


@pytest.mark.full
def test_what_a_run_records_is_what_is_read_back(runs, swept):
    """Catches an evaluation of the weights that are trained, in the run or of its checkpoint."""
    for workdir in (*runs.values(), *swept):
        recorded = losses(workdir, 'validation_ce')[-1]
        np.testing.assert_allclose(
            perplexity(load(workdir)).numbers['validation_ce'], recorded, rtol=1e-6
        )
        assert read_json(workdir / 'summary.json')['best_validation_ce'] <= recorded


@pytest.mark.full
def test_a_sweep_over_its_numbers_is_each_run_alone(tree, free, swept, tmp_path):
    """To the bit; the second's are not those of the program. Catches a number that is not the
    run's own, in the step or in evaluation.
    """
    alone = tmp_path / 'alone'
    assert train(changed(tree, FREE | {'optim.schedule_free_beta': BETAS[1]}), alone) == DONE
    for found, wanted in zip(swept, (free, alone), strict=True):
        for name in ('loss', 'validation_ce'):
            assert losses(found, name) == losses(wanted, name)
        assert_same(load(found).weights, load(wanted).weights)
    assert losses(free, 'validation_ce') != losses(alone, 'validation_ce')


@pytest.mark.full
@pytest.mark.parametrize('name', AVERAGED)
def test_resumed_is_uninterrupted(tree, runs, name, tmp_path):
    """To the bit, where gradients are taken and where it is evaluated."""
    cut, changes = tmp_path / 'cut', AVERAGED[name]
    assert train(changed(tree, changes | {'train.steps': 4}), cut) == DONE
    assert train(changed(tree, changes), cut, continue_changed=True) == DONE
    for recorded in ('loss', 'validation_ce'):
        assert losses(cut, recorded) == losses(runs[name], recorded)
    assert_same(load(cut).weights, load(runs[name]).weights)


@pytest.mark.full
@pytest.mark.parametrize('name', ['none', 'ema'])
def test_a_run_with_another_average_does_not_go_on(tree, free, name):
    other = {'optim.average': name, 'optim.b1': 0.0}
    with pytest.raises(TreeMismatch, match=rf"optim.average: 'schedule_free' -> '{name}'(.|\n)*/z"):
        train(changed(tree, other), free, continue_changed=True)


@pytest.mark.full
def test_a_run_starts_from_the_average_of_another(tree, free):
    """And its own average starts there, as that of a converted checkpoint does."""
    config = changed(tree, EMA | {'train.init_from': str(free)})
    state = initial_state(config, silent_experiment(config))
    assert_same(state.params, load(free).weights.params)
    assert_same(state.average['average'], state.params)
    assert int(state.average['updates']) == 0


@pytest.mark.full
def test_what_a_conversion_writes_is_evaluated_as_it_is(free, tmp_path):
    source = load(free)
    write_workdir(
        tmp_path / 'out', source.recipe, source.weights, source.tokenizer, source.step, source.meta
    )
    assert_same(load(tmp_path / 'out').weights, source.weights)


@pytest.mark.parametrize('changes', AVERAGED.values(), ids=AVERAGED)
class TestEachAverage:
    @pytest.mark.full
    def test_eight_devices_are_one(self, changes):
        learner, hyper, _, wanted = two_steps(changes)
        batches = stack([packed_batch(0), packed_batch(1)])
        found = helpers.trained_on_all_devices(learner, batches, hyper)
        helpers.assert_trees_close(found, wanted, rtol=1e-4, atol=1e-5)

    def test_it_lies_where_its_weights_do_and_counts(self, changes):
        """As large as the weights, and scalars."""
        config = checked_config(changes)
        learner = tiny_learner(config)
        shardings = state_shardings(learner, make_mesh(config.mesh))
        shapes = state_layout(learner)[0]
        assert shardings.params in shardings.average.values()
        plain = checked_config({path: None for path in changes} | {'optim.average': 'none'})
        more = optimizer_state_bytes(shapes) - optimizer_state_bytes(
            state_layout(tiny_learner(plain))[0]
        )
        params = sum(4 * leaf.size for leaf in jax.tree.leaves(shapes.params))
        assert params < more < params + 20

    @pytest.mark.full
    def test_what_is_not_trained_stays(self, changes):
        """To the bit, in the average too."""
        learner, hyper, start, state = two_steps(
            changes | {'train.trainable': 'norms', 'model.norm': 'layernorm'}
        )
        trained = named_leaves(learner.description.trainable)
        for params in (state.params, evaluated(learner, hyper, state)):
            before = named_leaves(start.params)
            for path, leaf in named_leaves(params).items():
                assert np.array_equal(leaf, before[path]) != trained[path], path


@pytest.mark.full
def test_a_step_averages_the_weights_that_it_makes():
    """Two steps of an ema, by hand. Catches an average of the weights before the step."""
    config = checked_config({'model.n_layers': 1} | EMA)
    learner, hyper, start, second = two_steps(EMA)
    first, _ = train_step(config)(start, packed_batch(0), hyper)
    wanted = jax.tree.map(lambda a, b: (0.5 * a + b) / 1.5, first.params, second.params)
    found = evaluated(learner, hyper, second)
    helpers.assert_trees_close(found, wanted, rtol=1e-5, atol=1e-7)


@pytest.mark.full
def test_a_projection_holds_for_the_average():
    """Norms of matrices are those of the start, and the average is not the weights."""
    learner, hyper, start, state = two_steps(
        EMA | {'model.reparam': 'normalize_and_project', 'optim.lr': 0.1}
    )
    found = named_leaves(evaluated(learner, hyper, state))
    for path, spec in named_leaves(learner.description.specs).items():
        before, trained = (named_leaves(tree)[path] for tree in (start.params, state.params))
        assert not np.array_equal(found[path], trained), path
        if spec.role == 'hidden':
            norm, wanted = np.linalg.norm(found[path]), np.linalg.norm(before)
            np.testing.assert_allclose(norm, wanted, rtol=1e-5, err_msg=path)
            assert np.linalg.norm(named_leaves(state.average)[f'average/{path}']) < 0.999 * wanted
