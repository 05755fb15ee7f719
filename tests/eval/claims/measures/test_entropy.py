"""Reference: the bound against a search for the least entropy, and its limits by hand; entropies
against sums.
"""

import numpy as np
import pytest

from eval.claims.measures import entropy
from eval.claims.measures.entropy import NORMS, TOKENS, WIDTH, entropies, entropy_bound
from modules.reparam import REPARAMS


def test_entropies_are_those_of_the_sums():
    logits_TS = np.random.default_rng(0).normal(0, 3, (6, 9)) + 500
    p_TS = np.exp(logits_TS - 500) / np.exp(logits_TS - 500).sum(-1, keepdims=True)
    np.testing.assert_allclose(entropies(logits_TS), -(p_TS * np.log(p_TS)).sum(-1), rtol=1e-9)


def test_the_bound_has_its_limits():
    np.testing.assert_allclose(entropy_bound(0.0, 7), np.log(7))
    # T norm exp(-norm) for large norms, which is the paper's rate, up to its constants
    late = [np.log(entropy_bound(norm, 64)) - np.log(64 * norm) + norm for norm in (20.0, 25.0)]
    assert abs(late[1] - late[0]) < 0.1


@pytest.mark.parametrize('norm', NORMS)
def test_the_bound_is_the_least_on_the_sphere(norm):
    """Two groups of equal logits, of all sizes, and random ones: none has less, one as little."""
    rng, least = np.random.default_rng(1), entropy_bound(norm, TOKENS)
    rows = [rng.standard_normal(TOKENS) for _ in range(200)]
    rows += [np.r_[np.ones(n), np.zeros(TOKENS - n)] for n in range(1, TOKENS)]
    centred = np.stack(rows) - np.mean(rows, -1, keepdims=True)
    found = entropies(norm * centred / np.linalg.norm(centred, axis=-1, keepdims=True))
    assert found.min() >= least * (1 - 1e-9)
    np.testing.assert_allclose(found[200], least, rtol=1e-9)


def test_the_construction_reaches_the_bound_of_its_norm():
    np.testing.assert_allclose(
        [entropy.worst_case_over_bound(seed) for seed in range(3)], 1.0, rtol=1e-6
    )


def test_the_map_alone_hides_growth(monkeypatch):
    """Catches a share of matrices that have not grown, with which both are the same."""
    shapes = {name: (WIDTH, WIDTH) for name in entropy.QK}
    maps = REPARAMS['sigma'](entropy.SPECS, shapes), None
    grown = [entropy.grown_entropy_share(one, 4) for one in maps]
    monkeypatch.setattr(entropy, 'GROWTH', 1.0)
    with_map, without = (entropy.grown_entropy_share(one, 4) for one in maps)
    np.testing.assert_allclose([without, grown[0]], with_map, rtol=1e-5)
    assert grown[1] < 0.5 * without
