"""Property and equivalence: what every attention layer of the table promises."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.attention import ATTENTIONS
from modules.kernels import kernels_for
from modules.norms import NORMS
from modules.params import split
from modules.positions import POSITIONS
from modules.sequence import documents, whole_rows
from tests.helpers import FAST

D, HEADS, LENGTH = 16, 4, 6


EXACT = {'none': {}, 'rmsnorm': {'eps': 0.0}, 'layernorm': {'eps': 0.0}}


def layer(name='softmax', n_kv_heads=HEADS, qk_norm='none', position='rope', **options):
    return ATTENTIONS[name](
        n_heads=HEADS,
        n_kv_heads=n_kv_heads,
        head_dim=D // HEADS,
        qk_norm=lambda name, over: NORMS[qk_norm](name=name, **EXACT[qk_norm]),
        rotate=POSITIONS[position].rotate,
        kernels=kernels_for('cpu', 'reference'),
        dtype=jnp.float32,
        **options,
    )


def draw_x(batch=1, seed=0):
    return jnp.float32(np.random.default_rng(seed).normal(size=(batch, LENGTH, D)))


@functools.cache
def draw_params(module):
    init = jax.jit(module.init, compiler_options=FAST)
    params, specs = split(init(jax.random.key(0), draw_x(), whole_rows(LENGTH))['params'])
    return jax.tree.map(lambda w: w / 4 if w.ndim > 1 else w, params), specs


def apply(module, params, x_BTD, sequence=None):
    return module.apply({'params': params}, x_BTD, sequence or whole_rows(LENGTH))


@pytest.mark.parametrize('name', ATTENTIONS)
def test_no_token_sees_a_later_one(name):
    """Causality by gradient, and no token of another row: d out[t] / d x[s] = 0 unless s <= t."""
    module = layer(name)
    params, _ = draw_params(module)
    weigh_D = jnp.float32(np.random.default_rng(1).normal(size=D))
    slopes_BTBTD = jax.jit(
        jax.jacrev(lambda x: apply(module, params, x) @ weigh_D), compiler_options=FAST
    )(draw_x(batch=2))
    seen = np.abs(slopes_BTBTD).max(-1).reshape(2 * LENGTH, 2 * LENGTH) > 0
    one = np.tril(np.ones((LENGTH, LENGTH), bool))
    np.testing.assert_array_equal(seen, np.kron(np.eye(2, dtype=bool), one))


@pytest.mark.parametrize('name', ATTENTIONS)
def test_no_token_sees_another_document(name):
    """A document in a row gives what it gives alone, since only distances matter to rope."""
    module = layer(name)
    params, _ = draw_params(module)
    x_BTD = draw_x()
    segments = jnp.int32([[1, 1, 2, 2, 2, 3]])
    packed = apply(module, params, x_BTD, documents(segments))
    for start, stop in ((0, 2), (2, 5), (5, 6)):
        alone = apply(module, params, x_BTD[:, start:stop], whole_rows(stop - start))
        np.testing.assert_allclose(packed[:, start:stop], alone, rtol=1e-4, atol=1e-5)
    assert np.abs(packed - apply(module, params, x_BTD)).max() > 0.01


@pytest.mark.parametrize('name', ATTENTIONS)
def test_grouped_heads_are_full_heads_with_repeated_weights(name):
    """Catches heads repeated in turns (0 1 0 1) where consecutive ones (0 0 1 1) share."""
    grouped, full = layer(name, n_kv_heads=2), layer(name)
    params, specs = draw_params(grouped)
    repeated = {
        key: jnp.repeat(w, HEADS // 2, axis=specs[key].axes.index('kv_heads'))
        if 'kv_heads' in specs[key].axes
        else w
        for key, w in params.items()
    }
    assert repeated['key'].shape == (D, HEADS, D // HEADS)
    np.testing.assert_allclose(
        apply(grouped, params, draw_x()), apply(full, repeated, draw_x()), rtol=1e-4, atol=1e-5
    )


@pytest.mark.parametrize('name', ATTENTIONS)
def test_parameters_are_described_as_they_are_used(name):
    _, specs = draw_params(layer(name, n_kv_heads=2))
    assert {k: (s.role, s.fan_in) for k, s in specs.items()} == {
        'query': ('hidden', ('embed',)),
        'key': ('hidden', ('embed',)),
        'value': ('hidden', ('embed',)),
        'out': ('hidden', ('heads', 'head_dim')),
    }


@pytest.mark.parametrize('name', ATTENTIONS)
@pytest.mark.parametrize('key', ['query', 'key'])
def test_qk_norm_takes_the_scale_off_the_weights(name, key):
    """With it, logits do not depend on the scale of Wq or Wk; without, they do."""
    for qk_norm in ('rmsnorm', 'none'):
        module = layer(name, qk_norm=qk_norm)
        params, _ = draw_params(module)
        scaled = params | {key: 100 * params[key]}
        change = np.abs(apply(module, scaled, draw_x()) - apply(module, params, draw_x())).max()
        assert (change < 1e-4) == (qk_norm == 'rmsnorm')


@pytest.mark.parametrize('name', ATTENTIONS)
def test_value_norm_takes_the_scale_off_the_values(name):
    """And is a norm of its own, of each head: it has a gain."""
    for norm_values in (True, False):
        module = layer(name, qk_norm='rmsnorm', norm_values=norm_values)
        params, _ = draw_params(module)
        assert ('value_norm' in params) == norm_values
        scaled = params | {'value': 100 * params['value']}
        change = np.abs(apply(module, scaled, draw_x()) - apply(module, params, draw_x())).max()
        assert (change < 1e-4) == norm_values
    louder = params_with(layer(name, qk_norm='rmsnorm', norm_values=True), 2.0)
    module = layer(name, qk_norm='rmsnorm', norm_values=True)
    plain = apply(module, draw_params(module)[0], draw_x())
    np.testing.assert_allclose(apply(module, louder, draw_x()), 2 * plain, rtol=1e-5, atol=1e-6)


def params_with(module, gain):
    params, _ = draw_params(module)
    return params | {'value_norm': {'scale': gain * params['value_norm']['scale']}}


def test_softmax_attention_is_its_equation():
    """Reference: out = softmax(q k^T / sqrt(H)) v Wo in numpy float64, one head at a time."""
    module = layer(position='none', n_kv_heads=2)
    params, _ = draw_params(module)
    x, w = np.float64(draw_x()[0]), {k: np.float64(v) for k, v in params.items()}
    wanted = np.zeros_like(x)
    for n in range(HEADS):
        q, k, v = x @ w['query'][:, n], x @ w['key'][:, n // 2], x @ w['value'][:, n // 2]
        logits = np.where(np.tri(LENGTH, dtype=bool), q @ k.T / np.sqrt(D // HEADS), -np.inf)
        weights = np.exp(logits - logits.max(-1, keepdims=True))
        wanted += weights / weights.sum(-1, keepdims=True) @ v @ w['out'][n]
    np.testing.assert_allclose(apply(module, params, draw_x())[0], wanted, rtol=1e-4, atol=1e-5)
