"""Objectives on their way into batches, weights and attention.

Property: shares, documents apart, prefixes seen whole and nothing beyond them. Equivalence: hosts,
microbatches, mapped runs, a run gone on with. Contract: what cannot be is refused.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.check import check
from lm.data import Feed, Place, batch_at
from lm.objectives import (
    batch_fields,
    documents,
    evaluated,
    n_marks,
    training_mixture,
)
from lm.state import hyper_from
from lm.step import activations, make_train_step, target_weights
from lm.sweep.cells import cells, groups
from modules.objectives import MARKS
from tests.helpers import (
    BOS,
    FAST,
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
from tests.sweep_helpers import base, changed, timeless, write_corpus
from train import DONE, train

MIXED = 'causal:0.25+span_corruption:0.25+infill:0.25+prefix:0.25'


@dataclasses.dataclass(frozen=True)
class Ids:
    """Of a tokenizer, all that an objective asks."""

    bos_id: int = 100
    eos_id: int = 101
    vocab_size: int = 102


class Numbered:
    """Rows of two documents and padding: of row i, tokens i and i + 1 alone (below 50), and 60."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        tokens, segments = np.full(41, i, np.int32), np.ones(41, np.int32)
        tokens[20], tokens[21:] = Ids.bos_id, 60
        segments[20:] = 2
        tokens[38:] = segments[38:] = 0
        return {'tokens': tokens, 'segments': segments}


def mixture(objective, **changes):
    changes = {f'data.{name}': value for name, value in changes.items()}
    config = tiny_config({'data.objective': objective, 'data.seq_len': 40} | changes)
    return training_mixture(config, Ids())


def test_reference_places_of_documents():
    segments = np.array([1, 1, 1, 2, 3, 3, 0, 0])
    assert list(documents(segments)) == [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert list(documents(np.zeros(3, int))) == []
    assert list(documents(np.ones(3, int))) == [slice(0, 3)]
    assert list(documents(np.array([0, 1, 1, 0, 2]))) == [slice(1, 3), slice(4, 5)]


@pytest.mark.parametrize('objective', ['span_corruption', 'infill', 'prefix'])
def test_property_documents_keep_apart(objective):
    """What is at the place of a document depends on no token of another one, and padding stays."""
    rows, other = Numbered(), Numbered()[7]
    other['tokens'][21:38] = 61
    mix = mixture(objective, **({'span_most': 5} if objective == 'span_corruption' else {}))
    for seed in range(20):
        made, changed_ = (mix(row, np.random.default_rng(seed)) for row in (rows[7], other))
        first, second = made['tokens'][:20], made['tokens'][20:38]
        assert set(first[first < 100]) == {7} and set(second[second < 100]) == {60}
        np.testing.assert_array_equal(changed_['tokens'][:20], first)
        np.testing.assert_array_equal(made['segments'], rows[7]['segments'])
        assert not made['tokens'][38:].any() and not made['targets'][38:].any()
        if objective == 'prefix':
            assert set(made['prefix'][:20]) == {0, 1} and set(made['prefix'][20:38]) == {0, 2}


def test_property_shares_of_a_mixture():
    """Of rows; all documents of a row have one objective."""
    mix, counts = mixture('causal:0.2+infill:0.5+prefix:0.3'), {'causal': 0, 'infill': 0}
    for seed in range(2000):
        row = mix(Numbered()[3], np.random.default_rng(seed))
        first, second = (row['tokens'][place].max() >= 102 for place in documents(row['segments']))
        assert first == second
        counts['infill'] += first
        counts['causal'] += not first and not row['prefix'].any()
    assert abs(counts['infill'] / 2000 - 0.5) < 0.04
    assert abs(counts['causal'] / 2000 - 0.2) < 0.04


def test_property_a_batch_is_a_function_of_seed_step_and_place():
    """Catches numbers drawn from a generator that lives on, which resuming would not find again,
    and rows of a batch, epochs or seeds that are corrupted alike.
    """
    rows, mix = Numbered(), mixture('infill')

    def batch(step, seed=3):
        return batch_at(rows, step, batch_size=8, seed=seed, mixture=mix)

    first = batch(7)
    batch(2)
    jax.tree.map(np.testing.assert_array_equal, batch(7), first)
    cuts = {
        (step, i, seed): tuple(np.flatnonzero(row >= Ids.vocab_size))
        for seed in (3, 4)
        for step in range(10)
        for i, row in enumerate(batch(step, seed)['tokens'])
    }
    assert len(set(cuts.values())) > 150


@pytest.mark.parametrize('count', [2, 4])
def test_equivalence_hosts_together_hold_the_batch(count):
    """Catches numbers by the place in a host's share."""
    rows, mix = Numbered(), mixture(MIXED)
    whole = batch_at(rows, 5, batch_size=8, seed=0, mixture=mix)
    assert list(whole) == ['tokens', 'segments', 'targets', 'prefix']
    parts = []
    for i in range(count):
        feed = Feed(
            rows, batch_size=8, prefetch=2, mixture=mix, process_index=i, process_count=count
        )
        parts += feed.take([Place(0, 5, 9)])
        feed.close()
    for name, value in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), value)
        assert value.dtype == np.int32


def test_property_causal_costs_nothing():
    """The same batches and vocabulary as without objectives, and no array more."""
    config = tiny_config()
    assert training_mixture(config, Ids()) is None and n_marks(config) == 0
    assert batch_fields(config) == ('tokens', 'segments')
    assert evaluated(config, Ids(), Numbered()) == {}


def test_reference_marks_of_the_vocabulary():
    """Those of holes too where they are numbered, in training or evaluation."""
    for changes, wanted in (
        ({'data.objective': 'prefix'}, 0),
        ({'data.objective': 'infill'}, MARKS),
        ({'data.objective': 'causal:0.5+span_corruption:0.5', 'data.masks': 7}, MARKS + 7),
        ({'train.eval_objectives': 'causal+infill'}, MARKS),
        ({'train.eval_objectives': 'infill+span_corruption', 'data.masks': 9}, MARKS + 9),
    ):
        assert n_marks(tiny_config(changes)) == wanted, changes


def test_property_evaluation_is_always_the_same_and_counts_holes():
    """Whatever the seed of the text and the loss in training."""
    seen = []
    for changes in ({}, {'data.seed': 5, 'data.objective': 'infill', 'data.loss_on': 'document'}):
        config = tiny_config({'train.eval_objectives': 'causal+infill+prefix'} | changes)
        found = evaluated(config, Ids(), Numbered())
        assert list(found) == ['infill', 'prefix']
        assert len(found['infill']) == 40
        seen.append([found['infill'][i] for i in range(40)])
    jax.tree.map(np.testing.assert_array_equal, *seen)
    for row in seen[0]:
        counted = row['tokens'][row['targets'] > 0]
        assert 2 <= len(counted) < 30 and (counted == Ids.vocab_size + 1).sum() == 2


def test_weights_are_those_of_the_targets():
    """Padding and beginnings stay out, whatever an objective says of them."""
    batch = packed_batch()
    plain = target_weights(batch, BOS)
    batch['targets'] = np.ones_like(batch['tokens'])
    np.testing.assert_array_equal(target_weights(batch, BOS), plain)
    batch['targets'][:, :4] = 0
    np.testing.assert_array_equal(target_weights(batch, BOS)[:, :3], 0)
    np.testing.assert_array_equal(target_weights(batch, BOS)[:, 3:], plain[:, 3:])


PREFIXED = {'data.mask_documents': True, 'data.objective': 'prefix'}


def prefixed_batch():
    """Two documents a row, the first 2 and 3 tokens of which are their prefixes."""
    batch = packed_batch(rows=4, length=12)
    batch['segments'][:] = np.repeat([1, 2], [5, 8])
    batch['tokens'] = np.where(batch['tokens'] == BOS, 1, batch['tokens'])
    batch['prefix'] = np.zeros_like(batch['tokens'])
    batch['prefix'][:, :2], batch['prefix'][:, 5:8] = 1, 2
    batch['targets'] = (batch['prefix'] == 0).astype(np.int32)
    return batch


@pytest.mark.parametrize('kernel', ['reference', 'blocked'])
def test_property_a_prefix_is_seen_whole_and_nothing_beyond_it(kernel):
    """By the gradient of each position with respect to each embedding, through two layers, with
    ALiBi. Catches a prefix that leaks into the next document's, or a target that is seen.
    """
    changes = {'kernels.attention': kernel, 'model.position': 'alibi', 'data.seq_len': 12}
    config = checked_config(PREFIXED | changes)
    learner, batch = tiny_learner(config), prefixed_batch()
    row = {name: jnp.asarray(value[:1]) for name, value in batch.items()}
    variables = learner.variables(initial_state(config).weights)

    @jax.jit
    def jacobian(table_VD):
        """[T, T]: how position t moves with what is looked up at s."""
        own = jnp.asarray(np.arange(12)[None])  # each place has a token of its own

        def out(table_VD):
            params = variables['params'] | {'embedding': table_VD}
            x_BTD, _ = learner.model.apply(
                variables | {'params': params},
                own,
                row['segments'][:, :-1],
                row['segments'][:, :-1] > 0,
                row['prefix'][:, :-1],
                method='activations',
            )
            return x_BTD[0].sum(-1) + jnp.square(x_BTD[0]).sum(-1)

        return jnp.abs(jax.jacrev(out)(table_VD)).sum(-1)[:, :12]

    moved = np.asarray(jacobian(variables['params']['embedding'])) > 1e-9
    number, segment = (batch[name][0, :-1] for name in ('prefix', 'segments'))
    later = np.arange(12)[:, None] >= np.arange(12)
    mutual = (number[:, None] == number) & (number > 0)
    same = segment[:, None] == segment
    np.testing.assert_array_equal(moved, (later | mutual) & same)


def test_property_a_batch_says_how_far_the_prefix_reaches():
    """The first position moves with the second token, the last of the prefix, and not with the
    third, which is the first target. Catches a prefix shifted as targets are.
    """
    config = checked_config(PREFIXED | {'data.seq_len': 12})
    learner, batch = tiny_learner(config), prefixed_batch()
    weights = initial_state(config).weights

    @functools.partial(jax.jit, compiler_options=FAST)
    def first_position(weights, batch):
        return activations(learner, learner.variables(weights), batch, ())[0][0][:, 0]

    plain = first_position(weights, batch)
    for place, moves in ((1, True), (2, False)):
        tokens = batch['tokens'].copy()
        tokens[:, place] = tokens[:, place] % (VOCAB - 1) + 1
        assert np.any(first_position(weights, batch | {'tokens': tokens}) != plain) == moves


def test_property_what_a_prefix_holds_is_no_target():
    """The loss does not move with the label of a token of the prefix, and its share is recorded."""
    config = checked_config(PREFIXED | {'data.seq_len': 12})
    step = jax.jit(make_train_step(tiny_learner(config)), compiler_options=FAST)
    state, batch = initial_state(config), prefixed_batch()
    _, metrics = step(state, batch, hyper_from(config))
    assert metrics['batch_tokens'] == 4 * (3 + 5)
    np.testing.assert_allclose(metrics['target_share'], 8 / 12)
    weights = target_weights(batch, BOS)
    assert not np.asarray(weights)[batch['prefix'][:, 1:] > 0].any()


def test_equivalence_microbatches_and_mapped_runs():
    """The same update of a mixture's batch at once, in two parts, and beside another run."""
    config = checked_config(PREFIXED | {'data.seq_len': 12, 'data.batch_size': 4})
    state, batch, hyper = initial_state(config), prefixed_batch(), hyper_from(config)
    batch['targets'][0] = 0  # parts of other size
    alone, metrics = jax.jit(make_train_step(tiny_learner(config)), compiler_options=FAST)(
        state, batch, hyper
    )
    halves = checked_config(
        PREFIXED | {'data.seq_len': 12, 'data.batch_size': 4, 'train.microbatches': 2}
    )
    other = jax.jit(make_train_step(tiny_learner(halves)), compiler_options=FAST)
    in_parts, of_parts = other(state, batch, hyper)
    assert_trees_close(in_parts.params, alone.params, 1e-4, 1e-6)
    np.testing.assert_allclose(of_parts['loss'], metrics['loss'], rtol=1e-6)
    np.testing.assert_allclose(of_parts['target_share'], metrics['target_share'], rtol=1e-6)
    plain = batch | {'prefix': np.zeros_like(batch['prefix'])}
    many = jax.jit(jax.vmap(make_train_step(tiny_learner(config))), compiler_options=FAST)
    both, seen = many(stack([state, state]), stack([plain, batch]), stack([hyper, hyper]))
    own = jax.tree.map(lambda leaf: leaf[1], both.params)
    assert_trees_close(own, alone.params, 1e-4, 1e-6)
    assert abs(seen['loss'][0] - seen['loss'][1]) > 1e-4


def test_runs_of_other_objectives_share_no_program():
    """Nor batches, which are made for a program's runs together."""
    objectives = ('causal', 'infill', 'causal:0.5+infill:0.5', 'causal:0.4+infill:0.6')
    raw = tiny_raw({'train.eval_objectives': 'infill'})
    made = cells(raw, {'data.objective': objectives, 'train.seed': (0, 1)})
    assert [len(group) for group in groups(made)] == [2, 2, 2, 2]
    assert len({cell.name for cell in made}) == 8


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus'))


def test_equivalence_a_run_gone_on_with_is_the_run(corpus, tmp_path):
    """To the bit, half way through; what it records of other objectives too."""
    more = {'data_objective': MIXED, 'train_eval_objectives': 'causal+infill', 'data_seq_len': 24}
    more |= {'data_masks': 4, 'optim_schedule': 'constant', 'optim_warmup_steps': 0}
    config = changed(base(corpus, **more), {})
    assert train(config, tmp_path / 'whole') == DONE
    half = dataclasses.replace(config.train, steps=4)
    assert train(dataclasses.replace(config, train=half), tmp_path / 'parts') == DONE
    assert train(config, tmp_path / 'parts', continue_changed=True) == DONE
    whole, parts = timeless(tmp_path / 'whole'), timeless(tmp_path / 'parts')
    assert whole == parts
    assert {'target_share'} <= whole[0].keys()
    assert 'validation_infill_ce' in whole[-1]


BAD = [
    ({'data.objective': 'causl'}, "Did you mean 'causal'"),
    ({'data.objective': 'fim'}, "Did you mean 'infill'"),
    ({'data.objective': 'causal:0.5+span_coruption:0.5'}, "Did you mean 'span_corruption'"),
    ({'data.objective': 'causal:0.5+infill:0.6'}, 'above 0 and sum to 1; got .*sums to 1.1'),
    ({'data.objective': 'causal:1.5+infill:-0.5'}, 'above 0 and sum to 1'),
    ({'data.objective': 'causal:nan+infill:0.5'}, 'above 0 and sum to 1'),
    ({'data.objective': 'infill:0.5'}, 'above 0 and sum to 1; got .*sums to 0.5'),
    ({'data.objective': 'causal+infill'}, "has its share behind it, a number; got 'causal'"),
    ({'data.objective': 'causal:half+infill:0.5'}, "a number; got 'causal:half'"),
    ({'data.objective': 'infill:0.5+infill:0.5'}, 'names a row twice'),
    ({'data.objective': ('causal', 'infill')}, 'several names are one text'),
    ({'train.eval_objectives': 'causal+fim'}, "Did you mean 'infill'"),
    ({'data.span_least': 4}, 'read by no part of this config'),
    ({'data.objective': 'span_corruption', 'data.span_least': 70}, 'must be at most data.span_mo'),
    (
        {'data.objective': 'span_corruption', 'data.mask_ratio_most': 0.1},
        'data.mask_ratio_least must be at most data.mask_ratio_most; got 0.15 and 0.1',
    ),
    ({'data.objective': 'infill', 'data.seq_len': 5}, 'data.seq_len must be at least 8; got 5'),
    (
        {'train.eval_objectives': 'infill', 'data.loss_on': 'holes'},
        'data.loss_on=holes is of training',
    ),
    (
        {'data.objective': 'prefix', 'model.attention': 'linear'},
        'Choose model.attention=l2.softmax',
    ),
    (
        {'train.eval_objectives': 'prefix', 'attention.affine_scaled': True},
        'the mean that attention.affine_scaled=True adds is of earlier ones',
    ),
    (
        {'data.objective': 'prefix', 'kernels.attention': 'splash'},
        'kernels.attention=splash does not serve prefix=True; those that do: blocked, reference',
    ),
]


@pytest.mark.parametrize(('changes', 'words'), BAD, ids=str)
def test_what_cannot_be_is_refused(changes, words):
    with pytest.raises(ValueError, match=words):
        check(tiny_config(changes))
