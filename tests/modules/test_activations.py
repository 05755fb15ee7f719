"""Reference: activations and the MLP against closed forms in numpy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from modules.activations import ACTIVATIONS
from modules.kernels import kernels_for
from modules.mlp import MLP
from modules.params import split


def gelu(x):
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu(x):
    return np.maximum(x, 0)


def silu(x):
    return x * special.expit(x)


REFERENCES = {  # the function, and whether it gates a second projection
    'geglu': (gelu, True),
    'gelu': (gelu, False),
    'relu': (relu, False),
    'silu': (silu, False),
    'squared_relu': (lambda x: relu(x) ** 2, False),
    'swiglu': (silu, True),
}
X = np.concatenate([np.linspace(-6, 6, 50), [-40.0, 40.0]])  # 0 is left out: relu has a corner


def test_every_activation_has_a_reference():
    assert REFERENCES.keys() == ACTIVATIONS.keys()


@pytest.mark.parametrize('name', ACTIVATIONS)
def test_forward_and_gradient(name):
    fn, gated = REFERENCES[name]
    step = 1e-6
    slope = (fn(X + step) - fn(X - step)) / (2 * step)
    activation = ACTIVATIONS[name]
    y, pull = jax.vjp(activation.fn, jnp.float32(X))
    np.testing.assert_allclose(y, fn(X), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(pull(jnp.ones_like(y))[0], slope, rtol=1e-4, atol=1e-5)
    assert activation.gated == gated
    assert activation.fn(jnp.bfloat16(X)).dtype == jnp.bfloat16


def test_tanh_form_of_gelu_is_as_near_the_exact_one_as_documented():
    exact = X * special.ndtr(X)
    assert np.abs(np.float64(ACTIVATIONS['gelu'].fn(jnp.float32(X))) - exact).max() < 5e-4


@pytest.mark.parametrize('name', ACTIVATIONS)
def test_mlp(name):
    """Forward, with a third matrix where gated. Catches gate and up exchanged."""
    fn, gated = REFERENCES[name]
    mlp = MLP(12, ACTIVATIONS[name], kernels_for('cpu', 'reference'), jnp.float32)
    x_MD = np.random.default_rng(0).normal(size=(5, 8))
    params, specs = split(mlp.init(jax.random.key(0), jnp.float32(x_MD))['params'])
    w = {key: np.float64(value) for key, value in params.items()}
    assert w.keys() == ({'up', 'gate', 'down'} if gated else {'up', 'down'})
    hidden_MF = fn(x_MD @ w['gate']) * (x_MD @ w['up']) if gated else fn(x_MD @ w['up'])
    y_MD = mlp.apply({'params': params}, jnp.float32(x_MD))
    np.testing.assert_allclose(y_MD, hidden_MF @ w['down'], rtol=1e-4, atol=1e-3)
    assert {k: (s.role, s.axes, s.fan_in) for k, s in specs.items() if k != 'gate'} == {
        'up': ('hidden', ('embed', 'mlp'), ('embed',)),
        'down': ('hidden', ('mlp', 'embed'), ('mlp',)),
    }
