"""Objectives on their way into batches, weights and attention.

Property: shares, documents apart, prefixes seen whole and nothing beyond them. Equivalence: hosts,
microbatches, mapped runs, a run gone on with. Contract: what cannot be is refused.
"""

import dataclasses

import jax
import numpy as np
import pytest

from lm.data import Cursor, Feed, batch_at
from lm.model.objectives import (
    batch_fields,
    build_training_mixture,
    count_marks,
    document_slices,
    evaluation_rows,
)
from modules.objectives import N_UNNUMBERED
from tests.helpers import (
    tiny_config,
)

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
    return build_training_mixture(config, Ids())


def test_reference_places_of_documents():
    segments = np.array([1, 1, 1, 2, 3, 3, 0, 0])
    assert list(document_slices(segments)) == [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert list(document_slices(np.zeros(3, int))) == []
    assert list(document_slices(np.ones(3, int))) == [slice(0, 3)]
    assert list(document_slices(np.array([0, 1, 1, 0, 2]))) == [slice(1, 3), slice(4, 5)]


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
        first, second = (
            row['tokens'][place].max() >= 102 for place in document_slices(row['segments'])
        )
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
        return batch_at(rows, step, batch_size=8, seed=seed, transform=mix)

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
    whole = batch_at(rows, 5, batch_size=8, seed=0, transform=mix)
    assert list(whole) == ['tokens', 'segments', 'targets', 'prefix']
    parts = []
    for i in range(count):
        feed = Feed(
            rows, batch_size=8, prefetch=2, transform=mix, process_index=i, process_count=count
        )
        parts += feed.take([Cursor(0, 5, 9)])
        feed.close()
    for name, value in whole.items():
        np.testing.assert_array_equal(np.concatenate([part[name] for part in parts]), value)
        assert value.dtype == np.int32


def test_property_causal_costs_nothing():
    """The same batches and vocabulary as without objectives, and no array more."""
    config = tiny_config()
    assert build_training_mixture(config, Ids()) is None and count_marks(config) == 0
    assert batch_fields(config) == ('tokens', 'segments')
    assert evaluation_rows(config, Ids(), Numbered()) == {}


def test_reference_marks_of_the_vocabulary():
    """Those of holes too where they are numbered, in training or evaluation."""
    for changes, wanted in (
        ({'data.objective': 'prefix'}, 0),
        ({'data.objective': 'infill'}, N_UNNUMBERED),
        ({'data.objective': 'causal:0.5+span_corruption:0.5', 'data.masks': 7}, N_UNNUMBERED + 7),
        ({'train.eval_objectives': 'causal+infill'}, N_UNNUMBERED),
        ({'train.eval_objectives': 'infill+span_corruption', 'data.masks': 9}, N_UNNUMBERED + 9),
    ):
        assert count_marks(tiny_config(changes)) == wanted, changes


def test_property_evaluation_is_always_the_same_and_counts_holes():
    """Whatever the seed of the text and the loss in training."""
    seen = []
    for changes in ({}, {'data.seed': 5, 'data.objective': 'infill', 'data.loss_on': 'document'}):
        config = tiny_config({'train.eval_objectives': 'causal+infill+prefix'} | changes)
        found = evaluation_rows(config, Ids(), Numbered())
        assert list(found) == ['infill', 'prefix']
        assert len(found['infill']) == 40
        seen.append([found['infill'][i] for i in range(40)])
    jax.tree.map(np.testing.assert_array_equal, *seen)
    for row in seen[0]:
        counted = row['tokens'][row['targets'] > 0]
        assert 2 <= len(counted) < 30 and (counted == Ids.vocab_size + 1).sum() == 2
