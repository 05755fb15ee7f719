"""Reference: the bound against a search for the least entropy, and against its limits by hand;
entropies against sums.
"""

import numpy as np
import pytest

from eval.claims.measures import entropy
from eval.claims.measures.entropy import NORMS, TOKENS, WIDTH, entropies, entropy_bound
from modules.reparam import REPARAMS


def test_entropies_match_sums():
    logits_TS = np.random.default_rng(0).normal(0, 3, (6, 9)) + 500
    p_TS = np.exp(logits_TS - 500) / np.exp(logits_TS - 500).sum(-1, keepdims=True)
    np.testing.assert_allclose(entropies(logits_TS), -(p_TS * np.log(p_TS)).sum(-1), rtol=1e-9)


def test_entropy_bound_has_published_limits():
    np.testing.assert_allclose(entropy_bound(0.0, 7), np.log(7))
    # T norm exp(-norm) for large norms, which is the paper's rate, up to its constants
    log_ratios = [
        np.log(entropy_bound(norm, 64)) - np.log(64 * norm) + norm for norm in (20.0, 25.0)
    ]
    assert abs(log_ratios[1] - log_ratios[0]) < 0.1


@pytest.mark.parametrize('norm', NORMS)
def test_entropy_bound_is_smallest_on_sphere(norm):
    """Two groups of equal logits of all sizes, and random logits: none has less, one attains the
    bound.
    """
    rng, bound = np.random.default_rng(1), entropy_bound(norm, TOKENS)
    rows = [rng.standard_normal(TOKENS) for _ in range(200)]
    rows += [np.r_[np.ones(n), np.zeros(TOKENS - n)] for n in range(1, TOKENS)]
    centred = np.stack(rows) - np.mean(rows, -1, keepdims=True)
    row_entropies = entropies(norm * centred / np.linalg.norm(centred, axis=-1, keepdims=True))
    assert row_entropies.min() >= bound * (1 - 1e-9)
    np.testing.assert_allclose(row_entropies[200], bound, rtol=1e-9)


def test_worst_case_reaches_bound():
    np.testing.assert_allclose(
        [entropy.worst_case_over_bound(seed) for seed in range(3)], 1.0, rtol=1e-6
    )


def test_only_sigma_hides_growth(monkeypatch):
    """Catches a share of matrices that have not grown, for which both are equal."""
    reparam = REPARAMS['sigma'](entropy.SPECS, {name: (WIDTH, WIDTH) for name in entropy.QK})

    def measure_shares():
        return [entropy.grown_entropy_share(reparam, names, 4) for names in (entropy.QK, ())]

    grown = measure_shares()
    monkeypatch.setattr(entropy, 'GROWTH', 1.0)
    with_map, without_map = measure_shares()
    np.testing.assert_allclose([without_map, grown[0]], with_map, rtol=1e-5)
    assert grown[1] < 0.5 * without_map
