"""Reference: a matmul of each kind against numpy. Property: a readout of a part is that part."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from modules.kernels import kernels_for
from modules.kernels.matmul import direct
from modules.params import ParamSpec, split_boxes
from modules.products import Readout, product
from tests.modules.test_kernels import EXACT

# axes, fan_in, shape of x, features, the same in numpy, axes of the bias
KINDS = {
    'in': (('embed', 'heads', 'head_dim'), ('embed',), (2, 3, 8), (2, 3), 'btd,dnh->btnh'),
    'out': (
        ('heads', 'head_dim', 'embed'),
        ('heads', 'head_dim'),
        (2, 3, 4, 2),
        5,
        'btnh,nhd->btd',
    ),
    'experts': (('expert', 'embed', 'mlp'), ('embed',), (4, 3, 5), 2, 'eci,eio->eco'),
}


class SingleMatmul(nn.Module):
    """A layer with a single matmul."""

    kind: str
    matmul: str = 'direct'
    dtype: jnp.dtype = jnp.float32
    bias: bool = False

    @nn.compact
    def __call__(self, x):
        axes, fan_in, _, features, _ = KINDS[self.kind]
        matmul = kernels_for('cpu', matmul=self.matmul).matmul
        options = {'matmul': matmul, 'dtype': self.dtype, 'bias': self.bias}
        return product(self, 'w', x, axes, fan_in, features, init_gain=0.5, **options)


def draw(kind, **options):
    x = jnp.float32(np.random.default_rng(0).normal(size=KINDS[kind][2]))
    module = SingleMatmul(kind, **options)
    return module, x, *split_boxes(module.init(jax.random.key(0), x)['params'])


@pytest.mark.parametrize('matmul', EXACT)
@pytest.mark.parametrize('kind', KINDS)
def test_product_sums_over_fan_in(kind, matmul):
    """Compares in float64, with a bias. Catches axes flattened in another order, experts that
    share.
    """
    module, x, params, specs = draw(kind, matmul=matmul, bias=True)
    axes, fan_in, _, _, equation = KINDS[kind]
    assert specs['w'] == ParamSpec('hidden', axes, fan_in, init_gain=0.5)
    assert specs['w_bias'] == ParamSpec('vector', tuple(a for a in axes if a not in fan_in))
    assert not params['w_bias'].any()
    bias = np.arange(params['w_bias'].size, dtype=np.float32).reshape(params['w_bias'].shape)
    y = module.apply({'params': params | {'w_bias': bias}}, x)
    if kind == 'experts':
        bias = bias[:, None]
    expected = np.einsum(equation, np.float64(x), np.float64(params['w'])) + bias
    np.testing.assert_allclose(y, expected, rtol=1e-4, atol=1e-5)


def test_matmul_has_two_dimensions():
    """The matmul sees two dimensions for any x, forward and backward: on XLA:CPU a step takes half
    as long again if its backward pass has more.
    """
    for kind in ('in', 'out'):
        module, x, params, _ = draw(kind)
        step = jax.grad(lambda p, x, module=module: jnp.sum(module.apply({'params': p}, x) ** 2))
        jaxpr = jax.make_jaxpr(step)(params, x)
        dots = [e for e in jaxpr.eqns if e.primitive.name == 'dot_general']
        assert len(dots) == 2
        assert all(v.aval.ndim == 2 for e in dots for v in e.invars), kind


def test_weights_are_float32_and_multiplied_in_dtype():
    module, x, params, _ = draw('in', dtype=jnp.bfloat16)
    assert params['w'].dtype == jnp.float32
    y = module.apply({'params': params}, x)
    assert y.dtype == jnp.bfloat16
    rounded = np.einsum('btd,dnh->btnh', *(np.float64(jnp.bfloat16(a)) for a in (x, params['w'])))
    np.testing.assert_allclose(np.float64(y), rounded, rtol=2**-8, atol=1e-6)


@pytest.mark.parametrize(
    ('axes', 'fan_in'),
    [
        (('embed', 'mlp', 'expert'), ('embed', 'expert')),  # not together
        (('embed', 'heads', 'head_dim'), ('embed',)),  # one feature too few
    ],
)
def test_axes_in_another_order_are_refused(axes, fan_in):
    class Wrong(nn.Module):
        @nn.compact
        def __call__(self, x):
            return product(self, 'w', x, axes, fan_in, 2, matmul=direct, dtype=jnp.float32)

    with pytest.raises(ValueError, match='batch axes, then fan_in, then'):
        Wrong().init(jax.random.key(0), jnp.ones((2, 3, 4)))


def test_partial_readout_matches_full_logits():
    """c tanh((x W + b) / c), float32 from bfloat16, of any number of axes, under jit and grad."""
    rng = np.random.default_rng(0)
    x_BTD, w_DV, b_V = (jnp.float32(rng.normal(size=s)) for s in ((2, 3, 8), (8, 5), (5,)))
    readout = Readout(w_DV, b_V, 2.0, direct, jnp.bfloat16)
    logits_BTV = jax.jit(Readout.__call__)(readout, x_BTD.astype(jnp.bfloat16))
    assert logits_BTV.dtype == jnp.float32
    x, w = (np.float64(jnp.bfloat16(a)) for a in (x_BTD, w_DV))
    np.testing.assert_allclose(
        logits_BTV, 2 * np.tanh((x @ w + np.asarray(b_V)) / 2), rtol=1e-4, atol=1e-5
    )
    some = readout(x_BTD[0, 1].astype(jnp.bfloat16))
    np.testing.assert_allclose(some, logits_BTV[0, 1], rtol=1e-6)
    plain = Readout(w_DV, None, 0.0, direct, jnp.float32)
    np.testing.assert_allclose(plain(x_BTD), x_BTD @ w_DV, rtol=1e-5, atol=1e-5)
    slopes = jax.grad(lambda readout: jnp.sum(readout(x_BTD)))(plain)
    np.testing.assert_allclose(slopes.weight_DV[:, 0], x_BTD.sum((0, 1)), rtol=1e-4, atol=1e-5)
