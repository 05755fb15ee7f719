"""Norms in the model. Reference: which norms exist, and where. Equivalence: scanned = unrolled
blocks for all placements, and placements that agree at their ends.
"""

import dataclasses

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from modules.params import named_leaves, path_name
from modules.placements import PLACEMENTS
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


BOTH_IN = {'attention_norm_in', 'mlp_norm_in'}
BOTH_OUT = {'attention_norm_out', 'mlp_norm_out'}
HEAD_NORMS = {'query_norm', 'key_norm', 'value_norm'}
EXPECTED_NORMS = {
    'deepnorm': BOTH_OUT,
    'hybrid': {'mlp_norm_in', 'final_norm'} | HEAD_NORMS,
    'hybrid_star': BOTH_IN | {'final_norm'} | HEAD_NORMS,
    'layernorm_scaling': BOTH_IN | {'final_norm'},
    'mix': BOTH_IN | BOTH_OUT | {'final_norm'},
    'output': BOTH_OUT | {'final_norm'},
    'parallel': BOTH_IN | {'final_norm'},
    'parallel_shared': {'attention_norm_in', 'final_norm'},
    'peri': BOTH_IN | BOTH_OUT | {'final_norm'},
    'post': BOTH_OUT,
    'pre': BOTH_IN | {'final_norm'},
    'resi_dual': BOTH_OUT | {'final_norm'},
    'wide': BOTH_IN | {'final_norm'},
}


@pytest.mark.parametrize('placement', PLACEMENTS)
def test_placement_determines_norms(placement):
    changes = with_needs({'model.placement': placement, 'model.n_layers': 4})
    config = tiny_config(changes)
    specs = named_leaves(tiny_learner(config).description.specs)
    norms = {path.split('/')[-2] for path in specs if path.endswith('scale')}
    assert norms == EXPECTED_NORMS[placement]


# Blocks that know their number, and two groups of them; tests/contracts/test_norms.py has others.
@pytest.mark.full
@pytest.mark.parametrize('placement', ['layernorm_scaling', 'mix'])
def test_scan_equals_unrolled_for_all_placements(placement):
    """Catches parameters or block numbers that a scan hands out in another order."""
    changes = with_needs({'model.placement': placement, 'model.n_layers': 5})
    changes['model.mix_fraction'] = 0.4 if placement == 'mix' else None
    config = tiny_config(changes)
    unrolled = tiny_config(changes | {'model.scan_layers': False})
    state = initial_state(config)
    used = tiny_learner(config).variables(state.weights)['params']
    assert_trees_close(initial_state(unrolled), state, rtol=0, atol=0)
    grads, logits = compile_gradient(config)(used, state.stats, TOKENS)
    again, same = compile_gradient(unrolled)(used, state.stats, TOKENS)
    np.testing.assert_allclose(same, logits, rtol=1e-4, atol=1e-5)
    assert_trees_close(again, grads, rtol=1e-3, atol=1e-4)


def compile_gradient(config):
    """Returns (used params, stats, tokens) -> (gradient of a weighted sum of logits, logits)."""
    model = tiny_model(config)

    def weighted_sum(params, stats, tokens):
        logits = model.apply({'params': params, **stats}, tokens)
        weights = jnp.cos(jnp.arange(logits.size, dtype=jnp.float32)).reshape(logits.shape)
        return jnp.sum(logits * weights), logits

    return jax.jit(jax.grad(weighted_sum, has_aux=True))


def compute_logits(changes, params):
    return tiny_model(tiny_config(changes)).apply({'params': params}, TOKENS)


@pytest.mark.full
def test_layernorm_scaling_starts_with_pre_norm():
    """The second block differs: its factor is 1/sqrt(l) with l from 1."""
    for layers, equal in ((1, True), (2, False)):
        pre = {'model.n_layers': layers}
        scaled = pre | {'model.placement': 'layernorm_scaling'}
        params = build_params(pre)
        same = np.array_equal(compute_logits(pre, params), compute_logits(scaled, params))
        assert same == equal


@pytest.mark.full
def test_inline_option_applies_to_its_norm_only():
    """The inline option takes precedence over the section's option, which the other norms use."""
    params = build_params({'model.qk_norm': 'rmsnorm:scale=False', 'norm.scale': True})
    assert not [path for path in named_leaves(params) if 'query_norm' in path]
    assert 'scale' in params['final_norm']
    params = build_params({'model.qk_norm': 'rmsnorm:scale=True', 'norm.scale': False})
    assert [path for path in named_leaves(params) if 'query_norm/scale' in path]
    assert 'final_norm' not in params


@pytest.mark.full
def test_block_numbers_continue_across_groups(monkeypatch):
    """Layernorm_scaling is unchanged when cut into groups of 1 and 3.

    Catches numbers that start again in the second group.
    """
    changes = {'model.placement': 'layernorm_scaling', 'model.n_layers': 4}
    params = build_params(changes)
    whole = compute_logits(changes, params)
    row = PLACEMENTS['layernorm_scaling']
    (group,) = row.blocks(4)
    cut = [group._replace(name='lower', count=1), group._replace(name='upper', count=3)]
    monkeypatch.setitem(
        PLACEMENTS, 'layernorm_scaling', dataclasses.replace(row, blocks=lambda *_: cut)
    )
    lower = jax.tree.map(lambda w: w[:1], params['layers'])
    upper = jax.tree.map(lambda w: w[1:], params['layers'])
    outside = {name: value for name, value in params.items() if name != 'layers'}
    again = compute_logits(changes, outside | {'lower': lower, 'upper': upper})
    np.testing.assert_allclose(again, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.full
def test_mix_is_post_norm_then_pre_norm():
    """The mix at both ends of the fraction equals post or pre, with the final norm; between, it
    rounds down.
    """
    mix = {'model.placement': 'mix', 'model.n_layers': 4}
    pre, post = mix | {'model.placement': 'pre'}, mix | {'model.placement': 'post'}
    params = build_params(pre)
    renamed = {'layers_pre' if k == 'layers' else k: v for k, v in params.items()}
    np.testing.assert_array_equal(
        compute_logits(mix | {'model.mix_fraction': 0.0}, renamed), compute_logits(pre, params)
    )
    params = build_params(post | {'model.final_norm': 'rmsnorm'})
    renamed = {'layers_post' if k == 'layers' else k: v for k, v in params.items()}
    np.testing.assert_array_equal(
        compute_logits(mix | {'model.mix_fraction': 1.0}, renamed),
        compute_logits(post | {'model.final_norm': 'rmsnorm'}, params),
    )
    for fraction, below in ((None, 1), (0.3, 1), (0.5, 2), (0.75, 3)):
        params = build_params(mix | {'model.mix_fraction': fraction})
        assert len(params['layers_post']['mlp']['up']) == below
        assert len(params['layers_pre']['mlp']['up']) == 4 - below


@pytest.mark.full
def test_embedding_and_final_norm_are_options():
    """Catches a norm that is built and not applied, or applied elsewhere."""
    params = build_params({'model.embedding_norm': 'rmsnorm'})
    assert 'embedding_norm' in params
    louder = params | {'embedding': 7 * params['embedding']}
    changes = {'model.embedding_norm': 'rmsnorm', 'norm.eps': 0.0}
    np.testing.assert_allclose(
        compute_logits(changes, louder), compute_logits(changes, params), rtol=1e-3, atol=1e-4
    )
    none = {'model.final_norm': 'none'}
    assert 'final_norm' not in build_params(none)
    assert 'final_norm' in build_params(
        {'model.placement': 'post', 'model.final_norm': 'layernorm'}
    )
    louder = build_params(none) | {'readout': 3 * build_params(none)['readout']}
    np.testing.assert_allclose(
        compute_logits(none, louder), 3 * compute_logits(none, build_params(none)), rtol=1e-4
    )


@pytest.mark.full
def test_dyt_scales_embeddings_by_learned_number():
    """sqrt(D) at the start, unless the config says otherwise."""
    params = build_params({'model.norm': 'dyt'})
    assert params['embedding_scale'] == 4.0
    assert 'embedding_scale' not in build_params(
        {'model.norm': 'dyt', 'model.embedding_scale': False}
    )
    scaled = build_params({'model.embedding_scale': True})
    plain = {k: v for k, v in scaled.items() if k != 'embedding_scale'}
    np.testing.assert_allclose(
        compute_logits({'model.embedding_scale': True}, scaled),
        compute_logits({}, plain | {'embedding': 4 * plain['embedding']}),
        rtol=1e-4,
        atol=1e-5,
    )


def test_deepnorm_initializes_some_matrices_smaller():
    """(8 L)^(-1/4) on value, out, up and down; not on query and key."""
    config = tiny_config({'model.placement': 'deepnorm'})
    stds = named_leaves(tiny_learner(config).description.init_stds)
    plain = named_leaves(tiny_learner(tiny_config()).description.init_stds)
    for path, std in stds.items():
        smaller = path.split('/')[-1] in ('value', 'out', 'up', 'down')
        assert std == plain[path] * (16**-0.25 if smaller else 1.0), path


@pytest.mark.full
def test_crmsnorm_stream_is_one_narrower():
    shapes = {k: v.shape for k, v in named_leaves(build_params({'model.norm': 'crmsnorm'})).items()}
    assert shapes['embedding'] == (VOCAB, 15)
    assert shapes['layers/attention/query'] == (2, 15, 2, 8)
    assert shapes['layers/attention/out'] == (2, 2, 8, 15)
    assert shapes['readout'] == (15, VOCAB)


@pytest.mark.full
def test_biases_are_added():
    """Each matrix that `bias` and `readout_bias` cover has one, and no other."""
    changes = {'model.bias': True, 'model.readout_bias': True, 'model.activation': 'swiglu'}
    params = build_params(changes)
    names = {path.split('/')[-1] for path in named_leaves(params) if path.endswith('bias')}
    matrices = ('query', 'key', 'value', 'out', 'up', 'gate', 'down', 'readout')
    assert names == {f'{name}_bias' for name in matrices}
    plain = {'model.activation': 'swiglu'}
    before = compute_logits(changes, params)
    without = {k: v for k, v in params.items() if k != 'readout_bias'}
    without['layers'] = {
        k: {n: w for n, w in v.items() if not n.endswith('_bias')}
        if k in ('mlp', 'attention')
        else v
        for k, v in params['layers'].items()
    }
    np.testing.assert_allclose(compute_logits(plain, without), before, rtol=1e-5, atol=1e-6)
    for path in (n for n in named_leaves(params) if n.endswith('bias') and 'key' not in n):
        moved = jax.tree_util.tree_map_with_path(
            lambda at, leaf, path=path: leaf + 1.0 * (path_name(at) == path), params
        )
        assert np.abs(compute_logits(changes, moved) - before).max() > 1e-3, path
