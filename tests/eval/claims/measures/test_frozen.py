"""Reference: closed forms for measures of weights. Property: a measure at a size of seconds
confirms the method, and rejects a wrong one.
"""

import jax
import numpy as np
import pytest

from eval.claims.measures import collapse, frozen
from modules.mlp import FEATURES
from modules.readouts import spread_rows


class TestImbalancedCollapse:
    def test_lengths_minimize_class_loss(self):
        """The loss of a class is n (wh - 1)^2 / N + decay_w w^2 + n decay_h h^2, minimised on a
        grid over w.
        """
        counts, decay_w, decay_h = np.array([30, 12, 5, 2]), 0.05, 0.03
        w = np.linspace(0, 3, 300_001)
        for n, squared_length in zip(
            counts, collapse.squared_lengths(counts, decay_w, decay_h), strict=True
        ):
            h = w / (w**2 + counts.sum() * decay_h)
            loss = n * (w * h - 1) ** 2 / counts.sum() + decay_w * w**2 + n * decay_h * h**2
            assert w[np.argmin(loss)] ** 2 == pytest.approx(squared_length, abs=1e-4)
        assert squared_length == 0

    def test_descent_ends_at_imbalanced_solution(self):
        w_KD, h_ND = (np.float64(x) for x in collapse._descend(100, 6_000))
        counts = np.array(collapse.COUNTS)
        expected = collapse.squared_lengths(counts, collapse.DECAY_W, collapse.DECAY_H)
        assert max(collapse._compare_to_closed_form(w_KD, h_ND, expected)) < 0.01
        equal = np.full(len(counts), counts.mean())
        wrong = collapse.squared_lengths(equal, collapse.DECAY_W, collapse.DECAY_H)
        assert (
            collapse._compare_to_closed_form(w_KD, h_ND, np.where(expected > 0, wrong, 0))[0] > 0.3
        )


class TestFrozenParts:
    def test_compares_rows_with_same_key(self, monkeypatch):
        """Spread rows are further apart than random rows, but not below the bound."""
        monkeypatch.setattr(frozen, 'SIZES', ((96, 16),))
        monkeypatch.setattr(frozen, 'SEEDS', 2)
        over_welch, over_random, *_ = frozen.equiangular_rows.function()
        assert 1 < over_welch.value < 2 and over_random.value < 0.7

    @pytest.mark.full
    def test_descent_matches_readout(self):
        """The descent of the broken method is otherwise that of the readout."""
        key = jax.random.key(3)
        rows_VD = frozen._descend(key, 96, 16, axis=1)
        np.testing.assert_allclose(rows_VD, spread_rows(key, 96, 16), atol=0.02)

    def test_relu_kernel_at_known_angles(self):
        """Half of |x|^2 at 0, nothing at pi, |x| |w| / 2 pi at right angles."""
        x = np.array([[3.0, 0.0]] * 3)
        w = np.array([[3.0, 0.0], [-2.0, 0.0], [0.0, 2.0]])
        kernel = frozen.relu_kernel(x, w)
        np.testing.assert_allclose(kernel, [4.5, 0, 6 / (2 * np.pi)], atol=1e-12)

    @pytest.mark.full
    def test_error_falls_with_features(self, monkeypatch):
        monkeypatch.setattr(frozen, 'COUNTS', (16, 256))
        monkeypatch.setattr(frozen, 'SEEDS_OF_FEATURES', 3)
        estimates = frozen.random_features.compute()
        assert all(-0.75 < estimates[f'slope_of_{name}'].value < -0.25 for name in FEATURES)
