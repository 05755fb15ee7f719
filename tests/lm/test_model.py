"""The decoder put together. Reference: the whole forward pass in numpy float64. Property: causality
by gradient, documents on their own. Equivalence: scan, remat and dtype change nothing but cost.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from lm.check import NAMES
from lm.mesh import make_mesh, param_sharding
from lm.model import kernel_implementation
from lm.state import describe_params
from modules.params import LAYER, named_leaves, path_name
from tests.helpers import (
    FAST,
    VOCAB,
    assert_trees_close,
    initial_state,
    tiny_batch,
    tiny_config,
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
        return model.apply({'params': params}, tokens, segments).reshape(*tokens.shape, VOCAB)

    def weighted(params, tokens, segments):
        out = logits(params, tokens, segments)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * weights), out

    run = jax.grad(weighted, has_aux=True) if with_gradient else logits
    return jax.jit(run, compiler_options=FAST)


def forward(changes, params, tokens=TOKENS, segments=None):
    return compiled(tiny_config(changes))(params, tokens, segments)


def numpy_forward(config, params, tokens_T):
    """One row through a pre-norm decoder with RMSNorm, RoPE, grouped heads and GELU; float64."""
    model = config.model
    p = {path: np.float64(w) for path, w in named_leaves(params).items()}
    head_dim, length = model.d_model // model.n_heads, len(tokens_T)

    def norm(x, scale):
        return x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * scale

    def turn(x_TH):
        half = head_dim // 2
        angle = np.arange(length)[:, None] * 10_000.0 ** (-np.arange(half) / half)
        z = (x_TH[:, :half] + 1j * x_TH[:, half:]) * np.exp(1j * angle)
        return np.concatenate([z.real, z.imag], -1)

    def gelu(x):
        return 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))

    x = p['embedding'][tokens_T]
    for i in range(model.n_layers):
        w = {path.removeprefix('layers/'): v[i] for path, v in p.items() if 'layers/' in path}
        y = norm(x, w['attention_norm_in/scale'])
        for n in range(model.n_heads):
            kv = n * model.n_kv_heads // model.n_heads
            q, k = turn(y @ w['attention/query'][:, n]), turn(y @ w['attention/key'][:, kv])
            logits = np.where(np.tri(length, dtype=bool), q @ k.T / np.sqrt(head_dim), -np.inf)
            probs = np.exp(logits) / np.exp(logits).sum(-1, keepdims=True)
            x = x + probs @ (y @ w['attention/value'][:, kv]) @ w['attention/out'][n]
        y = norm(x, w['mlp_norm_in/scale'])
        x = x + gelu(y @ w['mlp/up']) @ w['mlp/down']
    return norm(x, p['final_norm/scale']) @ p['readout']


def test_forward_is_the_decoder_in_numpy():
    """Catches a residual left out, layers in another order, a norm in the wrong place."""
    changes = {'model.n_heads': 4, 'model.n_layers': 3}
    config, params = tiny_config(changes), params_of(changes)
    ours = forward(changes, params)
    assert ours.dtype == jnp.float32
    for row, tokens_T in enumerate(TOKENS):
        wanted = numpy_forward(config, params, tokens_T)
        np.testing.assert_allclose(ours[row], wanted, rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    'changes', [{'model.scan_layers': False}, {'model.remat': 'dots'}, {'model.remat': 'full'}]
)
def test_scan_and_remat_change_neither_logits_nor_gradients(changes):
    """The parameters are the same tree, stacked, too: a checkpoint fits both."""
    grads, logits = compiled(tiny_config(), with_gradient=True)(params_of(), TOKENS, None)
    again, same = compiled(tiny_config(changes), with_gradient=True)(params_of(), TOKENS, None)
    np.testing.assert_allclose(same, logits, rtol=1e-5, atol=1e-6)
    assert_trees_close(again, grads, rtol=1e-4, atol=1e-5)


def test_remat_keeps_less():
    """Bytes kept for the backward pass: full < dots < none. Catches a policy that is not used."""

    def kept(remat):
        model = tiny_model(tiny_config({'model.remat': remat}))

        def backward(params):
            return jax.vjp(lambda p: model.apply({'params': p}, TOKENS), params)[1]

        return sum(leaf.size for leaf in jax.tree.leaves(jax.eval_shape(backward, params_of())))

    assert kept('full') < kept('dots') < kept('none')


def test_bfloat16_is_near_float32():
    """Parameters stay float32, logits are float32, and what lies between is really bfloat16."""
    changes = {'model.dtype': 'bfloat16'}
    assert all(w.dtype == np.float32 for w in jax.tree.leaves(params_of(changes)))
    exact, rounded = forward({}, params_of()), forward(changes, params_of())
    assert rounded.dtype == jnp.float32
    error = np.abs(exact - rounded).max() / np.abs(exact).max()
    assert 1e-4 < error < 0.05


@pytest.mark.parametrize('position', NAMES['model.position'])
def test_no_token_sees_a_later_one(position):
    """Causality by gradient: all tokens differ, so that each row of the embedding is one position,
    and d logits[t] / d embedding[token s] = 0 unless s <= t.
    """
    changes = {'model.position': position}
    tokens_T = np.arange(8)[None]
    model = tiny_model(tiny_config(changes))
    params = jax.device_put(params_of(changes))

    def projected(table):
        logits_TV = model.apply({'params': params | {'embedding': table}}, tokens_T)
        return logits_TV @ jnp.cos(jnp.arange(VOCAB, dtype=jnp.float32))

    jacobian = jax.jit(jax.jacrev(projected), compiler_options=FAST)
    seen_TS = np.abs(jacobian(params['embedding'])[:, :8]).max(-1) > 0
    np.testing.assert_array_equal(seen_TS, np.tri(8, dtype=bool))


@pytest.mark.parametrize('position', NAMES['model.position'])
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


ROWS = [
    {path: name} for path, table in NAMES.items() for name in table if path.startswith('model.')
]


@pytest.mark.parametrize('changes', ROWS, ids=str)
def test_every_parameter_is_described(changes):
    """Whatever is chosen: an axis name for each dimension, `layer` first in what is stacked, and a
    place on the mesh.
    """
    config = tiny_config(with_needs(changes))
    described = describe_params(config, tiny_model(config))
    shapes, specs = named_leaves(described.shapes), named_leaves(described.specs)
    assert shapes.keys() == specs.keys()
    for path, spec in specs.items():
        assert len(spec.axes) == len(shapes[path].shape), path
        param_sharding(make_mesh(tiny_config().mesh), spec)
        is_shared = changes == {'model.placement': 'wide'} and spec.role == 'hidden'
        is_stacked = path.startswith('layers') and not is_shared
        assert (LAYER in spec.axes[:1]) == is_stacked, path
        assert spec.axes.count(LAYER) <= 1, path
        assert shapes[path].dtype == jnp.float32, path
        assert bool(spec.fan_in) == (spec.role in ('hidden', 'readout')), path


BOTH_IN = {'attention_norm_in', 'mlp_norm_in'}
BOTH_OUT = {'attention_norm_out', 'mlp_norm_out'}
OF_HEADS = {'query_norm', 'key_norm', 'value_norm'}
NORMS_OF = {
    'deepnorm': BOTH_OUT,
    'hybrid': {'mlp_norm_in', 'final_norm'} | OF_HEADS,
    'hybrid_star': BOTH_IN | {'final_norm'} | OF_HEADS,
    'layernorm_scaling': BOTH_IN | {'final_norm'},
    'mix': BOTH_IN | BOTH_OUT | {'final_norm'},
    'output': BOTH_OUT | {'final_norm'},
    'peri': BOTH_IN | BOTH_OUT | {'final_norm'},
    'post': BOTH_OUT,
    'pre': BOTH_IN | {'final_norm'},
    'resi_dual': BOTH_OUT | {'final_norm'},
    'wide': BOTH_IN | {'final_norm'},
}


@pytest.mark.parametrize('placement', NAMES['model.placement'])
def test_placement_decides_which_norms_there_are(placement):
    changes = with_needs({'model.placement': placement, 'model.n_layers': 4})
    config = tiny_config(changes)
    specs = named_leaves(describe_params(config, tiny_model(config)).specs)
    found = {path.split('/')[-2] for path in specs if path.endswith('scale')}
    assert found == NORMS_OF[placement]


@pytest.mark.parametrize('placement', NAMES['model.placement'])
def test_scan_changes_neither_logits_nor_gradients_wherever_norms_sit(placement):
    """Block numbers are data: catches one that counts from its group of equal blocks, or from 0."""
    changes = with_needs({'model.placement': placement, 'model.n_layers': 5})
    changes['model.mix_fraction'] = 0.4 if placement == 'mix' else None
    config = tiny_config(changes)
    unrolled = tiny_config(changes | {'model.scan_layers': False})
    state = initial_state(config)
    used = describe_params(config, tiny_model(config)).variables(state.weights)['params']
    assert_trees_close(initial_state(unrolled), state, rtol=0, atol=0)
    grads, logits = compiled_with(config)(used, state.stats, TOKENS)
    again, same = compiled_with(unrolled)(used, state.stats, TOKENS)
    np.testing.assert_allclose(same, logits, rtol=1e-4, atol=1e-5)
    assert_trees_close(again, grads, rtol=1e-3, atol=1e-4)


def compiled_with(config):
    """(used params, stats, tokens) -> the gradient of a weighted sum of logits, and the logits."""
    model = tiny_model(config)

    def weighted(params, stats, tokens):
        out = model.apply({'params': params, **stats}, tokens)
        weights = jnp.cos(jnp.arange(out.size, dtype=jnp.float32)).reshape(out.shape)
        return jnp.sum(out * weights), out

    return jax.jit(jax.grad(weighted, has_aux=True), compiler_options=FAST)


def logits_of(changes, params, variables=None):
    model = tiny_model(tiny_config(changes))
    return model.apply({'params': params} | (variables or {}), TOKENS)


def test_first_block_of_layernorm_scaling_is_a_pre_norm_block():
    """And the second one is not: 1/sqrt(l) with l from 1."""
    for layers, equal in ((1, True), (2, False)):
        pre = {'model.n_layers': layers}
        scaled = pre | {'model.placement': 'layernorm_scaling'}
        params = params_of(pre)
        same = np.array_equal(logits_of(pre, params), logits_of(scaled, params))
        assert same == equal


def test_mix_is_post_norm_below_and_pre_norm_above():
    """At both ends of the fraction it is one of the two, the final norm kept; floor in between."""
    mix = {'model.placement': 'mix', 'model.n_layers': 4}
    pre, post = mix | {'model.placement': 'pre'}, mix | {'model.placement': 'post'}
    params = params_of(pre)
    renamed = {'layers_pre' if k == 'layers' else k: v for k, v in params.items()}
    np.testing.assert_array_equal(
        logits_of(mix | {'model.mix_fraction': 0.0}, renamed), logits_of(pre, params)
    )
    params = params_of(post | {'model.final_norm': 'rmsnorm'})
    renamed = {'layers_post' if k == 'layers' else k: v for k, v in params.items()}
    np.testing.assert_array_equal(
        logits_of(mix | {'model.mix_fraction': 1.0}, renamed),
        logits_of(post | {'model.final_norm': 'rmsnorm'}, params),
    )
    for fraction, below in ((None, 1), (0.3, 1), (0.5, 2), (0.75, 3)):
        params = params_of(mix | {'model.mix_fraction': fraction})
        assert len(params['layers_post']['mlp']['up']) == below
        assert len(params['layers_pre']['mlp']['up']) == 4 - below


def test_embedding_and_final_norm_are_options():
    """Catches a norm that is made and not applied, or applied elsewhere."""
    params = params_of({'model.embedding_norm': 'rmsnorm'})
    assert 'embedding_norm' in params
    louder = params | {'embedding': 7 * params['embedding']}
    changes = {'model.embedding_norm': 'rmsnorm', 'model.norm_eps': 0.0}
    np.testing.assert_allclose(
        logits_of(changes, louder), logits_of(changes, params), rtol=1e-3, atol=1e-4
    )
    none = {'model.final_norm': 'none'}
    assert 'final_norm' not in params_of(none)
    assert 'final_norm' in params_of({'model.placement': 'post', 'model.final_norm': 'layernorm'})
    louder = params_of(none) | {'readout': 3 * params_of(none)['readout']}
    np.testing.assert_allclose(
        logits_of(none, louder), 3 * logits_of(none, params_of(none)), rtol=1e-4
    )


def test_dyt_multiplies_the_embeddings_by_a_learned_number():
    """sqrt(D) at the start, unless the config says otherwise."""
    params = params_of({'model.norm': 'dyt'})
    assert params['embedding_scale'] == 4.0
    assert 'embedding_scale' not in params_of({'model.norm': 'dyt', 'model.embedding_scale': False})
    scaled = params_of({'model.embedding_scale': True})
    plain = {k: v for k, v in scaled.items() if k != 'embedding_scale'}
    np.testing.assert_allclose(
        logits_of({'model.embedding_scale': True}, scaled),
        logits_of({}, plain | {'embedding': 4 * plain['embedding']}),
        rtol=1e-4,
        atol=1e-5,
    )


def test_deepnorm_draws_some_matrices_smaller():
    """(8 L)^(-1/4) on value, out, up and down; not on query and key."""
    config = tiny_config({'model.placement': 'deepnorm'})
    stds = named_leaves(describe_params(config, tiny_model(config)).init_stds)
    plain = named_leaves(describe_params(tiny_config(), tiny_model(tiny_config())).init_stds)
    for path, std in stds.items():
        smaller = path.split('/')[-1] in ('value', 'out', 'up', 'down')
        assert std == plain[path] * (16**-0.25 if smaller else 1.0), path


def test_crmsnorm_streams_one_coordinate_less():
    shapes = {k: v.shape for k, v in named_leaves(params_of({'model.norm': 'crmsnorm'})).items()}
    assert shapes['embedding'] == (VOCAB, 15)
    assert shapes['layers/attention/query'] == (2, 15, 2, 8)
    assert shapes['layers/attention/out'] == (2, 2, 8, 15)
    assert shapes['readout'] == (15, VOCAB)


def test_biases_are_added():
    """One behind each matrix that `bias` and `readout_bias` stand for, none elsewhere."""
    changes = {'model.bias': True, 'model.readout_bias': True, 'model.activation': 'swiglu'}
    params = params_of(changes)
    names = {path.split('/')[-1] for path in named_leaves(params) if path.endswith('bias')}
    matrices = ('query', 'key', 'value', 'out', 'up', 'gate', 'down', 'readout')
    assert names == {f'{name}_bias' for name in matrices}
    plain = {'model.activation': 'swiglu'}
    bare = jax.tree_util.tree_map_with_path(lambda path, leaf: leaf, params)
    before = logits_of(changes, params)
    without = {k: v for k, v in bare.items() if k != 'readout_bias'}
    without['layers'] = {
        k: {n: w for n, w in v.items() if not n.endswith('_bias')}
        if k in ('mlp', 'attention')
        else v
        for k, v in bare['layers'].items()
    }
    np.testing.assert_allclose(logits_of(plain, without), before, rtol=1e-5, atol=1e-6)
    for path in (n for n in named_leaves(params) if n.endswith('bias') and 'key' not in n):
        moved = jax.tree_util.tree_map_with_path(
            lambda at, leaf, path=path: leaf + 1.0 * (path_name(at) == path), params
        )
        assert np.abs(logits_of(changes, moved) - before).max() > 1e-3, path


def test_kernels_suit_the_platform():
    assert kernel_implementation('auto', 'cpu') == 'xla_cpu'
    assert kernel_implementation('auto', 'tpu') == kernel_implementation('auto', 'gpu') == 'xla'
    assert kernel_implementation('reference', 'cpu') == 'reference'
