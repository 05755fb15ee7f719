"""Objectives in training: weights, attention, steps, runs, and refusals."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.resolve import update_recipe
from lm.model.check import check
from lm.study.plan.cells import expand_sweep, group_by_program
from lm.training.state import make_hyper
from lm.training.step import compute_activations, make_train_step, target_weights
from tests.helpers import (
    BOS,
    VOCAB,
    assert_trees_close,
    checked_config,
    initial_state,
    packed_batch,
    stack,
    tiny_config,
    tiny_learner,
    tiny_raw,
)
from tests.sweep_helpers import base, cell_config, timeless, write_corpus
from train import DONE, train

MIXED = 'causal:0.25+span_corruption:0.25+infill:0.25+prefix:0.25'


def test_target_weights_follow_targets():
    """Padding never counts, whatever is marked. BOS does: it may end an answer."""
    batch = packed_batch()
    batch['targets'] = np.ones_like(batch['tokens'])
    is_text = batch['segments'][:, 1:] > 0
    np.testing.assert_array_equal(target_weights(batch, BOS), is_text)
    batch['targets'][:, :4] = 0
    np.testing.assert_array_equal(target_weights(batch, BOS)[:, :3], 0)
    np.testing.assert_array_equal(target_weights(batch, BOS)[:, 3:], is_text[:, 3:])


PREFIXED = {'data.mask_documents': True, 'data.objective': 'prefix'}


def prefixed_batch():
    """Two documents per row, with prefixes of 2 and 3 tokens."""
    batch = packed_batch(rows=4, length=12)
    batch['segments'][:] = np.repeat([1, 2], [5, 8])
    batch['tokens'] = np.where(batch['tokens'] == BOS, 1, batch['tokens'])
    batch['prefix'] = np.zeros_like(batch['tokens'])
    batch['prefix'][:, :2], batch['prefix'][:, 5:8] = 1, 2
    batch['targets'] = (batch['prefix'] == 0).astype(np.int32)
    return batch


@pytest.mark.default_rows('blocked')
@pytest.mark.parametrize('kernel', ['reference', 'blocked'])
def test_property_prefix_is_bidirectional(kernel):
    """Checked by the gradient of each position in each embedding, through two layers, with ALiBi.

    Catches a prefix that leaks into the next document's, and a target that is seen.
    """
    changes = {'kernels.attention': kernel, 'model.position': 'alibi', 'data.seq_len': 12}
    config = checked_config(PREFIXED | changes)
    learner, batch = tiny_learner(config), prefixed_batch()
    row = {name: jnp.asarray(value[:1]) for name, value in batch.items()}
    variables = learner.variables(initial_state(config).weights)

    @jax.jit
    def jacobian(table_VD):
        """Returns [T, T]: how position t depends on the embedding at s."""
        tokens_1T = jnp.asarray(np.arange(12)[None])  # each position has its own token

        def position_sums(table_VD):
            params = variables['params'] | {'embedding': table_VD}
            x_BTD, _ = learner.model.apply(
                variables | {'params': params},
                tokens_1T,
                row['segments'][:, :-1],
                row['segments'][:, :-1] > 0,
                row['prefix'][:, :-1],
                method='activations',
            )
            return x_BTD[0].sum(-1) + jnp.square(x_BTD[0]).sum(-1)

        return jnp.abs(jax.jacrev(position_sums)(table_VD)).sum(-1)[:, :12]

    moved = np.asarray(jacobian(variables['params']['embedding'])) > 1e-9
    number, segment = (batch[name][0, :-1] for name in ('prefix', 'segments'))
    later = np.arange(12)[:, None] >= np.arange(12)
    mutual = (number[:, None] == number) & (number > 0)
    same = segment[:, None] == segment
    np.testing.assert_array_equal(moved, (later | mutual) & same)


@pytest.mark.full
def test_property_prefix_ends_at_first_target():
    """The first position depends on the second token, which ends the prefix, and not on the third,
    the first target. Catches a prefix that is shifted like targets.
    """
    config = checked_config(PREFIXED | {'data.seq_len': 12})
    learner, batch = tiny_learner(config), prefixed_batch()
    weights = initial_state(config).weights

    @functools.partial(jax.jit)
    def first_position(weights, batch):
        return compute_activations(learner, learner.variables(weights), batch, (), {})[0][0][:, 0]

    plain = first_position(weights, batch)
    for position, is_changed in ((1, True), (2, False)):
        tokens = batch['tokens'].copy()
        tokens[:, position] = tokens[:, position] % (VOCAB - 1) + 1
        assert np.any(first_position(weights, batch | {'tokens': tokens}) != plain) == is_changed


@pytest.mark.full
def test_property_prefix_tokens_are_no_targets():
    """The loss does not depend on labels in the prefix, and the target share is recorded."""
    config = checked_config(PREFIXED | {'data.seq_len': 12})
    step = jax.jit(make_train_step(tiny_learner(config)))
    state, batch = initial_state(config), prefixed_batch()
    _, metrics = step(state, batch, make_hyper(config))
    assert metrics['batch_tokens'] == 4 * (3 + 5)
    np.testing.assert_allclose(metrics['target_share'], 8 / 12)
    weights = target_weights(batch, BOS)
    assert not np.asarray(weights)[batch['prefix'][:, 1:] > 0].any()


@pytest.mark.full
def test_equivalence_microbatches_and_mapped_runs():
    """The same update of a mixture's batch at once, in two microbatches, and beside another run."""
    config = checked_config(PREFIXED | {'data.seq_len': 12, 'data.batch_size': 4})
    state, batch, hyper = initial_state(config), prefixed_batch(), make_hyper(config)
    batch['targets'][0] = 0  # microbatches of different size
    single, metrics = jax.jit(make_train_step(tiny_learner(config)))(state, batch, hyper)
    halves = checked_config(
        PREFIXED | {'data.seq_len': 12, 'data.batch_size': 4, 'train.microbatches': 2}
    )
    step_in_halves = jax.jit(make_train_step(tiny_learner(halves)))
    halves_state, halves_metrics = step_in_halves(state, batch, hyper)
    assert_trees_close(halves_state.params, single.params, 1e-4, 1e-6)
    np.testing.assert_allclose(halves_metrics['loss'], metrics['loss'], rtol=1e-6)
    np.testing.assert_allclose(halves_metrics['target_share'], metrics['target_share'], rtol=1e-6)
    plain = batch | {'prefix': np.zeros_like(batch['prefix'])}
    many = jax.jit(jax.vmap(make_train_step(tiny_learner(config))))
    mapped_states, mapped_metrics = many(
        stack([state, state]), stack([plain, batch]), stack([hyper, hyper])
    )
    mapped_params = jax.tree.map(lambda leaf: leaf[1], mapped_states.params)
    assert_trees_close(mapped_params, single.params, 1e-4, 1e-6)
    assert abs(mapped_metrics['loss'][0] - mapped_metrics['loss'][1]) > 1e-4


def test_objectives_do_not_share_programs():
    """Runs with different objectives share no batches either, which are made for the runs of a
    program together.
    """
    objectives = ('causal', 'infill', 'causal:0.5+infill:0.5', 'causal:0.4+infill:0.6')
    raw = tiny_raw({'train.eval_objectives': 'infill'})
    cells = expand_sweep(raw, {'data.objective': objectives, 'train.seed': (0, 1)})
    assert [len(group) for group in group_by_program(cells)] == [2, 2, 2, 2]
    assert len({cell.name for cell in cells}) == 8


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus'))


@pytest.mark.full
def test_equivalence_resumed_run_is_the_run(corpus, tmp_path):
    """Equality is bitwise, from half way; includes records of other objectives too."""
    changes = {
        'data_objective': MIXED,
        'train_eval_objectives': 'causal+infill',
        'data_seq_len': 24,
    }
    changes |= {'data_masks': 4, 'optim_schedule': 'constant', 'optim_warmup_steps': 0}
    config = cell_config(base(corpus, **changes), {})
    assert train(config, tmp_path / 'whole') == DONE
    assert train(update_recipe(config, {'train.steps': 4}), tmp_path / 'parts') == DONE
    assert train(config, tmp_path / 'parts', continue_changed=True) == DONE
    whole, parts = timeless(tmp_path / 'whole'), timeless(tmp_path / 'parts')
    assert whole == parts
    assert {'target_share'} <= whole[0].keys()
    assert 'validation_infill_ce' in whole[-1]


INVALID = [
    ({'data.objective': 'causl'}, "Did you mean 'causal'"),
    ({'data.objective': 'fim'}, "Did you mean 'infill'"),
    ({'data.objective': 'causal:0.5+span_coruption:0.5'}, "Did you mean 'span_corruption'"),
    ({'data.objective': 'causal:0.5+infill:0.6'}, 'above 0 and sum to 1; got .*sums to 1.1'),
    ({'data.objective': 'causal:1.5+infill:-0.5'}, 'above 0 and sum to 1'),
    ({'data.objective': 'causal:nan+infill:0.5'}, 'above 0 and sum to 1'),
    ({'data.objective': 'infill:0.5'}, 'above 0 and sum to 1; got .*sums to 0.5'),
    ({'data.objective': 'causal+infill'}, "needs a share, which is a number .*; got 'causal'"),
    ({'data.objective': 'causal:half+infill:0.5'}, "a number .*; got 'causal:half'"),
    ({'data.objective': 'infill:0.5+infill:0.5'}, 'names the same part twice'),
    ({'data.objective': ('causal', 'infill')}, 'join several names with'),
    ({'train.eval_objectives': 'causal+fim'}, "Did you mean 'infill'"),
    ({'data.span_least': 4}, 'not used by this config'),
    ({'data.objective': 'span_corruption', 'data.span_least': 70}, 'must be at most data.span_mo'),
    (
        {'data.objective': 'span_corruption', 'data.mask_ratio_most': 0.1},
        'data.mask_ratio_least must be at most data.mask_ratio_most; got 0.15 and 0.1',
    ),
    ({'data.objective': 'infill', 'data.seq_len': 5}, 'data.seq_len must be at least 8; got 5'),
    (
        {'train.eval_objectives': 'infill', 'data.loss_on': 'holes'},
        'data.loss_on=holes applies to training',
    ),
    (
        {'data.objective': 'prefix', 'model.attention': 'linear'},
        'Choose model.attention=l2.softmax',
    ),
    (
        {'train.eval_objectives': 'prefix', 'attention.affine_scaled': True},
        'attention.affine_scaled=True adds a mean over earlier tokens',
    ),
    (
        {'data.objective': 'prefix', 'kernels.attention': 'splash'},
        'attention=splash does not support prefix=True. These kernels do: blocked, reference',
    ),
]


@pytest.mark.parametrize(('changes', 'words'), INVALID, ids=str)
def test_invalid_objectives_are_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        check(tiny_config(changes))
