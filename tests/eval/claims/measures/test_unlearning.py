"""Reference: answers of a model to memorised strings, and the choice of rates. Contract: what the
measure computes is what its row names.
"""

import numpy as np
import pytest

from eval.claims.measures import unlearning
from eval.claims.measures.rows import MEASURES


def test_strings_differ_in_what_follows_their_keys():
    """Catches targets of keys, strings to forget among those to keep, and values of templates."""
    strings = unlearning._strings(np.random.default_rng(0))
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


def test_a_method_is_judged_at_its_best_rate():
    """Two seeds: the least mean cost, where infinite is no cost of a rate that does not suffice."""
    methods, rates = len(unlearning.METHODS), 2
    costs = np.full((2, methods, rates), 4.0)
    costs[:, 0] = [[np.inf, 6.0], [1.0, 10.0]]
    costs[:, 1] = [[1.0, 3.0], [2.0, 3.0]]
    matched = np.broadcast_to([0.25, 0.75], costs.shape)
    found = unlearning._at_the_best_rates(costs, matched, np.ones_like(costs))
    assert found['cost_of_ascent'].value == 8 and found['matched_of_ascent'].value == 0.75
    assert found['cost_of_npo'].value == 1.5 and found['matched_of_npo'].value == 0.25
    np.testing.assert_allclose(found['cost_of_npo_over_ascent'].value, (1 / 6 + 2 / 10) / 2)


@pytest.mark.full
def test_the_measure_has_the_values_of_its_row(monkeypatch):
    """A model that has memorised nothing: no string is given in full, at no cost but rounding."""
    for size, value in {'STEPS': 2, 'SEEDS': 2, 'RATES': (1e-4,), 'MOST_STEPS': 2}.items():
        monkeypatch.setattr(unlearning, size, value)
    found = MEASURES['forgetting'].compute()
    assert found.keys() == set(MEASURES['forgetting'].values)
    assert found['matched_before'].value == 0
    for name in unlearning.METHODS:
        assert abs(found[f'cost_of_{name}'].value) < 1e-5  # of losses of about log 64
