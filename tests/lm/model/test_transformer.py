"""The whole decoder. Reference: the forward pass in numpy float64. Property: causality by gradient,
independent documents. Equivalence: scan, remat and dtype change nothing but cost.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.config.fields import CHOICES
from lm.devices.mesh import make_mesh, param_sharding
from lm.model.block import DIAGNOSTICS
from lm.model.check import check
from lm.model.kernels import list_kernels
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


def build_params(changes=None):
    return initial_state(tiny_config(changes)).params


@functools.cache
def compile_model(config, with_gradient=False):
    """Returns (params, tokens, segments) -> logits [B, T, V], with the gradient of a
    weighted sum.
    """
    model = tiny_model(config)

    def logits(params, tokens, segments):
        return model.apply({'params': params}, tokens, segments)

    def weighted_sum(params, tokens, segments):
        logits_BTV = logits(params, tokens, segments)
        weights = jnp.cos(jnp.arange(logits_BTV.size, dtype=jnp.float32)).reshape(logits_BTV.shape)
        return jnp.sum(logits_BTV * weights), logits_BTV

    run = jax.grad(weighted_sum, has_aux=True) if with_gradient else logits
    return jax.jit(run)


def forward(changes, params, tokens=TOKENS, segments=None):
    return compile_model(tiny_config(changes))(params, tokens, segments)


def numpy_forward(config, params, tokens_T):
    """One row through a pre-norm decoder with RMSNorm, RoPE, grouped heads and GELU; float64."""
    model, options = config.model, config.attention.options | config.position.options
    p = {path: np.float64(w) for path, w in named_leaves(params).items()}
    head_dim, length = model.head_dim, len(tokens_T)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale

    def rotate(x_TH, base):
        half = head_dim // 2
        angle = np.arange(length)[:, None] * base ** (-np.arange(half) / half)
        z = (x_TH[:, :half] + 1j * x_TH[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = p['embedding'][tokens_T]
    for i in range(model.n_layers):
        w = {path.removeprefix('layers/'): v[i] for path, v in p.items() if 'layers/' in path}
        is_full = (i + 1) % options['full_every'] == options['full_at']
        base = 10_000.0 if is_full else options['rope_local_base']
        is_rotated = (i + 1) % options['no_rope_every'] != 0
        mask = np.tri(length, dtype=bool) & ~np.tri(
            length, k=-length if is_full else -options['window'], dtype=bool
        )
        y = norm(x, w['attention_norm_in/scale'])
        for n in range(model.n_heads):
            kv = n * model.n_kv_heads // model.n_heads
            q, k = y @ w['attention/query'][:, n], y @ w['attention/key'][:, kv]
            q, k = (rotate(q, base), rotate(k, base)) if is_rotated else (q, k)
            logits = np.where(mask, q @ k.T / np.sqrt(head_dim), -np.inf)
            probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            x = x + probs @ (y @ w['attention/value'][:, kv]) @ w['attention/out'][n]
        y = norm(x, w['mlp_norm_in/scale'])
        x = x + gelu(y @ w['mlp/up']) @ w['mlp/down']
    return norm(x, p['final_norm/scale']) @ p['readout']


def test_forward_matches_numpy_decoder():
    """Catches a missing residual, layers in another order, a norm in the wrong place, logits
    divided by the root of d_model / n_heads if heads have their own width, and layers rotated
    alike.
    """
    changes = {'model.n_heads': 4, 'model.n_layers': 3, 'model.head_dim': 6}
    changes |= {'attention.window': 3, 'attention.full_every': 3, 'attention.full_at': 1}
    changes |= {'attention.rope_local_base': 50.0, 'attention.no_rope_every': 2}
    config, params = tiny_config(changes), build_params(changes)
    ours = forward(changes, params)
    assert ours.dtype == jnp.float32
    for row, tokens_T in enumerate(TOKENS):
        expected = numpy_forward(config, params, tokens_T)
        np.testing.assert_allclose(ours[row], expected, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ('field', 'part', 'names'),
    [
        ('model.qkv_bias', 'attention', ('query', 'key', 'value')),
        ('model.mlp_bias', 'mlp', ('up', 'down')),
    ],
)
def test_part_bias_adds_no_other(field, part, names):
    specs = named_leaves(tiny_learner(tiny_config({field: True})).description.specs)
    biases = {path.removeprefix('layers/') for path in specs if path.endswith('_bias')}
    assert biases == {f'{part}/{name}_bias' for name in names}
    with pytest.raises(ValueError, match=f'already adds biases to .* Leave {field} out'):
        check(tiny_config({field: True, 'model.bias': True}))


@pytest.mark.full
@pytest.mark.parametrize(
    'changes',
    [{'model.scan_layers': False}, *({'model.remat': name} for name in REMAT_POLICIES)],
)
def test_scan_and_remat_keep_logits_and_gradients(changes):
    """The parameters are the same stacked tree too, so that a checkpoint fits both."""
    grads, logits = compile_model(tiny_config(), with_gradient=True)(build_params(), TOKENS, None)
    again, same = compile_model(tiny_config(changes), with_gradient=True)(
        build_params(), TOKENS, None
    )
    np.testing.assert_allclose(same, logits, rtol=1e-5, atol=1e-6)
    assert_trees_close(again, grads, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_remat_policies_order_residuals():
    """Bytes kept for the backward pass, by policy. Catches a policy that is not used, or
    keeps all.
    """

    def count_residuals(remat):
        model = tiny_model(tiny_config({'model.remat': remat}))

        def backward(params):
            return jax.vjp(lambda p: model.apply({'params': p}, TOKENS), params)[1]

        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(backward, build_params())))

    assert (
        count_residuals('full')
        < count_residuals('attended')
        < count_residuals('attention')
        < count_residuals('dots')
        < count_residuals('none')
    )
    assert count_residuals('attended') < count_residuals('mlp') < count_residuals('dots')
    assert count_residuals('attention') == count_residuals('offload')


@pytest.mark.full
def test_bfloat16_is_close_to_float32():
    """Parameters and logits are float32, and everything between is really bfloat16."""
    changes = {'model.dtype': 'bfloat16'}
    assert all(w.dtype == np.float32 for w in jax.tree.leaves(build_params(changes)))
    exact, rounded = forward({}, build_params()), forward(changes, build_params())
    assert rounded.dtype == jnp.float32
    error = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert 1e-4 < error < 0.05


@pytest.mark.default_rows('rope')
@pytest.mark.parametrize('position', CHOICES['model.position'].table)
def test_attention_is_causal(position):
    """Causality by gradient: d logits[t] / d embedding[token s] = 0 unless s <= t.

    All tokens differ, so that each row of the embedding belongs to one position.
    """
    changes = {'model.position': position}
    tokens_1T = np.arange(8)[None]
    model = tiny_model(tiny_config(changes))
    params = jax.device_put(build_params(changes))

    def project_logits(table):
        logits_1TV = model.apply({'params': params | {'embedding': table}}, tokens_1T)
        return logits_1TV[0] @ jnp.cos(jnp.arange(VOCAB, dtype=jnp.float32))

    jacobian = jax.jit(jax.jacrev(project_logits))
    depends_TS = np.abs(jacobian(params['embedding'])[:, :8]).max(-1) > 0
    np.testing.assert_array_equal(depends_TS, np.tri(8, dtype=bool))


@pytest.mark.default_rows('rope')
@pytest.mark.parametrize('position', CHOICES['model.position'].table)
def test_packed_documents_equal_single_documents(position):
    """Packed in a row, each document gives the logits it has alone; without segments it
    does not.
    """
    changes = {'model.position': position}
    segments = np.int32([[1, 1, 1, 2, 2, 2, 2, 0], [4, 4, 4, 4, 4, 5, 6, 6]])
    packed = forward(changes, build_params(changes), segments=segments)
    for row, start, stop in ((0, 0, 3), (0, 3, 7), (1, 0, 5), (1, 5, 6), (1, 6, 8)):
        rolled = np.roll(TOKENS, -start, axis=1)  # later tokens cannot matter
        single = forward(changes, build_params(changes), rolled)[row, : stop - start]
        np.testing.assert_allclose(packed[row, start:stop], single, rtol=1e-3, atol=1e-5)
    mixed = forward(changes, build_params(changes))
    assert np.abs(mixed[0, 3:7] - packed[0, 3:7]).max() > 0.01


@pytest.mark.full
def test_tied_readout_uses_embedding_table():
    tied = build_params({'model.tie_embeddings': True})
    assert 'readout' not in tied
    np.testing.assert_allclose(
        forward({'model.tie_embeddings': True}, tied),
        forward({}, tied | {'readout': tied['embedding'].T}),
        rtol=1e-5,
        atol=1e-6,
    )


def test_softcap_bounds_the_logits():
    """c tanh(logits / c); 0 leaves them."""
    large = build_params() | {'readout': 10 * build_params()['readout']}
    plain, capped = forward({}, large), forward({'model.logit_softcap': 3.0}, large)
    assert np.abs(plain).max() > 6
    assert np.abs(capped).max() <= 3
    np.testing.assert_allclose(capped, 3 * np.tanh(plain / 3), rtol=1e-4, atol=1e-5)


def test_learned_positions_are_added_to_the_embeddings():
    changes = {'model.position': 'learned'}
    params = build_params(changes)
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
    """Each choice has an axis name for each dimension, `layer` first if stacked, and a sharding."""
    config = tiny_config(with_needs(changes))
    description = tiny_learner(config).description
    shapes, specs = named_leaves(description.shapes), named_leaves(description.specs)
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
def test_readout_maps_last_activations_to_logits(changes):
    """Checks all parts of the readout; collections that layers fill are returned too."""
    config = tiny_config(changes)
    params = build_params(changes)
    if 'readout_bias' in params:
        params = params | {'readout_bias': np.arange(VOCAB, dtype=np.float32)}
    model = tiny_model(config)

    @functools.partial(jax.jit)
    def run(params):
        return model.apply({'params': params}, TOKENS, method='activations', mutable=[DIAGNOSTICS])

    (x_BTD, readout), collections = run(params)
    assert x_BTD.shape == (*TOKENS.shape, config.model.d_model)
    assert x_BTD.dtype == jnp.dtype(config.model.dtype)
    assert collections[DIAGNOSTICS]['layers']['residual_rms'][0].shape == (2,)
    logits_BTV = forward(changes, params)
    assert logits_BTV.dtype == jnp.float32
    np.testing.assert_allclose(readout(x_BTD), logits_BTV, rtol=1e-5, atol=1e-5)
    whole = x_BTD.astype(jnp.float32) @ readout.weight_DV
    assert np.abs(whole - logits_BTV).max() > 1 if readout.softcap else readout.bias_V is None


def test_kernels_are_chosen_independently():
    def kernel_names(changes):
        names = tiny_model(tiny_config(changes)).kernels.names
        return ' '.join(f'{operation}={name}' for operation, name in names)

    other_kernels = 'rms_norm=reference softmax=reference cross_entropy=reference'
    chunked = 'linear_attention=chunked recurrence=chunked'
    attention = kernel_names({'kernels.attention': 'reference'})
    assert attention == f'attention=reference {chunked} matmul=narrow_first {other_kernels}'
    matmul = kernel_names({'kernels.matmul': 'direct'})
    assert matmul == f'attention=blocked {chunked} matmul=direct {other_kernels}'
    all_reference = kernel_names({'kernels.implementation': 'reference'})
    slow = 'linear_attention=quadratic recurrence=reference'
    assert all_reference == f'attention=reference {slow} matmul=direct {other_kernels}'


@pytest.mark.parametrize(
    ('changes', 'operations'),
    [
        ({}, 'attention'),
        ({'model.attention': 'linear'}, 'linear_attention'),
        ({'model.pattern': 'gla:position=none+softmax'}, 'attention recurrence'),
    ],
)
def test_kernels_without_use_are_not_listed(changes, operations):
    recipe = tiny_config(changes)
    listed = list_kernels(recipe, tiny_model(recipe).kernels)
    shared = ['matmul', 'rms_norm', 'softmax', 'cross_entropy']
    assert [*listed] == [*operations.split(), *shared]
