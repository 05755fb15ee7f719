"""Reference: activations and the MLP against closed forms in NumPy float64."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import special

from modules.activations import (
    ACTIVATIONS,
    SELU_ALPHA,
    SELU_SCALE,
    apply_alpha_dropout,
    selu_dropout,
)
from modules.kernels import kernels_for
from modules.mlp import MLP
from modules.options import declared_options
from modules.params import ParamSpec, split_boxes
from modules.scaling import INITS


def gelu(x):
    return x * 0.5 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


def relu(x):
    return np.maximum(x, 0)


def silu(x):
    return x * special.expit(x)


def elu(x):
    return np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


def selu(x):
    """Uses the constants as the paper prints them, to four digits and more."""
    alpha, scale = 1.6732632423543772, 1.0507009873554805
    return scale * np.where(x > 0, x, alpha * np.expm1(np.minimum(x, 0)))


def gpt_oss(gate):
    gate = np.minimum(gate, 7.0)
    return gate * special.expit(1.702 * gate)


REFERENCES = {  # the function, and whether it gates a second projection
    'elu': (elu, False),
    'geglu': (gelu, True),
    'gelu': (gelu, False),
    'gelu_exact': (lambda x: x * special.ndtr(x), False),
    'relu': (relu, False),
    'selu': (selu, False),
    'silu': (silu, False),
    'squared_relu': (lambda x: relu(x) ** 2, False),
    'swiglu': (silu, True),
    'swiglu_oai': (gpt_oss, True),
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


def test_gelu_tanh_form_is_near_exact_form():
    exact = X * special.ndtr(X)
    assert np.abs(np.float64(ACTIVATIONS['gelu'].fn(jnp.float32(X))) - exact).max() < 5e-4


def test_selu_constants_keep_standard_normal():
    """Reference: mean 0 and variance 1 of selu(z), z standard normal, by quadrature."""
    z = np.linspace(-12, 12, 24001)
    y, weights = selu(z), np.exp(-(z**2) / 2) * (z[1] - z[0]) / np.sqrt(2 * np.pi)
    assert abs(weights @ y) < 1e-6
    assert abs(weights @ y**2 - 1) < 1e-6
    infimum = -1.7580993408473766
    np.testing.assert_allclose(-SELU_SCALE * SELU_ALPHA, infimum, rtol=1e-12)


def deep_mlp_moments(fn, depth=32, width=256):
    """Returns mean and variance after a deep MLP of plain matrices, drawn as scaling.name=standard
    does.
    """
    spec = ParamSpec('hidden', ('embed', 'mlp'), ('embed',))
    std = INITS['fan_in'](spec, (width, width), 1)
    rng = np.random.default_rng(0)
    x = 1.5 * rng.normal(size=(64, width)) + 0.3
    for _ in range(depth):
        x = fn(x @ (std * rng.normal(size=(width, width))))
    return np.mean(x), np.var(x)


@pytest.mark.full
def test_selu_layers_normalize_activations():
    """Property: from 0.3 and 2.25, with the initial weights of `standard` (LeCun's); ELU and ReLU
    vanish. Catches constants of another fixed point, or initial weights of twice the variance.
    """
    mean, variance = deep_mlp_moments(lambda x: np.float64(ACTIVATIONS['selu'].fn(jnp.float32(x))))
    assert abs(mean) < 0.1 and abs(variance - 1) < 0.2
    assert deep_mlp_moments(elu)[1] < 0.2 and deep_mlp_moments(lambda x: np.maximum(x, 0))[1] < 0.01


@pytest.mark.parametrize('rate', [0.05, 0.5])
def test_alpha_dropout_keeps_mean_and_variance(rate):
    """Reference: for x of mean 0 and variance 1, with share `rate` at its infimum. Catches a plain
    dropout, which adds variance, and constants of the share that stays.
    """
    x = np.float32(np.random.default_rng(0).normal(size=200_000))
    x = (x - x.mean()) / x.std()
    y = np.float64(apply_alpha_dropout(rate, jnp.asarray(x), jax.random.key(0)))
    assert abs(y.mean()) < 0.02 and abs(y.var() - 1) < 0.02
    q, infimum = 1 - rate, -1.7580993408473766
    a = (q * (1 + (1 - q) * infimum**2)) ** -0.5
    b = -a * (1 - q) * infimum
    dropped = np.isclose(y, a * infimum + b, atol=1e-6)
    np.testing.assert_allclose(dropped.mean(), rate, atol=0.005)
    np.testing.assert_allclose(y[~dropped], (a * x + b)[~dropped], rtol=1e-4, atol=1e-5)
    assert apply_alpha_dropout(rate, jnp.bfloat16(x[:9]), jax.random.key(0)).dtype == jnp.bfloat16


def test_only_selu_has_alpha_dropout():
    readers = [
        name for name, row in ACTIVATIONS.items() if 'alpha_dropout' in declared_options(row)
    ]
    assert readers == ['selu']
    assert selu_dropout() is None and ACTIVATIONS['relu'].dropout() is None


@pytest.mark.parametrize('name', ACTIVATIONS)
def test_mlp(name):
    """Forward, with a third matrix if gated. Catches gate and up exchanged, and in gpt-oss a gate
    that is clipped below too, and 1 added before clipping.
    """
    fn, gated = REFERENCES[name]
    mlp = MLP(12, ACTIVATIONS[name], kernels_for('cpu', 'reference'), jnp.float32)
    x_MD = 3 * np.random.default_rng(0).normal(size=(5, 8))
    params, specs = split_boxes(mlp.init(jax.random.key(0), jnp.float32(x_MD))['params'])
    w = {key: np.float64(value) for key, value in params.items()}
    assert w.keys() == ({'up', 'gate', 'down'} if gated else {'up', 'down'})
    up_MF = x_MD @ w['up']
    linear_MF = 1 + np.clip(up_MF, -7, 7) if name == 'swiglu_oai' else up_MF
    hidden_MF = fn(x_MD @ w['gate']) * linear_MF if gated else fn(up_MF)
    assert up_MF.min() < -7 and up_MF.max() > 7
    y_MD = mlp.apply({'params': params}, jnp.float32(x_MD))
    np.testing.assert_allclose(y_MD, hidden_MF @ w['down'], rtol=1e-4, atol=1e-2)
    assert {k: (s.role, s.axes, s.fan_in) for k, s in specs.items() if k != 'gate'} == {
        'up': ('hidden', ('embed', 'mlp'), ('embed',)),
        'down': ('hidden', ('mlp', 'embed'), ('mlp',)),
    }
