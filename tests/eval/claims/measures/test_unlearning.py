"""Property: strings that a model memorises, and is to forget, are those that are said."""

import numpy as np

from eval.claims.measures import unlearning


def test_strings_differ_in_what_follows_their_keys():
    """Catches targets of keys, strings to forget among those to keep, and values of templates."""
    strings = unlearning._draw_strings(np.random.default_rng(0))
    whole, kept, forgotten, template = (one['tokens'] for one in strings)
    assert [len(one) for one in (whole, kept, forgotten)] == [120, 90, 10]
    np.testing.assert_array_equal(whole[:10], forgotten)
    np.testing.assert_array_equal(whole[10:100], kept)
    is_target = strings.whole['targets'][0] > 0
    np.testing.assert_array_equal(np.flatnonzero(is_target), [5, 6, 7, 8])
    np.testing.assert_array_equal(template[:, ~is_target], forgotten[:, ~is_target])
    assert (template[:, is_target] == unlearning.TEMPLATE).all()
    assert (whole[100:, is_target] == unlearning.TEMPLATE).all()
    assert whole[:100, 1:].min() > max(unlearning.TEMPLATE)
