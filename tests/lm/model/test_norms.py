"""Norms in the model. Reference: which there are, and where. Equivalence: scanned blocks = unrolled
ones wherever norms sit, and placements that agree at their ends.
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


def params_of(changes=None):
    return initial_state(tiny_config(changes)).params


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
    'parallel': BOTH_IN | {'final_norm'},
    'parallel_shared': {'attention_norm_in', 'final_norm'},
    'peri': BOTH_IN | BOTH_OUT | {'final_norm'},
    'post': BOTH_OUT,
    'pre': BOTH_IN | {'final_norm'},
    'resi_dual': BOTH_OUT | {'final_norm'},
    'wide': BOTH_IN | {'final_norm'},
}


@pytest.mark.parametrize('placement', PLACEMENTS)
def test_placement_decides_which_norms_there_are(placement):
    changes = with_needs({'model.placement': placement, 'model.n_layers': 4})
    config = tiny_config(changes)
    specs = named_leaves(tiny_learner(config).description.specs)
    found = {path.split('/')[-2] for path in specs if path.endswith('scale')}
    assert found == NORMS_OF[placement]


# Blocks that know their number, and two groups of them; tests/contracts/test_norms.py has others.
@pytest.mark.full
@pytest.mark.parametrize('placement', ['layernorm_scaling', 'mix'])
def test_scan_changes_neither_logits_nor_gradients_wherever_norms_sit(placement):
    """Catches parameters or block numbers that a scan hands out in another order."""
    changes = with_needs({'model.placement': placement, 'model.n_layers': 5})
    changes['model.mix_fraction'] = 0.4 if placement == 'mix' else None
    config = tiny_config(changes)
    unrolled = tiny_config(changes | {'model.scan_layers': False})
    state = initial_state(config)
    used = tiny_learner(config).variables(state.weights)['params']
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

    return jax.jit(jax.grad(weighted, has_aux=True))


def logits_of(changes, params):
    return tiny_model(tiny_config(changes)).apply({'params': params}, TOKENS)


@pytest.mark.full
def test_first_block_of_layernorm_scaling_is_a_pre_norm_block():
    """And the second one is not: 1/sqrt(l) with l from 1."""
    for layers, equal in ((1, True), (2, False)):
        pre = {'model.n_layers': layers}
        scaled = pre | {'model.placement': 'layernorm_scaling'}
        params = params_of(pre)
        same = np.array_equal(logits_of(pre, params), logits_of(scaled, params))
        assert same == equal


@pytest.mark.full
def test_an_option_behind_a_name_is_of_that_place_alone():
    """And comes before that of the section, which the other norms have."""
    found = params_of({'model.qk_norm': 'rmsnorm:scale=False', 'norm.scale': True})
    assert not [path for path in named_leaves(found) if 'query_norm' in path]
    assert 'scale' in found['final_norm']
    found = params_of({'model.qk_norm': 'rmsnorm:scale=True', 'norm.scale': False})
    assert [path for path in named_leaves(found) if 'query_norm/scale' in path]
    assert 'final_norm' not in found


@pytest.mark.full
def test_blocks_are_numbered_through_all_groups(monkeypatch):
    """Cut into groups of 1 and 3, layernorm_scaling is what it was: catches numbers that start
    again in the second group.
    """
    changes = {'model.placement': 'layernorm_scaling', 'model.n_layers': 4}
    params = params_of(changes)
    whole = logits_of(changes, params)
    row = PLACEMENTS['layernorm_scaling']
    (group,) = row.blocks(4)
    cut = [group._replace(name='lower', count=1), group._replace(name='upper', count=3)]
    monkeypatch.setitem(
        PLACEMENTS, 'layernorm_scaling', dataclasses.replace(row, blocks=lambda *_: cut)
    )
    lower = jax.tree.map(lambda w: w[:1], params['layers'])
    upper = jax.tree.map(lambda w: w[1:], params['layers'])
    outside = {name: value for name, value in params.items() if name != 'layers'}
    again = logits_of(changes, outside | {'lower': lower, 'upper': upper})
    np.testing.assert_allclose(again, whole, rtol=1e-4, atol=1e-5)


@pytest.mark.full
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


@pytest.mark.full
def test_embedding_and_final_norm_are_options():
    """Catches a norm that is made and not applied, or applied elsewhere."""
    params = params_of({'model.embedding_norm': 'rmsnorm'})
    assert 'embedding_norm' in params
    louder = params | {'embedding': 7 * params['embedding']}
    changes = {'model.embedding_norm': 'rmsnorm', 'norm.eps': 0.0}
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


@pytest.mark.full
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
    stds = named_leaves(tiny_learner(config).description.init_stds)
    plain = named_leaves(tiny_learner(tiny_config()).description.init_stds)
    for path, std in stds.items():
        smaller = path.split('/')[-1] in ('value', 'out', 'up', 'down')
        assert std == plain[path] * (16**-0.25 if smaller else 1.0), path


@pytest.mark.full
def test_crmsnorm_streams_one_coordinate_less():
    shapes = {k: v.shape for k, v in named_leaves(params_of({'model.norm': 'crmsnorm'})).items()}
    assert shapes['embedding'] == (VOCAB, 15)
    assert shapes['layers/attention/query'] == (2, 15, 2, 8)
    assert shapes['layers/attention/out'] == (2, 2, 8, 15)
    assert shapes['readout'] == (15, VOCAB)


@pytest.mark.full
def test_biases_are_added():
    """One behind each matrix that `bias` and `readout_bias` stand for, none elsewhere."""
    changes = {'model.bias': True, 'model.readout_bias': True, 'model.activation': 'swiglu'}
    params = params_of(changes)
    names = {path.split('/')[-1] for path in named_leaves(params) if path.endswith('bias')}
    matrices = ('query', 'key', 'value', 'out', 'up', 'gate', 'down', 'readout')
    assert names == {f'{name}_bias' for name in matrices}
    plain = {'model.activation': 'swiglu'}
    before = logits_of(changes, params)
    without = {k: v for k, v in params.items() if k != 'readout_bias'}
    without['layers'] = {
        k: {n: w for n, w in v.items() if not n.endswith('_bias')}
        if k in ('mlp', 'attention')
        else v
        for k, v in params['layers'].items()
    }
    np.testing.assert_allclose(logits_of(plain, without), before, rtol=1e-5, atol=1e-6)
    for path in (n for n in named_leaves(params) if n.endswith('bias') and 'key' not in n):
        moved = jax.tree_util.tree_map_with_path(
            lambda at, leaf, path=path: leaf + 1.0 * (path_name(at) == path), params
        )
        assert np.abs(logits_of(changes, moved) - before).max() > 1e-3, path
