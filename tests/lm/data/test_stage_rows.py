"""The rows of the stages of a run: each is seen once, by any batch, row length and mixture."""

import collections

import numpy as np
import pytest

from lm.config.mixture import MixedRows, Shares
from lm.config.stages import find_stage
from lm.data import Cursor, Feed, batch_at, check_stage_epochs, count_stage_rows
from lm.data.loader import stage_batch_at
from lm.data.rows import PACKINGS, Rows
from lm.data.stage_rows import cut_row, order_stages
from tests.helpers import tiny_config
from tests.lm.data.test_loader import IndexRows, check_same
from tests.lm.data.test_mixed import make_mixture

T = 8
RAMP = '0.2: batch_size=2 seq_len=2; 0.5: batch_size=4 seq_len=4; 0.7: batch_size=4; 1:'


def plan(text, steps=20, changes=None):
    """Returns the stages of a run with data.batch_size=8 and data.seq_len=8."""
    return tiny_config({'train.stages': text, 'train.steps': steps, **(changes or {})}).stages


def make_rows(n_documents=40, packing='concat', seed=0):
    """Returns rows of documents in which each token but BOS, 0, occurs once."""
    lengths = np.random.default_rng(seed).integers(4, 30, n_documents)
    ends = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(ends[-1], dtype=np.int32)
    tokens[ends[:-1]] = 0
    chunks = [{'tokens': tokens[i : i + 4096]} for i in range(0, len(tokens), 4096)]
    return Rows(chunks, ends, PACKINGS[packing](ends, T), T, int(ends[-1]))


def read_batches(rows, stages, **options):
    order = order_stages(rows, stages)
    return [stage_batch_at(order, i, seed=3, **options) for i in range(stages[-1].stop)]


def list_targets(batch):
    """Returns the targets of a batch, as the step counts them."""
    tokens, segments = batch['tokens'][:, 1:], batch['segments'][:, 1:]
    return tokens[(segments > 0) & (tokens != 0)].tolist()


@pytest.mark.parametrize('packing', PACKINGS)
def test_property_every_target_is_read_once(packing):
    """By rows of three lengths and batches of three sizes, over a whole epoch and no more."""
    rows = make_rows(packing=packing)
    plans = [plan(RAMP, steps) for steps in range(40, 70)]
    stages = [p for p in plans if count_stage_rows(rows, p)[0] <= len(rows)][-1]
    batches = read_batches(rows, stages)
    shapes = [batch['tokens'].shape for batch in batches]
    assert {*shapes} == {(2, 3), (4, 5), (4, 9), (8, 9)}
    # The tokens of the plan are those of the batches.
    assert sum(rows_ * (length - 1) for rows_, length in shapes) == stages[-1].stop_tokens
    counts = collections.Counter(target for batch in batches for target in list_targets(batch))
    assert {*counts.values()} == {1}
    whole = collections.Counter(
        target for i in range(len(rows)) for target in list_targets(_stack(rows[i]))
    )
    assert {*whole.values()} == {1} and counts.keys() <= whole.keys()
    assert sum(counts.values()) > 0.85 * sum(whole.values())


def _stack(row):
    return {name: array[None] for name, array in row.items()}


def test_property_a_second_pass_begins_after_all_rows():
    """Of the whole text: short rows at its end are those of rows that the first stage left."""
    rows = IndexRows(30)
    stages = plan('0.5: ; 1: batch_size=4', steps=9)
    numbers = [n for batch in read_batches(rows, stages) for n in batch['tokens'][:, 0].tolist()]
    assert sorted(numbers[:30]) == list(range(30)) and len(numbers) > 30


def test_equivalence_batches_alone_change_no_order():
    """The rows of a run without stages, in its order: with a mixture, over the ends of epochs."""
    for rows in (IndexRows(30), make_mixture()):
        stages = plan('0.3: batch_size=2; 0.6: lr_factor=2; 1: batch_size=16', steps=25)
        staged = np.concatenate([b['tokens'] for b in read_token_batches(rows, stages)])
        plain = [batch_at(rows, s, batch_size=8, seed=3)['tokens'] for s in range(40)]
        np.testing.assert_array_equal(staged, np.concatenate(plain)[: len(staged)])


def read_token_batches(rows, stages):
    return [{'tokens': batch['tokens']} for batch in read_batches(rows, stages)]


def test_reference_stage_mixtures():
    """Each stage has its shares, and each source goes on where it was."""
    config = {
        'data.mixture': "{'a': (5, 'synthetic:markov'), 'b': (3, 'text:b'), 'c': (2, 'text:c')}",
        'data.source': '',
    }
    text = '0.25: mixture=a:1; 0.75: mixture=b:1,c:3; 1:'
    stages = plan(text, steps=20, changes=config)
    rows = make_mixture(sizes=(50, 30, 70), weights=(0.5, 0.3, 0.2))
    batches = [b['tokens'] for b in read_batches(rows, stages)]
    tags = [np.concatenate(batches[s.start : s.stop])[:, 0] for s in stages]
    shares = [np.bincount(stage_tags, minlength=3) / len(stage_tags) for stage_tags in tags]
    np.testing.assert_allclose(shares, [[1, 0, 0], [0, 0.25, 0.75], [0.5, 0.3, 0.2]], atol=0.02)
    order = np.concatenate(batches)
    for tag, size in enumerate((50, 30, 70)):
        numbers = order[order[:, 0] == tag][:, 1].tolist()
        plain = draw_source(rows, tag, len(numbers))
        assert numbers == plain and len({*numbers[:size]}) == min(size, len(numbers))
    assert count_stage_rows(rows, stages) == tuple(np.bincount(order[:, 0]))


def draw_source(rows, tag, n):
    """Returns the first n rows of a source in the order of the mixture without stages."""
    batches = [batch_at(rows, s, batch_size=10, seed=3)['tokens'] for s in range(60)]
    tokens = np.concatenate(batches)
    return tokens[tokens[:, 0] == tag][:n, 1].tolist()


def test_property_short_rows_are_shuffled_over_their_stage():
    """The parts of a row are rarely in one batch."""
    rows = make_rows(400)
    stages = plan('0.5: seq_len=2; 1:', steps=60)
    order = order_stages(rows, stages)
    placed = [
        order.rows[0].locate(i, lambda n, key: np.random.default_rng(n).permutation(n))
        for i in range(stages[0].stop * 8)
    ]
    assert len({*placed}) == len(placed)
    rows_by_batch = np.array([row for _, row, _ in placed]).reshape(-1, 8)
    distinct = [len({*batch}) for batch in rows_by_batch.tolist()]
    assert np.mean(distinct) > 7


def test_property_short_rows_repeat_after_all_parts():
    """In a stage of several passes, each pass has each part once, in another order."""
    rows = make_rows(20)
    stages = plan('0.9: seq_len=2; 1:', steps=100)
    order, passes = order_stages(rows, stages), 4 * len(rows)
    batches = [stage_batch_at(order, i, seed=3)['tokens'] for i in range(stages[0].stop)]
    parts = [tuple(row) for row in np.concatenate(batches).tolist()]
    assert len(parts) > 2 * passes
    first, second = parts[:passes], parts[passes : 2 * passes]
    assert sorted(first) == sorted(second) and first != second
    whole = [tuple(row['tokens'][2 * j : 2 * j + 3].tolist()) for row in rows for j in range(4)]
    assert sorted(first) == sorted(whole)


@pytest.mark.parametrize('rows', [make_rows(), make_mixture()], ids=['text', 'mixture'])
def test_equivalence_feed_and_processes(rows):
    """Batches are made ahead across the boundaries of stages, and shared by processes."""
    text = RAMP if isinstance(rows, Rows) else '0.5: batch_size=4; 1:'
    stages = plan(text, steps=12)
    expected = read_batches(rows, stages)
    feeds = [
        Feed(rows, batch_size=8, prefetch=3, stages=stages, process_index=i, process_count=2)
        for i in range(2)
    ]
    for step, batch in enumerate(expected):
        parts = [feed.take([Cursor(3, step, 12)])[0] for feed in feeds]
        joined = {name: np.concatenate([part[name] for part in parts]) for name in batch}
        check_same(joined, batch)
        assert all(len(feed._futures) == min(4, 12 - step) for feed in feeds)
    for feed in feeds:
        feed.close()


def test_property_a_rollback_keeps_step_shapes():
    """After two batches that are left out, step s has the shape of its stage and later rows."""
    rows, stages = make_rows(400), plan(RAMP)
    order = order_stages(rows, stages)
    earlier = [t for b in read_batches(rows, stages)[:10] for t in list_targets(b)]
    for step in range(8, 20):
        batch = stage_batch_at(order, step + 2, 2, seed=3)
        shape = stages[find_stage(stages, step)].shape
        assert batch['tokens'].shape == (shape.batch_size, shape.seq_len + 1)
        assert not {*list_targets(batch)} & {*earlier}
        earlier += list_targets(batch)


def test_reference_row_parts():
    row = {
        'tokens': np.array([0, 1, 2, 0, 3, 4, 0, 0, 0], np.int32),
        'segments': np.array([1, 1, 1, 2, 2, 2, 0, 0, 0], np.int32),
    }
    first, second = cut_row(row, 0, 2), cut_row(row, 1, 2)
    assert first['tokens'].tolist() == [0, 1, 2, 0, 3]
    assert second['tokens'].tolist() == [3, 4, 0, 0, 0]
    assert first['segments'].tolist() == [1, 1, 1, 2, 2]
    assert second['segments'].tolist() == [1, 1, 0, 0, 0]
    assert cut_row(row, 3, 4)['segments'].tolist() == [0, 0, 0]
    assert first['segments'].dtype == np.int32


def test_repeated_text_is_refused():
    """By the rows of data.seq_len that all stages read together."""
    config = tiny_config({'train.stages': RAMP, 'train.steps': 100, 'data.epochs': 2})
    rows = make_rows(400)
    assert check_stage_epochs(config.data, rows, config.stages) == 1
    with pytest.raises(ValueError, match=r'of the text, which has 60.*Set data.epochs=3'):
        check_stage_epochs(config.data, IndexRows(60), config.stages)
    mixed = MixedRows(('a', 'b'), Shares([0.9, 0.1]), (IndexRows(1000), IndexRows(5)))
    with pytest.raises(ValueError, match=r"rows of 8 tokens of 'b' in data.mixture"):
        check_stage_epochs(config.data, mixed, config.stages)
