"""Property: the strings to memorise, and those to forget, are as described."""

import numpy as np

from eval.claims.measures import unlearning


def test_strings_have_keys_and_values():
    """Catches keys among the targets, forgotten strings among the retained, and values of
    templates.
    """
    strings = unlearning._draw_strings(np.random.default_rng(0))
    whole, retained, forgotten, template = (batch['tokens'] for batch in strings)
    assert [len(tokens) for tokens in (whole, retained, forgotten)] == [120, 90, 10]
    np.testing.assert_array_equal(whole[:10], forgotten)
    np.testing.assert_array_equal(whole[10:100], retained)
    is_target = strings.whole['targets'][0] > 0
    np.testing.assert_array_equal(np.flatnonzero(is_target), [5, 6, 7, 8])
    np.testing.assert_array_equal(template[:, ~is_target], forgotten[:, ~is_target])
    assert (template[:, is_target] == unlearning.TEMPLATE).all()
    assert (whole[100:, is_target] == unlearning.TEMPLATE).all()
    assert whole[:100, 1:].min() > max(unlearning.TEMPLATE)
