"""Reference: norms against their closed forms in numpy float64, forward and gradient.
Property: what each is invariant to.
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.norms import NORMS
from modules.params import split

EPS = 1e-3
TOLERANCE = {'float32': 1e-5, 'bfloat16': 2**-8}  # bfloat16: half a unit in the last place


def rms_norm(x, grad_y, scale, bias, eps):
    """(y, dx): with r = 1/rms(x), dx = r (g - x r^2 mean(g x)), g = dy scale."""
    del bias
    r = 1 / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)
    g = grad_y * scale
    return x * r * scale, r * (g - x * r**2 * np.mean(g * x, -1, keepdims=True))


def layer_norm(x, grad_y, scale, bias, eps):
    """(y, dx): dx = s (g - mean(g) - x_hat mean(g x_hat)), s = 1/std(x)."""
    s = 1 / np.sqrt(np.var(x, -1, keepdims=True) + eps)
    x_hat = (x - np.mean(x, -1, keepdims=True)) * s
    g = grad_y * scale
    mean_g, mean_gx = np.mean(g, -1, keepdims=True), np.mean(g * x_hat, -1, keepdims=True)
    return x_hat * scale + bias, s * (g - mean_g - x_hat * mean_gx)


def no_norm(x, grad_y, scale, bias, eps):
    del scale, bias, eps
    return x, grad_y


REFERENCES = {'layernorm': layer_norm, 'none': no_norm, 'rmsnorm': rms_norm}


def draw(dtype='float32', seed=0):
    """x, dy [6, 16], exact in `dtype`, then scale and bias [16]."""
    rng = np.random.default_rng(seed)
    exact = [np.asarray(jnp.asarray(rng.normal(1, 2, (6, 16)), dtype), np.float64) for _ in 'xy']
    return *exact, rng.uniform(0.5, 2, 16), rng.normal(size=16)


def make(name, eps=EPS, scale=None, bias=None, dtype='float32'):
    """x -> y, with the given gain and bias instead of those at the start."""
    norm = NORMS[name](eps=eps)
    start = norm.init(jax.random.key(0), jnp.ones((2, 16), dtype)).get('params', {})
    params, specs = split(start)
    assert all(spec.role == 'vector' for spec in specs.values())
    given = {'scale': scale, 'bias': bias}
    params = {k: v if given[k] is None else jnp.float32(given[k]) for k, v in params.items()}
    return params, lambda params, x: norm.apply({'params': params}, x)


def test_every_norm_has_a_reference():
    assert REFERENCES.keys() == NORMS.keys()


@pytest.mark.parametrize('dtype', TOLERANCE)
@pytest.mark.parametrize('name', NORMS)
def test_forward_and_gradient(name, dtype):
    x, grad_y, scale, bias = draw(dtype)
    params, apply = make(name, scale=scale, bias=bias, dtype=dtype)
    y, pull = jax.vjp(lambda x: apply(params, x), jnp.asarray(x, dtype))
    (grad_x,) = pull(jnp.asarray(grad_y, dtype))
    assert y.dtype == grad_x.dtype == jnp.dtype(dtype)
    for ours, wanted in zip(
        (y, grad_x), REFERENCES[name](x, grad_y, scale, bias, EPS), strict=True
    ):
        np.testing.assert_allclose(np.float64(ours), wanted, rtol=TOLERANCE[dtype], atol=1e-5)


@pytest.mark.parametrize('name', NORMS)
def test_gain_and_bias(name):
    """They start as the identity, stay float32 under bfloat16, and get sum(dy x_hat) and sum(dy).

    Catches a gain created in, or whose gradient is summed in, the compute type.
    """
    x, grad_y, _, _ = draw('bfloat16')
    params, apply = make(name, dtype='bfloat16')
    x_hat = REFERENCES[name](x, grad_y, 1.0, 0.0, EPS)[0]
    y, pull = jax.vjp(lambda p: apply(p, jnp.asarray(x, 'bfloat16')), params)
    np.testing.assert_allclose(np.float64(y), x_hat, rtol=2**-8, atol=1e-5)
    (grads,) = pull(jnp.asarray(grad_y, 'bfloat16'))
    wanted = {'scale': np.sum(grad_y * x_hat, 0), 'bias': np.sum(grad_y, 0)}
    for key, grad in grads.items():
        assert params[key].dtype == grad.dtype == jnp.float32
        np.testing.assert_allclose(grad, wanted[key], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize('name', ['layernorm', 'rmsnorm'])
def test_scale_does_not_matter_without_eps(name):
    """N(c x) = N(x), so that x . dx = 0. Catches an eps that is not the one given."""
    x, grad_y, scale, bias = draw()
    params, apply = make(name, 0.0, scale, bias)
    y, pull = jax.vjp(lambda x: apply(params, x), jnp.float32(x))
    np.testing.assert_allclose(apply(params, jnp.float32(1e-3 * x)), y, rtol=1e-4, atol=1e-5)
    grad_x = np.float64(pull(jnp.float32(grad_y))[0])
    assert np.abs(grad_x).max() > 0.1
    np.testing.assert_allclose(np.sum(x * grad_x, -1), 0, atol=1e-5)


def test_layer_norm_ignores_a_shift_and_rms_norm_does_not():
    x, grad_y, scale, bias = draw()
    for name in ('layernorm', 'rmsnorm'):
        params, apply = make(name, EPS, scale, bias)
        y, pull = jax.vjp(lambda x, a=apply, p=params: a(p, x), jnp.float32(x))
        shift = np.abs(apply(params, jnp.float32(x + 3)) - y).max()
        sums = np.abs(np.sum(pull(jnp.float32(grad_y))[0], -1)).max()
        assert (shift < 1e-5 and sums < 1e-5) == (name == 'layernorm')


def test_layer_norm_is_accurate_at_a_large_mean():
    """Catches E[x^2] - E[x]^2, which has no digits left here."""
    x, grad_y, scale, bias = draw()
    x = np.float64(np.float32(x + 1e4))
    params, apply = make('layernorm', EPS, scale, bias)
    wanted, _ = layer_norm(x, grad_y, scale, bias, EPS)
    np.testing.assert_allclose(apply(params, jnp.float32(x)), wanted, rtol=2e-3, atol=2e-3)


@pytest.mark.parametrize('name', NORMS)
def test_norms_serve_heads_too(name):
    """[B, N, T, H] is normalized over its last axis."""
    x, _grad_y, scale, bias = draw()
    params, apply = make(name, EPS, scale, bias)
    flat = apply(params, jnp.float32(x))
    heads = apply(params, jnp.float32(x).reshape(1, 2, 3, 16))
    np.testing.assert_allclose(heads.reshape(6, 16), flat, rtol=1e-6)
