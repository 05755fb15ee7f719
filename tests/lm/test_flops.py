"""Reference: operations counted by hand, against the parameters there are and against XLA."""

import math

import jax
import numpy as np
import pytest

from lm.flops import flops_per_token, gemm_flops, matmul_params, peak_flops
from lm.state import describe_params
from modules.params import named_leaves
from tests.helpers import VOCAB, tiny_config, tiny_model

CASES = [
    {},
    {'model.activation': 'swiglu'},
    {'model.n_heads': 4, 'model.n_kv_heads': 1, 'model.n_layers': 3},
    {'model.position': 'learned', 'model.norm': 'layernorm', 'model.qk_norm': 'rmsnorm'},
    {'model.activation': 'geglu', 'model.n_kv_heads': 1, 'model.d_ff': 40},
    {'model.norm': 'crmsnorm'},
]


@pytest.mark.parametrize('changes', CASES, ids=str)
def test_matmul_params_are_the_matrices_of_the_model(changes):
    """Every hidden matrix and the readout. Catches a gate, or grouped heads, not counted."""
    config = tiny_config(changes)
    described = describe_params(config, tiny_model(config))
    shapes = named_leaves(described.shapes)
    counted = sum(
        math.prod(shapes[path].shape)
        for path, spec in named_leaves(described.specs).items()
        if spec.role in ('hidden', 'readout')
    )
    assert matmul_params(config.model, VOCAB) == counted
    tied = tiny_config(changes | {'model.tie_embeddings': True})
    assert matmul_params(tied.model, VOCAB) == counted  # the table multiplies too


def test_of_experts_those_that_a_token_goes_through_count():
    """Two of four at 16 x 32 x 2, and a router of 16 x 4; shared matrices in each of two blocks."""
    dense, shared = tiny_config(), tiny_config({'model.placement': 'wide'})
    more = matmul_params(shared.model, VOCAB) - matmul_params(dense.model, VOCAB)
    assert more == 2 * (16 * 32 * 2 + 16 * 4)
    assert matmul_params(tiny_config({'model.mlp': 'moe'}).model, VOCAB) == matmul_params(
        shared.model, VOCAB
    )


def test_flops_per_token_by_hand():
    """6 N + 6 L T D: width 16, 2 layers, ff 32, vocabulary 16, 8 tokens."""
    n = 2 * (4 * 16 * 16 + 2 * 16 * 32) + 16 * 16
    assert flops_per_token(tiny_config().model, VOCAB, 8) == 6 * n + 6 * 2 * 8 * 16


def test_forward_flops_are_near_those_xla_counts():
    """A third of the step's, with all pairs in the attention since `plain` computes them."""
    config = tiny_config(
        {
            'model.d_model': 64,
            'model.d_ff': 256,
            'model.scan_layers': False,
            'data.seq_len': 32,
            'kernels.implementation': 'reference',
        }
    )
    model = tiny_model(config)
    params = describe_params(config, model).shapes
    tokens = jax.ShapeDtypeStruct((2, 32), np.int32)
    lowered = jax.jit(lambda p, t: model.apply({'params': p}, t)).lower(params, tokens)
    counted = lowered.cost_analysis()['flops'] / tokens.size
    upper_half = 2 * config.model.n_layers * 32 * 64
    ours = flops_per_token(config.model, VOCAB, 32) / 3 + upper_half
    assert 1 < counted / ours < 1.15  # XLA counts norms, softmax and GELU too


def test_measured_peak():
    """On a CPU, of the whole machine once, not once a device."""
    rate = gemm_flops(size=64, repeats=3)
    assert 0 < rate < 1e15
    flops, source = peak_flops(8)
    assert source == 'measured float32 2048^3 product'
    assert 0 < flops < 1e15
