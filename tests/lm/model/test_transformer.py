"""The decoder put together. Reference: the whole forward pass in numpy float64. Property: causality
by gradient, documents on their own. Equivalence: scan, remat and dtype change nothing but cost.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.fields import CHOICES
from lm.devices.mesh import make_mesh, param_sharding
from lm.model.check import check
from lm.model.transformer import DIAGNOSTICS
from modules.numerics import REMAT_POLICIES
from modules.params import LAYER, named_leaves
from tests.helpers import (
    VOCAB,
    assert_trees_close,
    initial_state,
    tiny_batch,
    tiny_config,
    tiny_learner,
    tiny_model,
    with_needs,
)

TOKENS = tiny_batch(rows=2)['tokens'][:, :-1]


def params_of(changes=None):
    return initial_state(tiny_config(changes)).params


@functools.cache
def compiled(config, with_gradient=False):
    """(params, tokens, segments) -> logits [B, T, V], and the gradient of a weighted sum."""
    model = tiny_model(config)

    def logits(params, tokens, segments):
        return model.apply({'params': params}, tokens, segments)

    def weighted(params, tokens, segments):
        out = logits(params, tokens, segments)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * weights), out

    run = jax.grad(weighted, has_aux=True) if with_gradient else logits
    return jax.jit(run)


def forward(changes, params, tokens=TOKENS, segments=None):
    return compiled(tiny_config(changes))(params, tokens, segments)


def numpy_forward(config, params, tokens_T):
    """One row through a pre-norm decoder with RMSNorm, RoPE, grouped heads and GELU; float64."""
    model, options = config.model, config.attention.options | config.position.options
    p = {path: np.float64(w) for path, w in named_leaves(params).items()}
    head_dim, length = model.head_dim, len(tokens_T)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale

    def turn(x_TH, base):
        half = head_dim // 2
        angle = np.arange(length)[:, None] * base ** (-np.arange(half) / half)
        z = (x_TH[:, :half] + 1j * x_TH[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = p['embedding'][tokens_T]
    for i in range(model.n_layers):
        w = {path.removeprefix('layers/'): v[i] for path, v in p.items() if 'layers/' in path}
        is_full = (i + 1) % options['full_every'] == 0
        base = 10_000.0 if is_full else options['rope_local_base']
        turned = (i + 1) % options['no_rope_every'] != 0
        seen = np.tri(length, dtype=bool) & ~np.tri(
            length, k=-length if is_full else -options['window'], dtype=bool
        )
        y = norm(x, w['attention_norm_in/scale'])
        for n in range(model.n_heads):
            kv = n * model.n_kv_heads // model.n_heads
            q, k = y @ w['attention/query'][:, n], y @ w['attention/key'][:, kv]
            q, k = (turn(q, base), turn(k, base)) if turned else (q, k)
            logits = np.where(seen, q @ k.T / np.sqrt(head_dim), -np.inf)
            probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            x = x + probs @ (y @ w['attention/value'][:, kv]) @ w['attention/out'][n]
        y = norm(x, w['mlp_norm_in/scale'])
        x = x + gelu(y @ w['mlp/up']) @ w['mlp/down']
    return norm(x, p['final_norm/scale']) @ p['readout']


def test_forward_is_the_decoder_in_numpy():
    """Catches a residual left out, layers in another order, a norm in the wrong place; logits over
    the root of d_model / n_heads where heads have a width of their own; layers turned alike.
    """
    changes = {'model.n_heads': 4, 'model.n_layers': 3, 'model.head_dim': 6}
    changes |= {'attention.window': 3, 'attention.full_every': 3}
    changes |= {'attention.rope_local_base': 50.0, 'attention.no_rope_every': 2}
    config, params = tiny_config(changes), params_of(changes)
    ours = forward(changes, params)
    assert ours.dtype == jnp.float32
    for row, tokens_T in enumerate(TOKENS):
        wanted = numpy_forward(config, params, tokens_T)
        np.testing.assert_allclose(ours[row], wanted, rtol=1e-3, atol=1e-4)


def test_biases_may_be_of_queries_keys_and_values_alone():
    specs = named_leaves(tiny_learner(tiny_config({'model.qkv_bias': True})).description.specs)
    biases = {path.removeprefix('layers/') for path in specs if path.endswith('_bias')}
    assert biases == {f'attention/{name}_bias' for name in ('query', 'key', 'value')}
    with pytest.raises(ValueError, match='values their biases too'):
        check(tiny_config({'model.qkv_bias': True, 'model.bias': True}))


@pytest.mark.full
@pytest.mark.parametrize(
    'changes',
    [{'model.scan_layers': False}, *({'model.remat': name} for name in REMAT_POLICIES)],
)
def test_scan_and_remat_change_neither_logits_nor_gradients(changes):
    """The parameters are the same tree, stacked, too: a checkpoint fits both."""
    grads, logits = compiled(tiny_config(), with_gradient=True)(params_of(), TOKENS, None)
    again, same = compiled(tiny_config(changes), with_gradient=True)(params_of(), TOKENS, None)
    np.testing.assert_allclose(same, logits, rtol=1e-5, atol=1e-6)
    assert_trees_close(again, grads, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_remat_keeps_less():
    """Bytes kept for the backward pass, by policy. Catches one that is not used, or keeps all."""

    def kept(remat):
        model = tiny_model(tiny_config({'model.remat': remat}))

        def backward(params):
            return jax.vjp(lambda p: model.apply({'params': p}, TOKENS), params)[1]

        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(backward, params_of())))

    assert kept('full') < kept('attended') < kept('attention') < kept('dots') < kept('none')
    assert kept('attended') < kept('mlp') < kept('dots')
    assert kept('attention') == kept('offload')


@pytest.mark.full
def test_bfloat16_is_near_float32():
    """Parameters stay float32, logits are float32, and what lies between is really bfloat16."""
    changes = {'model.dtype': 'bfloat16'}
    assert all(w.dtype == np.float32 for w in jax.tree.leaves(params_of(changes)))
    exact, rounded = forward({}, params_of()), forward(changes, params_of())
    assert rounded.dtype == jnp.float32
    error = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert 1e-4 < error < 0.05


@pytest.mark.default_rows('rope')
@pytest.mark.parametrize('position', CHOICES['model.position'].table)
def test_no_token_sees_a_later_one(position):
    """Causality by gradient: all tokens differ, so that each row of the embedding is one position,
    and d logits[t] / d embedding[token s] = 0 unless s <= t.
    """
    changes = {'model.position': position}
    tokens_1T = np.arange(8)[None]
    model = tiny_model(tiny_config(changes))
    params = jax.device_put(params_of(changes))

    def projected(table):
        logits_1TV = model.apply({'params': params | {'embedding': table}}, tokens_1T)
        return logits_1TV[0] @ jnp.cos(jnp.arange(VOCAB, dtype=jnp.float32))

    jacobian = jax.jit(jax.jacrev(projected))
    seen_TS = np.abs(jacobian(params['embedding'])[:, :8]).max(-1) > 0
    np.testing.assert_array_equal(seen_TS, np.tri(8, dtype=bool))


@pytest.mark.default_rows('rope')
@pytest.mark.parametrize('position', CHOICES['model.position'].table)
def test_documents_are_on_their_own(position):
    """Packed into a row, each gives the logits it gives alone; without segments it does not."""
    changes = {'model.position': position}
    segments = np.int32([[1, 1, 1, 2, 2, 2, 2, 0], [4, 4, 4, 4, 4, 5, 6, 6]])
    packed = forward(changes, params_of(changes), segments=segments)
    for row, start, stop in ((0, 0, 3), (0, 3, 7), (1, 0, 5), (1, 5, 6), (1, 6, 8)):
        moved = np.roll(TOKENS, -start, axis=1)  # what follows the document cannot matter
        alone = forward(changes, params_of(changes), moved)[row, : stop - start]
        np.testing.assert_allclose(packed[row, start:stop], alone, rtol=1e-3, atol=1e-5)
    mixed = forward(changes, params_of(changes))
    assert np.abs(mixed[0, 3:7] - packed[0, 3:7]).max() > 0.01


@pytest.mark.full
def test_tied_embeddings_read_out_with_the_table():
    tied = params_of({'model.tie_embeddings': True})
    assert 'readout' not in tied
    np.testing.assert_allclose(
        forward({'model.tie_embeddings': True}, tied),
        forward({}, tied | {'readout': tied['embedding'].T}),
        rtol=1e-5,
        atol=1e-6,
    )


def test_softcap_bounds_the_logits():
    """c tanh(logits / c); 0 leaves them."""
    large = params_of() | {'readout': 10 * params_of()['readout']}
    plain, capped = forward({}, large), forward({'model.logit_softcap': 3.0}, large)
    assert np.abs(plain).max() > 6
    assert np.abs(capped).max() <= 3
    np.testing.assert_allclose(capped, 3 * np.tanh(plain / 3), rtol=1e-4, atol=1e-5)


def test_learned_positions_are_added_to_the_embeddings():
    changes = {'model.position': 'learned'}
    params = params_of(changes)
    assert params['positions']['table'].shape == (8, 16)
    table = params['positions']['table']
    zero = params | {'positions': {'table': 0 * table}}
    without = {k: v for k, v in params.items() if k != 'positions'}
    none = {'model.position': 'none'}
    np.testing.assert_allclose(forward(changes, zero), forward(none, without), rtol=1e-5, atol=1e-6)
    same = params | {'positions': {'table': 0 * table + 1}, 'embedding': params['embedding'] - 1}
    np.testing.assert_allclose(forward(changes, same), forward(none, without), rtol=1e-3, atol=1e-4)


OTHER_NORMS = ('model.final_norm', 'model.embedding_norm', 'model.qk_norm')
ROWS = [
    pytest.param({path: name}, marks=pytest.mark.full if path in OTHER_NORMS else ())
    for path, choice in CHOICES.items()
    for name in choice.table
    if path.startswith('model.')
]


@pytest.mark.parametrize('changes', ROWS, ids=str)
def test_every_parameter_is_described(changes):
    """Whatever is chosen: an axis name for each dimension, `layer` first in what is stacked, and a
    place on the mesh.
    """
    config = tiny_config(with_needs(changes))
    described = tiny_learner(config).description
    shapes, specs = named_leaves(described.shapes), named_leaves(described.specs)
    assert shapes.keys() == specs.keys()
    for path, spec in specs.items():
        assert len(spec.axes) == len(shapes[path].shape), path
        param_sharding(make_mesh(tiny_config().mesh), spec, shapes[path].shape)
        is_shared = 'shared' in config.model.reparam and spec.role == 'hidden'
        is_stacked = path.startswith('layers') and not is_shared
        assert (LAYER in spec.axes[:1]) == is_stacked, path
        assert spec.axes.count(LAYER) <= 1, path
        assert shapes[path].dtype == jnp.float32, path
        assert bool(spec.fan_in) == (spec.role in ('hidden', 'readout')), path


@pytest.mark.full
@pytest.mark.parametrize(
    'changes',
    [
        {'model.readout_bias': True, 'model.logit_softcap': 2.0, 'model.dtype': 'bfloat16'},
        {'model.tie_embeddings': True},
    ],
    ids=str,
)
def test_logits_are_the_readout_of_the_last_activations(changes):
    """Whatever it holds, and what layers fill comes back beside them."""
    config = tiny_config(changes)
    params = params_of(changes)
    if 'readout_bias' in params:
        params = params | {'readout_bias': np.arange(VOCAB, dtype=np.float32)}
    model = tiny_model(config)

    @functools.partial(jax.jit)
    def parts(params):
        return model.apply({'params': params}, TOKENS, method='activations', mutable=[DIAGNOSTICS])

    (x_BTD, readout), filled = parts(params)
    assert x_BTD.shape == (*TOKENS.shape, config.model.d_model)
    assert x_BTD.dtype == jnp.dtype(config.model.dtype)
    assert filled[DIAGNOSTICS]['layers']['residual_rms'][0].shape == (2,)
    logits_BTV = forward(changes, params)
    assert logits_BTV.dtype == jnp.float32
    np.testing.assert_allclose(readout(x_BTD), logits_BTV, rtol=1e-5, atol=1e-5)
    whole = x_BTD.astype(jnp.float32) @ readout.weight_DV
    assert np.abs(whole - logits_BTV).max() > 1 if readout.softcap else readout.bias_V is None


def test_each_kernel_can_be_chosen_alone():
    def chosen(changes):
        return str(tiny_model(tiny_config(changes)).kernels)

    rest = 'rms_norm=reference softmax=reference cross_entropy=reference'
    attention = chosen({'kernels.attention': 'reference'})
    assert attention == f'attention=reference linear_attention=chunked matmul=narrow_first {rest}'
    matmul = chosen({'kernels.matmul': 'direct'})
    assert matmul == f'attention=blocked linear_attention=chunked matmul=direct {rest}'
    all_of_them = chosen({'kernels.implementation': 'reference'})
    assert all_of_them == f'attention=reference linear_attention=quadratic matmul=direct {rest}'
