"""Reference: gradient noise, from gradients of parts of the batch and from many draws."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.training.diagnostics import gradient_noise, make_diagnose_step
from lm.training.state import make_hyper
from lm.training.step import token_sums
from tests.helpers import initial_state, packed_batch, tiny_config, tiny_learner


@pytest.mark.full
def test_noise_compares_even_and_odd_rows():
    """The gradient of each half alone. Catches other halves, and means over rows if halves have
    different numbers of tokens.
    """
    config = tiny_config({'model.reparam': 'weight_norm'})
    learner, hyper, state = tiny_learner(config), make_hyper(config), initial_state(config)
    batch = packed_batch()

    @jax.jit
    def grad(batch):
        def total(params):
            variables = learner.variables(state.weights.replace(params=params))
            sums = token_sums(learner, variables, batch, hyper)
            return sums['objective'], sums['tokens']

        grads, tokens = jax.grad(total, has_aux=True)(state.params)
        return jnp.concatenate([g.ravel() for g in jax.tree.leaves(grads)]), tokens

    parts = [grad({name: rows[i::2] for name, rows in batch.items()}) for i in (0, 1)]
    (even, n_even), (odd, n_odd) = [(np.float64(g), float(n)) for g, n in parts]
    n, full_grad = n_even + n_odd, (even + odd) / (n_even + n_odd)
    mean_half_norm = (np.sum((even / n_even) ** 2) + np.sum((odd / n_odd) ** 2)) / 2
    signal, trace = (
        2 * np.sum(full_grad**2) - mean_half_norm,
        n * (mean_half_norm - np.sum(full_grad**2)),
    )
    diagnostics = jax.jit(make_diagnose_step(learner))(state, batch, hyper)
    np.testing.assert_allclose(diagnostics['gradient_noise_signal'], signal, rtol=1e-3)
    np.testing.assert_allclose(diagnostics['gradient_noise_trace'], trace, rtol=1e-3)
    np.testing.assert_allclose(diagnostics['gradient_noise_scale'], trace / signal, rtol=1e-3)


def test_noise_estimates_are_unbiased():
    """For tokens with normal gradients around (1, 1, 1): 3, and 3 x 4 for a deviation of 2."""
    rng = np.random.default_rng(0)
    signals, traces = [], []
    for _ in range(400):
        tokens = 1 + 2 * rng.normal(size=(16, 3))
        diagnostics = gradient_noise(
            tokens.mean(0), tokens[:8].mean(0), jnp.float32(16), jnp.float32(8)
        )
        signals.append(diagnostics['gradient_noise_signal'])
        traces.append(diagnostics['gradient_noise_trace'])
    for values, expected in ((signals, 3.0), (traces, 12.0)):
        error = np.std(values) / np.sqrt(len(values))
        assert abs(np.mean(values) - expected) < 3 * error < 0.2 * expected
