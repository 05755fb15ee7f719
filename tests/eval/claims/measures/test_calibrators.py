"""Equivalence: the maps of the rivals are those of the calibrators. Property: the parameters of the
lowest error are kept.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.claims.measures import calibrators
from eval.suites.calibrators import TEMPERATURES, fit_correctness, fit_h


def test_rivals_share_calibrator_maps():
    """Before the first step the maps of both are the same."""
    log_p_ME, place_M = calibrators._draw_sorted('squared', 50, np.random.default_rng(0))
    bound = TEMPERATURES**-0.5
    start = {
        name: jax.random.uniform(key, (TEMPERATURES,), minval=-bound, maxval=bound)
        for name, key in zip(
            ('inverse', 'weight'), jax.random.split(jax.random.key(0)), strict=True
        )
    }
    mixed = calibrators.mix_temperatures(start, jnp.float32(log_p_ME))
    np.testing.assert_allclose(fit_h(log_p_ME, place_M, steps=0)(log_p_ME), mixed, rtol=1e-5)
    network = jax.tree.map(jnp.float32, calibrators.start_network())
    scaled = calibrators.apply_temperatures(network, jnp.float32(log_p_ME))
    unfitted = fit_correctness(log_p_ME, place_M, balanced=False, steps=0)(log_p_ME)
    np.testing.assert_allclose(unfitted, scaled, rtol=1e-5)


@pytest.mark.full
def test_fit_keeps_best_parameters():
    """The loss lowers a temperature past the right one."""
    rng = np.random.default_rng(1)
    events = calibrators._draw_logits('scaled', 4000, rng)
    start = {'inverse': np.array([0.1]), 'weight': np.array([1.0])}
    batches = rng.integers(4000, size=(60, 500))

    def measure_error(stages):
        arms = calibrators.mix_temperatures, calibrators._absolute_loss
        to_p = calibrators._fit(*arms, start, events, batches, 0.02, stages)
        return calibrators._evaluate({'absolute': to_p}, *events)['absolute']

    assert measure_error(30) < 0.05 < 0.2 < measure_error(1)
