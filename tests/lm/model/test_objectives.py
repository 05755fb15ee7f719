"""Objectives on their way into batches, weights and attention.

Property: shares, independent documents, prefixes seen whole and nothing beyond. Equivalence: hosts.
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
class SpecialIds:
    """The attributes of a tokenizer that objectives read."""

    bos_id: int = 100
    eos_id: int = 101
    vocab_size: int = 102


class NumberedRows:
    """Rows of two documents and padding: row i has only token i (below 50), then only 60."""

    def __len__(self):
        return 40

    def __getitem__(self, i):
        tokens, segments = np.full(41, i, np.int32), np.ones(41, np.int32)
        tokens[20], tokens[21:] = SpecialIds.bos_id, 60
        segments[20:] = 2
        tokens[38:] = segments[38:] = 0
        return {'tokens': tokens, 'segments': segments}


def mixture(objective, **changes):
    changes = {f'data.{name}': value for name, value in changes.items()}
    config = tiny_config({'data.objective': objective, 'data.seq_len': 40} | changes)
    return build_training_mixture(config, SpecialIds())


def test_reference_document_slices():
    segments = np.array([1, 1, 1, 2, 3, 3, 0, 0])
    assert list(document_slices(segments)) == [slice(0, 3), slice(3, 4), slice(4, 6)]
    assert list(document_slices(np.zeros(3, int))) == []
    assert list(document_slices(np.ones(3, int))) == [slice(0, 3)]
    assert list(document_slices(np.array([0, 1, 1, 0, 2]))) == [slice(1, 3), slice(4, 5)]


@pytest.mark.parametrize('objective', ['span_corruption', 'infill', 'prefix'])
def test_property_documents_are_independent(objective):
    """A document does not depend on tokens of another one, and padding stays."""
    rows, changed_row = NumberedRows(), NumberedRows()[7]
    changed_row['tokens'][21:38] = 61
    mix = mixture(objective, **({'span_most': 5} if objective == 'span_corruption' else {}))
    for seed in range(20):
        transformed, transformed_changed = (
            mix(row, np.random.default_rng(seed)) for row in (rows[7], changed_row)
        )
        first, second = transformed['tokens'][:20], transformed['tokens'][20:38]
        assert set(first[first < 100]) == {7} and set(second[second < 100]) == {60}
        np.testing.assert_array_equal(transformed_changed['tokens'][:20], first)
        np.testing.assert_array_equal(transformed['segments'], rows[7]['segments'])
        assert not transformed['tokens'][38:].any() and not transformed['targets'][38:].any()
        if objective == 'prefix':
            assert set(transformed['prefix'][:20]) == {0, 1} and set(
                transformed['prefix'][20:38]
            ) == {0, 2}


def test_property_mixture_follows_shares():
    """Shares count rows; all documents of a row have the same objective."""
    mix, counts = mixture('causal:0.2+infill:0.5+prefix:0.3'), {'causal': 0, 'infill': 0}
    for seed in range(2000):
        row = mix(NumberedRows()[3], np.random.default_rng(seed))
        first, second = (
            row['tokens'][place].max() >= 102 for place in document_slices(row['segments'])
        )
        assert first == second
        counts['infill'] += first
        counts['causal'] += not first and not row['prefix'].any()
    assert abs(counts['infill'] / 2000 - 0.5) < 0.04
    assert abs(counts['causal'] / 2000 - 0.2) < 0.04


def test_property_batch_depends_on_seed_step_and_row():
    """Catches a stateful generator, which resuming could not restore, and rows of a batch, epochs
    or seeds that are corrupted alike.
    """
    rows, mix = NumberedRows(), mixture('infill')

    def batch(step, seed=3):
        return batch_at(rows, step, batch_size=8, seed=seed, transform=mix)

    first = batch(7)
    batch(2)
    jax.tree.map(np.testing.assert_array_equal, batch(7), first)
    cuts = {
        (step, i, seed): tuple(np.flatnonzero(row >= SpecialIds.vocab_size))
        for seed in (3, 4)
        for step in range(10)
        for i, row in enumerate(batch(step, seed)['tokens'])
    }
    assert len(set(cuts.values())) > 150


def test_bos_is_no_target_in_short_documents():
    """A document too short for holes is unchanged; its BOS cannot be predicted."""
    bos = SpecialIds.bos_id
    tokens, segments = np.array([[bos, 1, 2, bos, 3, 4], [1, 1, 1, 2, 2, 2]], np.int32)
    row = mixture('infill')({'tokens': tokens, 'segments': segments}, np.random.default_rng(0))
    assert row['targets'].tolist() == [0, 1, 1, 0, 1, 1]


@pytest.mark.parametrize('count', [2, 4])
def test_equivalence_hosts_share_the_batch(count):
    """Catches randomness by position in a host's share."""
    rows, mix = NumberedRows(), mixture(MIXED)
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
    """The same batches and vocabulary as without objectives, and no further array."""
    config = tiny_config()
    assert build_training_mixture(config, SpecialIds()) is None and count_marks(config) == 0
    assert batch_fields(config) == ('tokens', 'segments')
    assert evaluation_rows(config, SpecialIds(), NumberedRows()) == {}


def test_reference_count_marks():
    """Numbered holes count too, in training or evaluation."""
    for changes, n_marks in (
        ({'data.objective': 'prefix'}, 0),
        ({'data.objective': 'infill'}, N_UNNUMBERED),
        ({'data.objective': 'causal:0.5+span_corruption:0.5', 'data.masks': 7}, N_UNNUMBERED + 7),
        ({'train.eval_objectives': 'causal+infill'}, N_UNNUMBERED),
        ({'train.eval_objectives': 'infill+span_corruption', 'data.masks': 9}, N_UNNUMBERED + 9),
    ):
        assert count_marks(tiny_config(changes)) == n_marks, changes


def test_property_evaluation_is_fixed_and_counts_holes():
    """Evaluation does not depend on the data seed or the training loss."""
    all_rows = []
    for changes in ({}, {'data.seed': 5, 'data.objective': 'infill', 'data.loss_on': 'document'}):
        config = tiny_config({'train.eval_objectives': 'causal+infill+prefix'} | changes)
        rows_by_objective = evaluation_rows(config, SpecialIds(), NumberedRows())
        assert list(rows_by_objective) == ['infill', 'prefix']
        assert len(rows_by_objective['infill']) == 40
        all_rows.append([rows_by_objective['infill'][i] for i in range(40)])
    jax.tree.map(np.testing.assert_array_equal, *all_rows)
    for row in all_rows[0]:
        counted = row['tokens'][row['targets'] > 0]
        assert 2 <= len(counted) < 30 and (counted == SpecialIds.vocab_size + 1).sum() == 2
