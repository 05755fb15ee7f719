"""Reference: operations counted by hand, against the parameters and against XLA."""

import dataclasses
import functools
import math
import unittest.mock

import jax
import numpy as np
import pytest

from lm.run.tables import parameter_count
from lm.training.flops import (
    attention_flops,
    count_by_use,
    count_matmul_params,
    flops_in_full,
    flops_per_token,
)
from modules.attention import ATTENTIONS
from modules.kernels.recurrence.chunked import chunked_recurrence
from modules.params import ParamSpec, named_leaves
from tests.helpers import tiny_config, tiny_learner

CASES = [
    {},
    {'model.activation': 'swiglu'},
    {'model.n_heads': 4, 'model.n_kv_heads': 1, 'model.n_layers': 3},
    {'model.position': 'learned', 'model.norm': 'layernorm', 'model.qk_norm': 'rmsnorm'},
    {'model.activation': 'geglu', 'model.n_kv_heads': 1, 'model.d_ff': 40},
    {'model.norm': 'crmsnorm'},
    {'model.norm': 'gated_rmsnorm', 'model.head_dim': 12},
    {'model.reparam': 'weight_norm'},
]


def count_params(changes):
    """Counts the matmul parameters of the configured model."""
    return count_matmul_params(tiny_learner(tiny_config(changes)))


@pytest.mark.parametrize('changes', CASES, ids=str)
def test_matmul_params_are_the_matrices(changes):
    """All parameters with two sides, except tables.

    Catches a missing gate, grouped heads or norm matrices, and a matrix counted by its stored
    parts.
    """
    description = tiny_learner(tiny_config(changes | {'model.reparam': 'none'})).description
    shapes = named_leaves(description.shapes)
    expected = sum(
        math.prod(shapes[path].shape)
        for path, spec in named_leaves(description.specs).items()
        if spec.role in ('hidden', 'readout')
    )
    assert count_params(changes) == expected
    assert (
        count_params(changes | {'model.tie_embeddings': True}) == expected
    )  # the table multiplies too


def test_gated_norms_are_counted():
    """Two of 16 x 16 x 2 in each of two blocks, and a final one."""
    assert count_params({'model.norm': 'gated_rmsnorm'}) - count_params({}) == 5 * 16 * 16 * 2


@pytest.mark.parametrize(('n_experts', 'per_token'), [(4, 2), (3, 1)])
def test_only_active_experts_are_counted(n_experts, per_token):
    """16 x 32 x 2 each, and all of a router of 16 x E; shared matrices count in each of two
    blocks.
    """
    experts = {'mlp.n_experts': n_experts, 'mlp.experts_per_token': per_token}
    expected = 2 * ((per_token - 1) * 16 * 32 * 2 + 16 * n_experts)
    for changes in ({'model.placement': 'wide'}, {'model.mlp': 'moe'}):
        assert count_params(changes | experts) - count_params({}) == expected


def test_shared_and_fine_experts_are_counted():
    """With granularity k + shared, a token passes through as many weights as in a dense MLP,
    besides the router; ragged products change nothing. Catches shared experts that count k times.
    """
    experts = {'model.mlp': 'moe', 'mlp.n_experts': 8, 'mlp.experts_per_token': 3}
    experts |= {'mlp.shared_experts': 1, 'mlp.granularity': 4}
    for dispatch in ('capacity', 'ragged'):
        count = count_params(experts | {'mlp.dispatch': dispatch})
        assert count - count_params({}) == 2 * 16 * 8


def test_flops_per_token_by_hand():
    """6 N + 6 L T D: width 16, 2 layers, 8 tokens, a matrix of 16 x 5 in each layer."""
    specs = {'w': ParamSpec('hidden', ('layer', 'embed', 'mlp'), ('embed',))}
    shapes = {'w': jax.ShapeDtypeStruct((2, 16, 5), np.float32)}
    specs['scale'] = ParamSpec('vector', ('embed',))
    shapes['scale'] = jax.ShapeDtypeStruct((16,), np.float32)
    learner = tiny_learner(tiny_config())
    used = dataclasses.replace(learner.description, used_specs=specs, used_shapes=shapes)
    learner = dataclasses.replace(learner, description=used)
    assert flops_per_token(learner) == 6 * 2 * 16 * 5 + 6 * 2 * 8 * 16
    assert flops_in_full(learner) == 6 * 2 * 16 * 5 + 12 * 2 * 8 * 16


SIZES = {'model.d_model': 16, 'model.n_heads': 2, 'model.n_layers': 5, 'data.seq_len': 64}


def count_pairs(length, window):
    """Returns the number of keys that all queries of a row see; the diagonal counts half."""
    positions = np.arange(length) + 0.5
    return np.sum(np.minimum(positions, window))


@pytest.mark.parametrize(
    ('changes', 'windows'),
    [
        ({'model.d_model': 24, 'model.head_dim': 8}, [64] * 5),
        ({'attention.window': 64}, [64] * 5),
        ({'attention.window': 100, 'attention.full_every': 2}, [64] * 5),
        ({'attention.window': 16}, [16] * 5),
        ({'attention.window': 16, 'attention.full_every': 2}, [16, 64, 16, 64, 16]),
        ({'attention.window': 16, 'attention.full_every': 6}, [16] * 5),
        (
            {'attention.window': 16, 'attention.full_every': 2, 'attention.full_at': 1},
            [64, 16, 64, 16, 64],
        ),
        ({'model.attention': 'l2', 'attention.window': 16}, [16] * 5),
    ],
    ids=str,
)
def test_window_attention_counts_pairs_within(changes, windows):
    """12 N H per pair, pair by pair; in_full counts all pairs.

    Catches the width of the model instead of the heads', full layers counted as windowed, and rows
    shorter than the window.
    """
    n_pairs = sum(count_pairs(64, window) for window in windows)
    count_params = attention_flops(tiny_config(SIZES | changes)) * 64
    np.testing.assert_allclose(count_params, 12 * 16 * n_pairs, rtol=1e-9)
    in_full = attention_flops(tiny_config(SIZES | changes), in_full=True)
    assert in_full == 12 * 16 * 64 * 5


@pytest.mark.parametrize(('name', 'features'), [('linear', 8), ('nala', 16)])
@pytest.mark.parametrize('length', [64, 128])
def test_linear_attention_counts_state_not_pairs(name, features, length):
    """For each of 2 heads of width 8: 2 F H to add to the state and 2 F H to read it, forward;
    three times that with the backward pass, for any length.
    """
    config = tiny_config(SIZES | {'model.attention': name, 'data.seq_len': length})
    assert attention_flops(config) == 3 * 5 * 2 * (2 * features * 8 + 2 * features * 8)
    assert attention_flops(config, in_full=True) == attention_flops(config)


@pytest.mark.parametrize(('name', 'products'), [('gla', 2), ('gated_delta', 3)])
@pytest.mark.parametrize('expand_value', [1, 3])
def test_recurrence_counts_its_state(name, products, expand_value):
    """For each of 2 heads of width 8: 2 K V to write k v^T, 2 K V to read the output and, with the
    delta rule, 2 K V to read the value that is replaced, forward; three times that in all.
    """
    config = tiny_config(SIZES | {'model.attention': name, 'attention.expand_value': expand_value})
    assert attention_flops(config) == 3 * 5 * 2 * products * 2 * 8 * 8 * expand_value


@pytest.mark.full
@pytest.mark.parametrize('name', ['gla', 'gated_delta'])
def test_chunked_recurrence_is_close_to_xla(name):
    """Of `attended_tokens_unmasked`, forward. Catches a product that is not counted; XLA counts
    masks, exponentials and copies too, and no triangular solver on CPUs.
    """
    heads, length, key_dim, value_dim = 2, 256, 64, 128
    wide, numbers = (1, heads, length, key_dim), (1, heads, length)
    shapes = [wide, wide, (*wide[:3], value_dim), numbers, *([numbers] * (name == 'gated_delta'))]
    arrays = [jax.ShapeDtypeStruct(shape, np.float32) for shape in shapes]

    def unroll_scan(*arrays):  # XLA counts the body of a scan once
        scan = functools.partial(jax.lax.scan, unroll=True)
        with unittest.mock.patch.object(jax.lax, 'scan', scan):
            return chunked_recurrence(*arrays)

    counted = jax.jit(unroll_scan).lower(*arrays).cost_analysis()['flops']
    row = ATTENTIONS[name]
    pairs = row.attended_tokens_unmasked(length, key_dim, 1, expand_value=2)
    ours = 4 * key_dim * heads * length * pairs
    if name == 'gated_delta':
        ours -= heads * length * 64 * (key_dim + value_dim)
    assert 1 < counted / ours < 1.15


def test_forward_flops_are_close_to_xla():
    """A third of the step's, plus all pairs in attention, as `reference` computes them."""
    config = tiny_config(
        {
            'model.d_model': 64,
            'model.d_ff': 256,
            'model.scan_layers': False,
            'data.seq_len': 32,
            'kernels.implementation': 'reference',
        }
    )
    learner = tiny_learner(config)
    model, description = learner.model, learner.description
    tokens = jax.ShapeDtypeStruct((2, 32), np.int32)
    lowered = jax.jit(lambda params, tokens_arg: model.apply({'params': params}, tokens_arg)).lower(
        description.shapes, tokens
    )
    count_params = lowered.cost_analysis()['flops'] / tokens.size
    upper_half = 2 * config.model.n_layers * 32 * 64
    ours = flops_per_token(learner) / 3 + upper_half
    assert 1 < count_params / ours < 1.15  # XLA counts norms, softmax and GELU too


@pytest.mark.parametrize(
    ('changes', 'lookup'),
    [
        ({}, 16 * 16),
        ({'model.tie_embeddings': True}, 0),
        ({'model.position': 'learned'}, 16 * 16 + 8 * 16),
    ],
)
def test_parameters_are_counted_by_use(changes, lookup):
    """Tables that are only looked up cost no products. The counts add up to all parameters."""
    learner = tiny_learner(tiny_config(changes))
    counts = count_by_use(learner)
    assert counts['lookup'] == lookup and counts['matmul'] == count_matmul_params(learner)
    assert sum(counts.values()) == parameter_count(learner)
