import numpy as np
import pytest

from lm.data.rows import CHUNK, PACKINGS, Rows

BOS = 10**6  # tokens of the streams below are 1, 2, 3, ... but for this one


def stream(lengths):
    """Returns distinct tokens, where each document begins with BOS, and the starts of documents."""
    documents = np.concatenate([[0], np.cumsum(lengths)])
    tokens = np.arange(1, documents[-1] + 1)
    tokens[documents[:-1]] = BOS
    return tokens, documents


def build_rows(packing, lengths, seq_len):
    tokens, documents = stream(lengths)
    chunks = [{'tokens': tokens[i : i + CHUNK]} for i in range(0, len(tokens), CHUNK)]
    return Rows(chunks, documents, PACKINGS[packing](documents, seq_len), seq_len, n_bytes=0)


def random_lengths(seed, longest):
    rng = np.random.default_rng(seed)
    return rng.integers(2, longest + 1, size=rng.integers(1, 200))


CASES = [(seed, T, longest) for seed in range(6) for T, longest in [(1, 9), (16, 12), (31, 300)]]


@pytest.mark.default_rows(
    '0-1-9-concat',
    '0-1-9-best_fit',
    '0-16-12-concat',
    '0-16-12-best_fit',
    '0-31-300-concat',
    '0-31-300-best_fit',
    '1-1-9-concat',
    '1-1-9-best_fit',
    '1-16-12-concat',
    '1-16-12-best_fit',
    '1-31-300-concat',
    '1-31-300-best_fit',
)
@pytest.mark.parametrize('packing', PACKINGS)
@pytest.mark.parametrize('seed, seq_len, longest', CASES)
def test_property_every_token_but_bos_is_a_target_once(packing, seed, seq_len, longest):
    lengths = random_lengths(seed, longest)
    tokens, documents = stream(lengths)
    rows = build_rows(packing, lengths, seq_len)
    targets = []
    for row in rows:
        assert row['tokens'].shape == row['segments'].shape == (seq_len + 1,)
        is_target = (row['segments'] > 0) & (row['tokens'] != BOS)
        is_target[0] = False
        positions = np.flatnonzero(is_target)
        # The input of a target is the token before it in its document.
        inputs = row['tokens'][positions - 1]
        is_first = np.isin(row['tokens'][positions] - 1, documents[:-1] + 1)
        np.testing.assert_array_equal(inputs, np.where(is_first, BOS, row['tokens'][positions] - 1))
        # Equivalent rule: a target and its input share a segment.
        same = row['segments'][1:] == row['segments'][:-1]
        np.testing.assert_array_equal(same & (row['segments'][1:] > 0), is_target[1:])
        targets.append(row['tokens'][positions])
    np.testing.assert_array_equal(np.sort(np.concatenate(targets)), tokens[tokens != BOS])
    assert rows.n_tokens == (tokens != BOS).sum()


@pytest.mark.parametrize('packing', PACKINGS)
def test_property_segments_number_documents(packing):
    lengths = random_lengths(3, 60)
    rows = build_rows(packing, lengths, 64)
    for row in rows:
        used = row['segments'] > 0
        n_used = used.sum()
        assert used[:n_used].all()  # padding is at the end
        assert (row['tokens'][~used] == 0).all()
        steps = np.diff(row['segments'][:n_used], prepend=0)
        assert set(steps.tolist()) <= {0, 1} and steps[0] == 1
        begins = steps[1:] == 1
        np.testing.assert_array_equal(row['tokens'][1:n_used] == BOS, begins)


@pytest.mark.parametrize('packing', PACKINGS)
def test_property_document_ids(packing):
    rows = build_rows(packing, random_lengths(3, 60), 32)
    documents = list(rows.documents(with_marks=True))
    assert len(documents) == rows.n_documents
    for bare, whole in zip(rows.documents(), documents, strict=True):
        np.testing.assert_array_equal(bare, whole[1:-1])
    for i, row in enumerate(rows):
        owners = rows.document_ids(i)
        np.testing.assert_array_equal(owners == -1, row['segments'] == 0)
        for owner in {*owners.tolist()} - {-1}:
            document_tokens = row['tokens'][owners == owner]
            assert document_tokens[document_tokens != BOS].tolist() in windows(
                documents[owner], (document_tokens != BOS).sum()
            )
            assert (document_tokens[0] == BOS) <= (
                documents[owner][1] in document_tokens or len(document_tokens) == 1
            )
            assert BOS not in document_tokens[1:]


def windows(tokens, n):
    """Returns the n tokens after each position of a document, without BOS."""
    bare = tokens[1:].tolist()
    return [bare[i : i + n] for i in range(len(bare) - n + 1)]


def test_reference_concat_windows():
    tokens, _ = stream([5, 4, 2])
    rows = build_rows('concat', [5, 4, 2], 4)
    np.testing.assert_array_equal(rows[0]['tokens'], tokens[0:5])
    np.testing.assert_array_equal(rows[1]['tokens'], tokens[4:9])
    np.testing.assert_array_equal(rows[1]['segments'], [1, 2, 2, 2, 2])
    np.testing.assert_array_equal(rows[2]['tokens'], [*tokens[8:11], 0, 0])
    np.testing.assert_array_equal(rows[2]['segments'], [1, 2, 2, 0, 0])
    assert len(rows) == 3
    with pytest.raises(IndexError):
        rows[3]


def slow_best_fit_decreasing(lengths, capacity):
    room = []
    for length in sorted(lengths, reverse=True):
        fits = [r for r in room if r >= length]
        if fits:
            room[room.index(min(fits))] -= length
        else:
            room.append(capacity - length)
    return len(room)


@pytest.mark.parametrize('seed', range(8))
def test_reference_best_fit_decreasing(seed):
    lengths = random_lengths(seed, 33)
    assert len(build_rows('best_fit', lengths, 32)) == slow_best_fit_decreasing(lengths, 33)


@pytest.mark.parametrize('seed', range(4))
def test_property_best_fit_cuts_and_pads_little(seed):
    seq_len = 64
    lengths = np.concatenate([random_lengths(seed, 50), random_lengths(seed + 9, 200)])
    _, documents = stream(lengths)
    layout = PACKINGS['best_fit'](documents, seq_len)
    pieces = dict(zip(layout.starts.tolist(), layout.lengths.tolist(), strict=True))
    for start, length in zip(documents[:-1].tolist(), lengths.tolist(), strict=True):
        assert pieces[start] == min(length, seq_len + 1)
    # Next fit, in order of arrival, is what packing without a search would do.
    naive, room = 0, 0
    for length in layout.lengths[np.argsort(layout.starts)]:
        if length > room:
            naive, room = naive + 1, seq_len + 1
        room -= length
    assert len(layout.rows) - 1 < naive
    used = np.add.reduceat(layout.lengths, layout.rows[:-1])
    assert used.max() <= seq_len + 1


def test_property_best_fit_is_fast():
    """0.15 s here; a search over open rows for each document would take minutes."""
    lengths = np.random.default_rng(0).lognormal(5, 1, 300_000).astype(int) + 2
    layout = PACKINGS['best_fit'](np.concatenate([[0], np.cumsum(lengths)]), 1024)
    assert layout.lengths.sum() > 0.999 * 1025 * (len(layout.rows) - 1)


def test_property_a_row_reads_only_its_chunks():
    tokens, documents = stream([CHUNK * 10])
    chunks_read = []

    class Chunks:
        def __getitem__(self, i):
            chunks_read.append(i)
            return {'tokens': tokens[i * CHUNK : (i + 1) * CHUNK]}

    rows = Rows(Chunks(), documents, PACKINGS['concat'](documents, 512), 512, n_bytes=0)
    row = rows[len(rows) // 2]
    assert chunks_read == [5]
    start = len(rows) // 2 * 512
    np.testing.assert_array_equal(row['tokens'], tokens[start : start + 513])
    rows[7]  # tokens 3584 ... 4096: one beyond the first chunk
    assert chunks_read == [5, 0, 1]
