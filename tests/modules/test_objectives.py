"""Objectives. Reference: documents corrupted by hand. Property: the text can be restored, shares
and lengths are uniform, and the right tokens are targets.
"""

import collections

import numpy as np
import pytest

from modules.objectives import N_UNNUMBERED, SpecialTokens, causal, infill, prefix, span_corruption

BOS, EOS, VOCAB = 90, 91, 92
SPECIAL = SpecialTokens(BOS, EOS, VOCAB)
SEP, EOM, PREFIX, SUFFIX, MIDDLE = range(VOCAB, VOCAB + N_UNNUMBERED)
MASK_1, MASK_2 = VOCAB + N_UNNUMBERED, VOCAB + N_UNNUMBERED + 1


class Scripted:
    """A random generator with scripted answers, whatever the arguments."""

    def __init__(self, **answers):
        self.answers = answers

    def __getattr__(self, name):
        return lambda *arguments, **keywords: self.answers[name]


def text(n, begins=False, ends=False):
    """Tokens 1, 2, ..., n, after BOS or before EOS."""
    return np.array([BOS] * begins + [*range(1, n + 1)] + [EOS] * ends, np.int32)


def assert_document(document, tokens, targets):
    np.testing.assert_array_equal(document.tokens, tokens)
    np.testing.assert_array_equal(document.tokens[document.targets], targets)
    assert document.tokens.dtype == np.int32 and not document.prefix.any()


def test_reference_two_holes_by_hand():
    """Half of the 14 tokens that 21 leave beside 7 special tokens: lengths 4 and 5, the second cut
    to 3; two tokens before the first hole, and one between them.
    """
    rng = Scripted(uniform=0.5, integers=np.array([4, 5, 9]), choice=np.array([2, 5]))
    options = {'special_tokens': SPECIAL, 'rng': rng, 'masks': 3}
    begins = [BOS, 1, 2, MASK_1, 7, 8, MASK_2, 12, 13, 14]
    holes = [SEP, MASK_1, 3, 4, 5, 6, EOM, MASK_2, 9, 10, 11, EOM]
    infills = [3, 4, 5, 6, EOM, 9, 10, 11, EOM]
    document = span_corruption(text(21, begins=True), **options)
    assert_document(document, begins + holes, infills)
    document = span_corruption(text(21, begins=True), loss_on='document', **options)
    assert_document(document, begins + holes, [1, 2, 7, 8, 12, 13, 14, *infills])
    # A document continued from an earlier row loses its first seven tokens, and keeps its end.
    later = [t + 7 if 1 <= t <= 14 else t for t in begins[1:]] + [EOS]
    holes = [t + 7 if 1 <= t <= 14 else t for t in holes]
    document = span_corruption(text(21, ends=True), loss_on='document', **options)
    infills = [t + 7 if t <= 14 else t for t in infills]
    assert_document(document, later + holes, [8, 9, 14, 15, 19, 20, 21, EOS, *infills])


def test_reference_infill_by_hand():
    """Cuts behind 2 and 5 of the six tokens that ten leave beside four special tokens."""
    options = {'special_tokens': SPECIAL, 'rng': Scripted(integers=np.array([5, 2]))}
    expected = [BOS, PREFIX, 1, 2, SUFFIX, 6, MIDDLE, 3, 4, 5, EOM]
    document = infill(text(10, begins=True, ends=False), **options)
    assert_document(document, expected, [1, 2, 6, 3, 4, 5, EOM])
    document = infill(text(10, begins=True), loss_on='holes', **options)
    assert_document(document, expected, [3, 4, 5, EOM])
    document = infill(text(10, ends=True), **options)
    expected = [PREFIX, 5, 6, SUFFIX, 10, EOS, MIDDLE, 7, 8, 9, EOM]
    assert_document(document, expected, [5, 6, 10, EOS, 7, 8, 9, EOM])


def test_reference_prefix_by_hand():
    document = prefix(text(5), SPECIAL, Scripted(integers=2))
    np.testing.assert_array_equal(document.tokens, text(5))
    np.testing.assert_array_equal(document.prefix, [True, True, False, False, False])
    np.testing.assert_array_equal(document.targets, ~document.prefix)


def restore_text(tokens):
    """Returns the text of a corrupted document, as a reader of the special tokens."""
    tokens = tokens.tolist()
    if PREFIX in tokens:
        first, second, third = (tokens.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE))
        assert tokens[-1] == EOM
        middle = tokens[third + 1 : -1]
        return tokens[:first] + tokens[first + 1 : second] + middle + tokens[second + 1 : third]
    if SEP not in tokens:
        return tokens
    stop = tokens.index(SEP)
    holes, filled = {}, tokens[stop + 1 :]
    while filled:
        end = filled.index(EOM)
        holes[filled[0]] = filled[1:end]
        assert end > 1, 'an empty hole'
        filled = filled[end + 1 :]
    assert list(holes) == [MASK_1 + i for i in range(len(holes))]
    text_tokens = []
    for token in tokens[:stop]:
        text_tokens += holes.pop(token) if token >= MASK_1 else [token]
    assert not holes
    return text_tokens


CASES = [(begins, ends) for begins in (False, True) for ends in (False, True)]


@pytest.mark.parametrize('loss_on', ['document', 'holes'])
@pytest.mark.parametrize('objective', [span_corruption, infill], ids=lambda f: f.__name__)
@pytest.mark.parametrize(('begins', 'ends'), CASES)
def test_property_text_can_be_restored(begins, ends, objective, loss_on):
    """The document has exactly one stretch of the text, as long as its room: the beginning if BOS
    is in it, else the end. Catches text lost, doubled or out of order, holes mixed up, EOS in the
    middle, a document that outgrows its row, and special tokens among the targets.
    """
    rng, corrupted = np.random.default_rng(0), 0
    for n in [*range(1, 30), *range(30, 400, 7)]:
        tokens = text(n, begins, ends) % VOCAB
        tokens[tokens >= BOS] %= BOS  # text has no special tokens
        tokens[0], tokens[-1] = BOS if begins else tokens[0], EOS if ends else tokens[-1]
        options = {
            'masks': int(rng.integers(1, 9)),
            'mask_ratio_least': 0.0,
            'mask_ratio_most': 1.0,
        }
        options = options if objective is span_corruption else {}
        document = objective(tokens, SPECIAL, rng, loss_on=loss_on, **options)
        assert (
            document.tokens.shape == document.targets.shape == document.prefix.shape == tokens.shape
        )
        text_tokens = restore_text(document.tokens)
        expected = (
            tokens[: len(text_tokens)] if begins else tokens[len(tokens) - len(text_tokens) :]
        )
        assert text_tokens == expected.tolist()
        is_special = document.tokens >= VOCAB
        if not is_special.any():
            assert document.targets.all() if loss_on == 'document' else not document.targets.any()
            continue
        corrupted += 1
        assert document.targets[document.tokens == EOM].all()
        assert not document.targets[is_special & (document.tokens != EOM)].any()
        last = document.tokens.tolist().index(SEP if objective is span_corruption else MIDDLE)
        is_text = ~is_special & (document.tokens != BOS)
        assert document.targets[last:][is_text[last:]].all()
        assert (document.targets[:last][is_text[:last]] == (loss_on == 'document')).all()
    assert corrupted > 70


def measure_holes(tokens):
    """Returns the lengths of holes, in order, and the number of text tokens."""
    tokens = tokens.tolist()
    filled = tokens[tokens.index(SEP) + 1 :]
    lengths = np.diff(np.flatnonzero(np.array(filled) == EOM), prepend=-1) - 2
    return lengths, len(restore_text(np.array(tokens)))


def test_property_shares_and_lengths_are_uniform():
    """Catches the share of the row in place of the text, bounds left out, a span one too long."""
    rng, shares, lengths = np.random.default_rng(0), [], []
    for _ in range(1000):
        document = span_corruption(text(600) % BOS, SPECIAL, rng, span_most=10, masks=128)
        hole_lengths, n_text = measure_holes(document.tokens)
        shares.append(hole_lengths.sum() / n_text)
        lengths += hole_lengths[:-1].tolist()
    assert 0.14 < min(shares) < 0.16 and 0.49 < max(shares) < 0.51
    deciles = np.quantile(shares, np.linspace(0.1, 0.9, 9))
    np.testing.assert_allclose(deciles, np.linspace(0.185, 0.465, 9), atol=0.025)
    counts = collections.Counter(lengths)
    assert sorted(counts) == list(range(3, 11))
    np.testing.assert_allclose(np.array(list(counts.values())) / len(lengths), 1 / 8, atol=0.01)


def test_property_hole_places_are_uniform():
    """The first and the last place count too. A hole takes two of five tokens: four places."""
    rng, options = np.random.default_rng(0), {'span_least': 2, 'span_most': 2, 'masks': 1}
    options |= {'mask_ratio_least': 0.4, 'mask_ratio_most': 0.4}
    places = collections.Counter(
        span_corruption(text(9), SPECIAL, rng, **options).tokens.tolist().index(MASK_1)
        for _ in range(2000)
    )
    assert sorted(places) == [0, 1, 2, 3]
    np.testing.assert_allclose(np.array(list(places.values())) / 2000, 0.25, atol=0.04)


def test_property_cuts_are_uniform_and_parts_may_be_empty():
    rng, sizes = np.random.default_rng(0), collections.Counter()
    for _ in range(4000):
        tokens = infill(text(7), SPECIAL, rng).tokens.tolist()
        first, second, third = (tokens.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE))
        sizes[second - first - 1, len(tokens) - third - 2] += 1
    for (before, middle), count in sizes.items():
        expected = (1 if middle == 0 else 2) / 16  # two of four cuts, in either order
        assert abs(count / 4000 - expected) < 0.025, (before, middle)
    assert len(sizes) == 10


def test_property_prefixes_are_uniform():
    rng = np.random.default_rng(0)
    sizes = collections.Counter(
        int(prefix(text(5), SPECIAL, rng).prefix.sum()) for _ in range(2000)
    )
    assert sorted(sizes) == [1, 2, 3, 4]
    np.testing.assert_allclose(np.array(list(sizes.values())) / 2000, 0.25, atol=0.04)
    assert prefix(text(1), SPECIAL, rng).targets.all()


def test_property_holes_stop_at_the_last_mask():
    """No token is outside of the vocabulary; the share is then smaller."""
    rng = np.random.default_rng(0)
    options = {'mask_ratio_least': 0.9, 'mask_ratio_most': 0.9, 'span_most': 4, 'masks': 3}
    for _ in range(50):
        document = span_corruption(text(80), SPECIAL, rng, **options)
        assert document.tokens.max() == VOCAB + N_UNNUMBERED + 2
        lengths, _ = measure_holes(document.tokens)
        assert len(lengths) == 3 and (lengths <= 4).all()


def test_causal_objective_keeps_documents():
    document = causal(text(5), SPECIAL, None)
    assert_document(document, text(5), text(5))
