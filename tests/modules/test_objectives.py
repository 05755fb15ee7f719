"""What objectives make of a document.

Reference: documents corrupted by hand. Property: the text can be put together again, shares and
lengths are distributed as said, and what is a target.
"""

import collections

import numpy as np
import pytest

from modules.objectives import N_UNNUMBERED, SpecialTokens, causal, infill, prefix, span_corruption

BOS, EOS, VOCAB = 90, 91, 92
MARKS_HERE = SpecialTokens(BOS, EOS, VOCAB)
SEP, EOM, PREFIX, SUFFIX, MIDDLE = range(VOCAB, VOCAB + N_UNNUMBERED)
MASK_1, MASK_2 = VOCAB + N_UNNUMBERED, VOCAB + N_UNNUMBERED + 1


class Scripted:
    """Gives what it was told, whatever is asked."""

    def __init__(self, **answers):
        self.answers = answers

    def __getattr__(self, name):
        return lambda *arguments, **keywords: self.answers[name]


def text(n, begins=False, ends=False):
    """Tokens 1, 2, ..., n, after BOS or before EOS."""
    return np.array([BOS] * begins + [*range(1, n + 1)] + [EOS] * ends, np.int32)


def assert_is(made, tokens, targets):
    np.testing.assert_array_equal(made.tokens, tokens)
    np.testing.assert_array_equal(made.tokens[made.targets], targets)
    assert made.tokens.dtype == np.int32 and not made.prefix.any()


def test_reference_two_holes_by_hand():
    """Half of the 14 tokens that 21 leave beside 7 marks: lengths 4 and 5, of which the second is
    cut to 3; two tokens before the first hole, and one between them.
    """
    rng = Scripted(uniform=0.5, integers=np.array([4, 5, 9]), choice=np.array([2, 5]))
    given = {'special_tokens': MARKS_HERE, 'rng': rng, 'masks': 3}
    begins = [BOS, 1, 2, MASK_1, 7, 8, MASK_2, 12, 13, 14]
    holes = [SEP, MASK_1, 3, 4, 5, 6, EOM, MASK_2, 9, 10, 11, EOM]
    infills = [3, 4, 5, 6, EOM, 9, 10, 11, EOM]
    made = span_corruption(text(21, begins=True), **given)
    assert_is(made, begins + holes, infills)
    made = span_corruption(text(21, begins=True), loss_on='document', **given)
    assert_is(made, begins + holes, [1, 2, 7, 8, 12, 13, 14, *infills])
    # One that goes on from an earlier row loses its first seven tokens, and keeps its end.
    later = [t + 7 if 1 <= t <= 14 else t for t in begins[1:]] + [EOS]
    holes = [t + 7 if 1 <= t <= 14 else t for t in holes]
    made = span_corruption(text(21, ends=True), loss_on='document', **given)
    infills = [t + 7 if t <= 14 else t for t in infills]
    assert_is(made, later + holes, [8, 9, 14, 15, 19, 20, 21, EOS, *infills])


def test_reference_infill_by_hand():
    """Cuts behind 2 and 5 of the six tokens that ten leave beside four marks."""
    given = {'special_tokens': MARKS_HERE, 'rng': Scripted(integers=np.array([5, 2]))}
    wanted = [BOS, PREFIX, 1, 2, SUFFIX, 6, MIDDLE, 3, 4, 5, EOM]
    made = infill(text(10, begins=True, ends=False), **given)
    assert_is(made, wanted, [1, 2, 6, 3, 4, 5, EOM])
    made = infill(text(10, begins=True), loss_on='holes', **given)
    assert_is(made, wanted, [3, 4, 5, EOM])
    made = infill(text(10, ends=True), **given)
    wanted = [PREFIX, 5, 6, SUFFIX, 10, EOS, MIDDLE, 7, 8, 9, EOM]
    assert_is(made, wanted, [5, 6, 10, EOS, 7, 8, 9, EOM])


def test_reference_prefix_by_hand():
    made = prefix(text(5), MARKS_HERE, Scripted(integers=2))
    np.testing.assert_array_equal(made.tokens, text(5))
    np.testing.assert_array_equal(made.prefix, [True, True, False, False, False])
    np.testing.assert_array_equal(made.targets, ~made.prefix)


def restored(tokens):
    """The text of a corrupted document, read as a user of the marks would."""
    tokens = tokens.tolist()
    if PREFIX in tokens:
        first, second, third = (tokens.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE))
        assert tokens[-1] == EOM
        middle = tokens[third + 1 : -1]
        return tokens[:first] + tokens[first + 1 : second] + middle + tokens[second + 1 : third]
    if SEP not in tokens:
        return tokens
    at = tokens.index(SEP)
    holes, rest = {}, tokens[at + 1 :]
    while rest:
        end = rest.index(EOM)
        holes[rest[0]] = rest[1:end]
        assert end > 1, 'an empty hole'
        rest = rest[end + 1 :]
    assert list(holes) == [MASK_1 + i for i in range(len(holes))]
    found = []
    for token in tokens[:at]:
        found += holes.pop(token) if token >= MASK_1 else [token]
    assert not holes
    return found


CASES = [(begins, ends) for begins in (False, True) for ends in (False, True)]


@pytest.mark.parametrize('loss_on', ['document', 'holes'])
@pytest.mark.parametrize('objective', [span_corruption, infill], ids=lambda f: f.__name__)
@pytest.mark.parametrize(('begins', 'ends'), CASES)
def test_property_the_text_can_be_put_together_again(begins, ends, objective, loss_on):
    """Exactly one stretch of it, of whatever is left of the room: its beginning where BOS is there,
    else its end. Catches text lost, doubled or out of order, holes mixed up, EOS in the middle, a
    document that outgrows its place, and marks among the targets.
    """
    rng, corrupted = np.random.default_rng(0), 0
    for n in [*range(1, 30), *range(30, 400, 7)]:
        tokens = text(n, begins, ends) % VOCAB
        tokens[tokens >= BOS] %= BOS  # text has none of them
        tokens[0], tokens[-1] = BOS if begins else tokens[0], EOS if ends else tokens[-1]
        options = {
            'masks': int(rng.integers(1, 9)),
            'mask_ratio_least': 0.0,
            'mask_ratio_most': 1.0,
        }
        options = options if objective is span_corruption else {}
        made = objective(tokens, MARKS_HERE, rng, loss_on=loss_on, **options)
        assert made.tokens.shape == made.targets.shape == made.prefix.shape == tokens.shape
        found = restored(made.tokens)
        stays = tokens[: len(found)] if begins else tokens[len(tokens) - len(found) :]
        assert found == stays.tolist()
        is_mark = made.tokens >= VOCAB
        if not is_mark.any():
            assert made.targets.all() if loss_on == 'document' else not made.targets.any()
            continue
        corrupted += 1
        assert made.targets[made.tokens == EOM].all()
        assert not made.targets[is_mark & (made.tokens != EOM)].any()
        last = made.tokens.tolist().index(SEP if objective is span_corruption else MIDDLE)
        is_text = ~is_mark & (made.tokens != BOS)
        assert made.targets[last:][is_text[last:]].all()
        assert (made.targets[:last][is_text[:last]] == (loss_on == 'document')).all()
    assert corrupted > 70


def holes_of(tokens):
    """Lengths of holes, in order, and tokens of text."""
    tokens = tokens.tolist()
    rest = tokens[tokens.index(SEP) + 1 :]
    lengths = np.diff(np.flatnonzero(np.array(rest) == EOM), prepend=-1) - 2
    return lengths, len(restored(np.array(tokens)))


def test_property_shares_and_lengths_are_uniform():
    """Catches the share of the row in place of the text, bounds left out, a span one too long."""
    rng, shares, lengths = np.random.default_rng(0), [], []
    for _ in range(1000):
        made = span_corruption(text(600) % BOS, MARKS_HERE, rng, span_most=10, masks=128)
        own, size = holes_of(made.tokens)
        shares.append(own.sum() / size)
        lengths += own[:-1].tolist()
    assert 0.14 < min(shares) < 0.16 and 0.49 < max(shares) < 0.51
    deciles = np.quantile(shares, np.linspace(0.1, 0.9, 9))
    np.testing.assert_allclose(deciles, np.linspace(0.185, 0.465, 9), atol=0.025)
    counts = collections.Counter(lengths)
    assert sorted(counts) == list(range(3, 11))
    np.testing.assert_allclose(np.array(list(counts.values())) / len(lengths), 1 / 8, atol=0.01)


def test_property_every_place_of_a_hole_is_alike():
    """Also the first and the last. Of five tokens of text one hole takes two: four places."""
    rng, given = np.random.default_rng(0), {'span_least': 2, 'span_most': 2, 'masks': 1}
    given |= {'mask_ratio_least': 0.4, 'mask_ratio_most': 0.4}
    places = collections.Counter(
        span_corruption(text(9), MARKS_HERE, rng, **given).tokens.tolist().index(MASK_1)
        for _ in range(2000)
    )
    assert sorted(places) == [0, 1, 2, 3]
    np.testing.assert_allclose(np.array(list(places.values())) / 2000, 0.25, atol=0.04)


def test_property_cuts_are_uniform_and_parts_may_be_empty():
    rng, sizes = np.random.default_rng(0), collections.Counter()
    for _ in range(4000):
        tokens = infill(text(7), MARKS_HERE, rng).tokens.tolist()
        first, second, third = (tokens.index(mark) for mark in (PREFIX, SUFFIX, MIDDLE))
        sizes[second - first - 1, len(tokens) - third - 2] += 1
    for (before, middle), count in sizes.items():
        wanted = (1 if middle == 0 else 2) / 16  # two of four cuts, in either order
        assert abs(count / 4000 - wanted) < 0.025, (before, middle)
    assert len(sizes) == 10


def test_property_prefixes_are_uniform():
    rng = np.random.default_rng(0)
    sizes = collections.Counter(
        int(prefix(text(5), MARKS_HERE, rng).prefix.sum()) for _ in range(2000)
    )
    assert sorted(sizes) == [1, 2, 3, 4]
    np.testing.assert_allclose(np.array(list(sizes.values())) / 2000, 0.25, atol=0.04)
    assert prefix(text(1), MARKS_HERE, rng).targets.all()


def test_property_holes_end_with_the_numbers_for_them():
    """No token beyond those that the vocabulary has; the share is then smaller."""
    rng = np.random.default_rng(0)
    given = {'mask_ratio_least': 0.9, 'mask_ratio_most': 0.9, 'span_most': 4, 'masks': 3}
    for _ in range(50):
        made = span_corruption(text(80), MARKS_HERE, rng, **given)
        assert made.tokens.max() == VOCAB + N_UNNUMBERED + 2
        lengths, _ = holes_of(made.tokens)
        assert len(lengths) == 3 and (lengths <= 4).all()


def test_causal_leaves_all_as_it_is():
    made = causal(text(5), MARKS_HERE, None)
    assert_is(made, text(5), text(5))
