"""Residual streams and values of other layers in the whole model. Equivalence: remat, packed
documents and a cache change nothing. Property: starts that equal pre-norm, with gradients.

tests/contracts/test_attention.py trains the same rows scanned, mapped and on eight devices, and
tests/modules/test_residual.py has their equations.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from eval.convert.exportable import find_export_family
from lm.inference.blocks import iterate_blocks, select_blocks
from lm.inference.decoding import extend, init_cache
from lm.inference.probes import logit_lens, observe
from lm.training.flops import count_matmul_params, flops_per_token
from lm.training.state import Weights
from modules.params import STREAM, named_leaves
from modules.placements import PLACEMENTS
from modules.residual import STREAMS
from tests.contracts.test_attention import STREAM_ROWS
from tests.helpers import (
    VOCAB,
    assert_trees_close,
    checked_config,
    initial_state,
    tiny_batch,
    tiny_learner,
)

TOKENS = tiny_batch(rows=2)['tokens'][:, :-1]
LAYERS = {'model.n_layers': 3}
NEW = ('_stream_', 'value_share', 'value_gate', 'value_embeddings')  # in the paths of parameters
ROWS = [
    pytest.param(row, marks=() if name == 'mhc' else pytest.mark.full, id=name)
    for name, row in STREAM_ROWS.items()
]


def is_new(path):
    return any(name in path for name in NEW)


@functools.cache
def make_params(config):
    """Returns parameters in which those of the stream and the values differ from their start."""
    rng = np.random.default_rng(0)

    def perturb(path, w):
        name = jax.tree_util.keystr(path, simple=True, separator='/')
        return w + np.float32(0.3 * rng.normal(size=w.shape)) * is_new(name)

    return jax.tree_util.tree_map_with_path(perturb, initial_state(config).params)


@functools.cache
def compile_model(config, with_gradient=False):
    """Returns params, tokens, segments -> logits, or (gradient, logits)."""
    model = tiny_learner(config).model

    def logits(params, tokens, segments):
        return model.apply({'params': params}, tokens, segments)

    def weighted_sum(params, tokens, segments):
        logits_BTV = logits(params, tokens, segments)
        weights = jnp.cos(jnp.arange(logits_BTV.size, dtype=jnp.float32)).reshape(logits_BTV.shape)
        return jnp.sum(logits_BTV * weights), logits_BTV

    return jax.jit(jax.grad(weighted_sum, has_aux=True) if with_gradient else logits)


def make_weights(params):
    return Weights(params, {}, {})


@pytest.mark.full
@pytest.mark.parametrize('row', ROWS)
def test_unrolling_and_remat_keep_logits_and_gradients(row):
    config = checked_config(LAYERS | row)
    grads, logits = compile_model(config, True)(make_params(config), TOKENS, None)
    for changes in ({'model.scan_layers': False}, {'model.remat': 'full'}):
        again, same = compile_model(checked_config(LAYERS | row | changes), True)(
            make_params(config), TOKENS, None
        )
        np.testing.assert_allclose(same, logits, rtol=1e-4, atol=1e-5)
        assert_trees_close(again, grads, rtol=1e-3, atol=1e-4)


@pytest.mark.full
@pytest.mark.parametrize('row', ROWS)
def test_cache_and_packing_keep_logits(row):
    """Tokens in two parts with a cache, or in packed documents, get the logits of whole rows."""
    config = checked_config(LAYERS | row)
    learner, params = tiny_learner(config), make_params(config)
    forward = compile_model(config)
    whole = forward(params, TOKENS, None)
    variables = learner.variables(make_weights(params))
    cache, parts = init_cache(learner, variables, len(TOKENS), 8), []
    jitted = jax.jit(functools.partial(extend, learner))
    for start in (0, 4):
        logits, cache = jitted(variables, cache, TOKENS[:, start : start + 4])
        parts.append(logits)
    np.testing.assert_allclose(np.concatenate(parts, 1), whole, rtol=1e-3, atol=1e-4)
    packed = forward(params, TOKENS, np.int32([[1, 1, 1, 2, 2, 2, 2, 2]] * 2))
    np.testing.assert_allclose(packed[:, :3], whole[:, :3], rtol=1e-3, atol=1e-4)
    single = forward(params, np.roll(TOKENS, -3, axis=1), None)[:, :5]
    np.testing.assert_allclose(packed[:, 3:], single, rtol=1e-3, atol=1e-4)
    assert np.abs(packed - whole)[:, 3:].max() > 0.01


EQUAL_STARTS = {
    'x0_scalars': {'model.stream': 'x0_scalars', 'model.residual_first': 1.0}
    | {'model.residual_last': 1.0, 'model.x0_first': 0.0, 'model.x0_last': 0.0},
    'dense_former': {'model.stream': 'dense_former'},
    'hyper_connections': {'model.stream': 'hyper_connections'},
    'mhc': {'model.stream': 'mhc'},  # with scales of 0
    'value_residual': {'attention.value_residual': 'learned'},  # with shares (1, 0)
    'value_embeddings': {'attention.value_embeddings': True},  # with tables of 0
}
# Whose first gradient is 0: the products that they scale start at 0, or those of equal streams.
WITHOUT_GRADIENT = ('mix_scale', 'write_scale', 'read_scale', 'value_gate', 'stream_weights')


@pytest.mark.full
@pytest.mark.parametrize('name', EQUAL_STARTS)
def test_start_equals_pre_norm(name):
    """And the first gradient of the new parameters is not 0."""
    config, default = checked_config(LAYERS | EQUAL_STARTS[name]), checked_config(LAYERS)

    plain = named_leaves(initial_state(default).params)

    def neutral(path, w):
        path = jax.tree_util.keystr(path, simple=True, separator='/')
        if path in plain:  # another parameter may change the keys of those behind it
            return plain[path]
        if path.endswith('/value_share'):
            return np.ones_like(w)
        zeros = ('first_value_share', 'value_embeddings', *(('_scale',) if name == 'mhc' else ()))
        return 0 * w if path.endswith(zeros) else w

    params = jax.tree_util.tree_map_with_path(neutral, initial_state(config).params)
    grads, logits = compile_model(config, True)(params, TOKENS, None)
    expected = compile_model(default, True)(initial_state(default).params, TOKENS, None)[1]
    np.testing.assert_allclose(logits, expected, rtol=1e-3, atol=2e-4)
    sizes = {path: np.abs(g).max() for path, g in named_leaves(grads).items() if is_new(path)}
    assert sizes
    for path, size in sizes.items():
        assert size > 1e-4 or path.endswith(WITHOUT_GRADIENT), path


@pytest.mark.full
def test_as_many_sums_as_sublayers_equal_single_outputs():
    full = checked_config(LAYERS | {'model.stream': 'attention_residual'})
    sums = checked_config(LAYERS | {'model.stream': 'attention_residual', 'model.depth_sums': 6})
    params = make_params(full)
    np.testing.assert_array_equal(
        compile_model(sums)(params, TOKENS, None), compile_model(full)(params, TOKENS, None)
    )


@pytest.mark.parametrize('name', [name for name in STREAMS if name != 'plain'])
def test_placements_that_do_not_add_are_refused(name):
    """Every other placement works."""
    for placement, row in PLACEMENTS.items():
        changes = {'model.stream': name, 'model.placement': placement}
        if row.branch is not None:
            checked_config(changes)
            continue
        with pytest.raises(ValueError, match=f'model.stream={name} needs a placement.*pre|peri'):
            checked_config(changes)


def test_sums_must_divide_sublayers():
    with pytest.raises(
        ValueError, match=r'depth_sums must divide.*4 for 6. Choose one of 1, 2, 3, 6'
    ):
        checked_config(LAYERS | {'model.stream': 'attention_residual', 'model.depth_sums': 4})


def test_stream_parameters_are_undecayed_vectors():
    """They are in the group `stream`, but for a, which is a single number; tables are `tables`."""
    for row in STREAM_ROWS.values():
        description = tiny_learner(checked_config(LAYERS | row)).description
        specs, scalings = named_leaves(description.specs), named_leaves(description.scalings)
        for path in filter(is_new, specs):
            spec = specs[path]
            if path == 'value_embeddings':
                assert (spec.role, spec.axes[1:]) == ('embedding', ('token', 'kv_features'))
                continue
            assert spec.role == 'vector' and scalings[path].decay_factor == 0, path
            is_scalar = path.endswith(('_stream_x0', '_share'))
            assert (spec.part == STREAM) == ('_stream_' in path and not is_scalar), path


def test_value_tables_start_like_values():
    """By the fan_in of the value matrix, whatever scaling.embedding_std says. Every second block
    has a table, the last one included.
    """
    changes = {'attention.value_embeddings': True, 'model.n_layers': 4, 'model.n_kv_heads': 1}
    config = checked_config(changes | {'scaling.embedding_std': 7.0})
    table_NVE = initial_state(config).params['value_embeddings']
    assert table_NVE.shape == (2, VOCAB, 8)
    assert np.std(table_NVE) == pytest.approx(1 / 4, rel=0.1)  # D = 16


def test_flops_count_the_stream():
    """Six for each product of a token's activations; lookups and gates count none."""
    plain = tiny_learner(checked_config(LAYERS))
    mhc = tiny_learner(checked_config(LAYERS | {'model.stream': 'mhc'}))
    looked_up = tiny_learner(checked_config(LAYERS | {'attention.value_embeddings': True}))
    products = STREAMS['mhc'].products(16, 3)
    assert flops_per_token(mhc) - flops_per_token(plain) == 6 * products
    assert count_matmul_params(looked_up) == count_matmul_params(plain)


@pytest.mark.parametrize('row', [*STREAM_ROWS.values(), {'attention.value_embeddings': True}])
def test_export_and_single_blocks_refuse_streams(row):
    """Export to Hugging Face, and blocks as functions of the stream alone."""
    config = checked_config(LAYERS | {'model.activation': 'swiglu'} | row)
    field = next(path for path in ('model.stream', 'attention.value_embeddings') if path in row)
    with pytest.raises(ValueError, match=f'no family .* can represent this model.*{field}='):
        find_export_family(config)
    learner = tiny_learner(config)
    with pytest.raises(ValueError, match=f'function of the residual stream alone .*{field}'):
        next(iterate_blocks(learner, {}))


@pytest.mark.full
@pytest.mark.parametrize('row', ROWS)
def test_blocks_can_be_skipped_and_observed(row):
    """Without any block, the readout reads the embeddings alone. The last of the logit lens are the
    model's logits.
    """
    config = checked_config(LAYERS | row)
    learner, params = tiny_learner(config), make_params(config)
    logits = compile_model(config)(params, TOKENS, None)
    lens_LBTV = jax.jit(functools.partial(logit_lens, learner))(make_weights(params), TOKENS)
    np.testing.assert_allclose(lens_LBTV[-1], logits, rtol=1e-3, atol=1e-4)
    _, activations = observe(learner, make_weights(params), TOKENS)
    assert activations['after_mlp'].shape == (3, *TOKENS.shape, 16)
    variables = select_blocks(learner, learner.variables(make_weights(params)), jnp.zeros(3, bool))
    skipped = learner.model.apply(variables, TOKENS)
    x = params['embedding'][TOKENS]
    if 'model.embedding_norm' in row:
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * params['embedding_norm']['scale']
    x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + 1e-6) * params['final_norm']['scale']
    np.testing.assert_allclose(skipped, x @ params['readout'], rtol=1e-3, atol=1e-3)
