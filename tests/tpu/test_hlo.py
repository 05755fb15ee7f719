"""Reference: programs parsed from text, against their known operations."""

import jax
import jax.numpy as jnp
import pytest

from tpu.cost import _count_valid_taps, count_launches, estimate_cost
from tpu.hlo import Module

N = 64
SECOND = 1.0  # flop/s and bytes a second

LOOP = """HloModule step, is_scheduled=true

%condition (state: (s32[], f32[8])) -> pred[] {
  %limit = s32[]{:T(128)} constant(7)
  %state = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  %count = s32[]{:T(128)} get-tuple-element(%state), index=0
  ROOT %less = pred[]{:T(512)} compare(%count, %limit), direction=LT
}

%body (state.1: (s32[], f32[8])) -> (s32[], f32[8]) {
  %state.1 = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  %count.1 = s32[]{:T(128)S(6)} get-tuple-element(%state.1), index=0
  %x = f32[8]{0:T(256)S(1)} get-tuple-element(%state.1), index=1
  %one = s32[]{:T(128)S(6)} constant(1)
  %more = s32[]{:T(128)S(6)} add(%count.1, %one)
  %kernel = f32[8]{0:T(256)} custom-call(%x), custom_call_target="tpu_custom_call", frontend_attributes={metadata={"a
"b": 1
}}, backend_config={"custom_call_config":{"cost_estimate":{"flops":"11","bytes_accessed":"5"}}}
  %mystery = f32[8]{0:T(256)} custom-call(%kernel), custom_call_target="tpu_custom_call"
  ROOT %next = (s32[]{:T(128)}, /*index=1*/f32[8]{0:T(256)}) tuple(%more, %mystery)
}

ENTRY %main (start: (s32[], f32[8])) -> (s32[], f32[8]) {
  %start = (s32[]{:T(128)}, f32[8]{0:T(256)}) parameter(0)
  ROOT %loop = (s32[]{:T(128)}, f32[8]{0:T(256)}) while(%start), condition=%condition, body=%body
}
"""  # noqa: E501

# libtpu's text for a product of 32 matrices, 128 x 64 and 64 x 128, in one fusion.
PRODUCTS = """HloModule step

%fused (q: f32[32,128,64], k: f32[32,128,64]) -> f32[32,128,128] {
  %q = f32[32,128,64]{2,1,0} parameter(0)
  %k = f32[32,128,64]{2,1,0} parameter(1)
  ROOT %convolution.1 = f32[32,128,128]{2,1,0} convolution(%q, %k), window={size=32 stride=31 lhs_dilate=32}, dim_labels=0bf_0oi->0bf
}

ENTRY %main (a: f32[32,128,64], b: f32[32,128,64]) -> f32[32,128,128] {
  %a = f32[32,128,64]{2,1,0} parameter(0)
  %b = f32[32,128,64]{2,1,0} parameter(1)
  ROOT %fusion = f32[32,128,128]{2,1,0} fusion(%a, %b), kind=kOutput, calls=%fused
}
"""  # noqa: E501

SPLASH = """HloModule step

ENTRY %main (a: bf16[2,4,1024,128], b: bf16[2,2,1024,128]) -> bf16[2,4,1024,128] {
  %next = s8[1,2,2]{2,1,0} parameter(2)
  %a = bf16[2,4,1024,128]{3,2,1,0} parameter(0)
  %b = bf16[2,2,1024,128]{3,2,1,0} parameter(1)
  ROOT %splash_mha_dq_no_residuals.1 = bf16[2,4,1024,128]{3,2,1,0} custom-call(%next, %a, %b), custom_call_target="tpu_custom_call"
}
"""  # noqa: E501


# XLA's text for a layer's slice of stacked weights on a GPU.
BESIDE = """HloModule step

%fused (p: f32[12,64], i: s32[]) -> f32[1,64] {
  %p = f32[12,64]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %zero = s32[] constant(0)
  ROOT %slice = f32[1,64]{1,0} dynamic-slice(%p, %i, %zero), dynamic_slice_sizes={1,64}
}

ENTRY %main (p.1: f32[12,64], i.1: s32[]) -> f32[1,64] {
  %p.1 = f32[12,64]{1,0} parameter(0)
  %i.1 = s32[] parameter(1)
  %fusion-start = ((f32[12,64]{1,0}, s32[]), f32[1,64]{1,0}, u32[]) fusion-start(%p.1, %i.1), kind=kLoop, calls=%fused
  ROOT %fusion-done = f32[1,64]{1,0} fusion-done(%fusion-start)
}
"""  # noqa: E501

# XLA's text for attention on 2 rows of 128 tokens, 4 heads of 64.
CUDNN = """HloModule step

ENTRY %main (q: bf16[2,128,4,64]) -> bf16[2,4,128,64] {
  %q = bf16[2,128,4,64]{3,2,1,0} parameter(0)
  ROOT %attention = bf16[2,4,128,64]{3,1,2,0} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "128", "128"], "tuple_shapes": []}, "mask_type": "CAUSAL", "sliding_window_length": 0}}
}
"""  # noqa: E501


def compile_module(function, *shapes):
    arguments = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(function).lower(*arguments).compile()
    return Module(compiled.as_text()), compiled


def test_loop_products_count_every_round():
    """Catches missing rounds: XLA's own sum counts the body once."""

    def many(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    module, compiled = compile_module(many, (N, N), (5, N, N))
    assert estimate_cost(module, SECOND, SECOND).flops == 5 * 2 * N**3
    assert compiled.cost_analysis()['flops'] < 2 * 2 * N**3
    assert not module.unknown_loops


def test_most_expensive_branch_counts():
    """The branch contains a loop. Catches layers with and without a window that both count in one
    place.
    """

    def switch(is_long, x, w):
        def repeat(n):
            return lambda: jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)

        return jax.lax.switch(is_long.astype(int), [repeat(3), lambda: x, repeat(7), repeat(2)])

    module, _ = compile_module(switch, (), (N, N), (N, N))
    assert estimate_cost(module, SECOND, SECOND).flops == 7 * 2 * N**3


def triangle(x, w):
    return jax.lax.fori_loop(0, 6, lambda i, x: jax.lax.fori_loop(0, i, multiply(w), x), x)


def window_limits(x, w):
    def outer(i, x):
        return jax.lax.fori_loop(jnp.maximum((i * 8 - 20) // 8, 0), i, multiply(w), x)

    return jax.lax.fori_loop(0, 6, outer, x)


def list_limits(x, w):
    limits = jax.lax.fori_loop(0, 6, lambda i, filled: filled.at[i].set(2 * i), jnp.zeros(6, int))
    return jax.lax.scan(lambda x, n: (jax.lax.fori_loop(0, n, multiply(w), x), None), x, limits)[0]


def given_limit(x, w, n):
    return jax.lax.fori_loop(0, n.astype(int), multiply(w), x)


def outer_limit(x, w):
    def outer(i, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jax.lax.fori_loop(0, i, multiply(w), x), x)

    return jax.lax.fori_loop(0, 6, outer, x)


def multiply(w):
    return lambda _, x: jnp.tanh(x @ w)


@pytest.mark.parametrize(
    ('function', 'products'),
    [
        (triangle, 0 + 1 + 2 + 3 + 4 + 5),
        (window_limits, 0 + 1 + 2 + 3 + 3 + 3),
        (list_limits, 2 * 15),
    ],
)
def test_limit_counted_by_outer_loop_is_evaluated(function, products):
    """An example are tiles of keys before a tile of queries.

    Catches the first round's limit used for all, a start that is not subtracted, and a list of
    limits that an earlier loop has filled.
    """
    module, _ = compile_module(function, (N, N), (N, N))
    assert not module.unknown_loops
    assert estimate_cost(module, SECOND, SECOND).flops == products * 2 * N**3


@pytest.mark.parametrize(('function', 'shapes'), [(given_limit, [()]), (outer_limit, [])])
def test_unknown_limit_is_reported(function, shapes):
    """A limit that is an argument, and a limit that changes two loops further out, where it is 0 in
    the first round.
    """
    module, _ = compile_module(function, (N, N), (N, N), *shapes)
    assert len(module.unknown_loops) == 1
    assert set(module.unknown_loops) <= set(estimate_cost(module, SECOND, SECOND).unknown)


def test_asynchronous_fusion_counts_once():
    """Catches operands, which it also returns, counted as written."""
    cost = estimate_cost(Module(BESIDE), SECOND, SECOND)
    assert cost.bytes == 2 * 64 * 4 + 4  # the slice read and written, the place read
    assert count_launches(Module(BESIDE)) == 1


@pytest.mark.parametrize(
    ('changes', 'products', 'pairs'),
    [
        ({}, 2, 128 * 129 / 2),
        ({'CAUSAL': 'PADDING_CAUSAL', 'fmhaSoftmax': 'fmhaScaleBiasSoftmax'}, 2, 128 * 129 / 2),
        ({'fmhaSoftmax': 'fmhaSoftmaxBackward'}, 5, 128 * 129 / 2),
        ({'fmhaSoftmax': 'fmhaSoftmaxBackwardF8', 'CAUSAL': 'NO_MASK'}, 5, 128 * 128),
        ({'length": 0': 'length": 16'}, 2, 16 * 17 / 2 + 112 * 16),
    ],
    ids=str,
)
def test_cudnn_attention_counts_unmasked_pairs(changes, products, pairs):
    text = CUDNN
    for original, replacement in changes.items():
        text = text.replace(original, replacement)
    cost = estimate_cost(Module(text), SECOND, SECOND)
    assert cost.flops == 2 * products * 2 * 4 * pairs * 64
    assert not cost.unknown


def test_tpu_loop_rounds_are_in_its_condition():
    module = Module(LOOP)
    assert module.rounds == {'main': 1, 'body': 7}
    assert not module.unknown_loops


def test_loop_with_step_2_runs_half_as_often():
    """The compiler writes this for products that overlap with communication."""
    module = Module(LOOP.replace('constant(1)', 'constant(2)'))
    assert module.rounds == {'main': 1, 'body': 4}


def test_peeled_loop_runs_once_less():
    """The compiler does this to overlap communication with the next round."""
    peeled = '%first = s32[]{:T(128)} constant(1)\n  %count.2 = s32[]{:T(128)} copy(%first)\n'
    peeled += '  %given = (s32[]{:T(128)}, f32[8]{0:T(256)}) tuple(%count.2, %start)\n  ROOT %loop'
    module = Module(LOOP.replace('ROOT %loop', peeled).replace('while(%start)', 'while(%given)'))
    assert module.rounds == {'main': 1, 'body': 6}


@pytest.mark.parametrize(
    'text, replacement',
    [('constant(7)', 'parameter(1)'), ('tuple(%more', 'tuple(%count.1')],
    ids=['limit', 'count'],
)
def test_loop_with_unknown_rounds_is_named(text, replacement):
    module = Module(LOOP.replace(text, replacement))
    assert module.unknown_loops == ['loop']
    assert module.rounds['body'] == 1


def test_kernel_without_cost_estimate_is_named():
    """A kernel's estimate may contain line breaks and closing braces."""
    cost = estimate_cost(Module(LOOP), SECOND, SECOND)
    assert cost.flops == 7 * 11
    assert cost.unknown == ('mystery',)


def test_fast_memory_does_not_count():
    """The first kernel's result and both arrays of the second count, 32 bytes each; an operand in a
    TPU's fast memory does not.
    """
    assert estimate_cost(Module(LOOP), SECOND, SECOND).bytes == 7 * 3 * 32


def test_tpu_batched_products_count_valid_taps():
    assert estimate_cost(Module(PRODUCTS), SECOND, SECOND).flops == 2 * 32 * 128 * 128 * 64


@pytest.mark.parametrize(
    'n_in, window',
    [
        (9, {'size': 3, 'stride': 1, 'pad': (0, 0)}),
        (9, {'size': 4, 'stride': 2, 'pad': (3, 1)}),
        (5, {'size': 3, 'stride': 2, 'pad': (4, 4), 'lhs_dilate': 3}),
        (11, {'size': 3, 'stride': 1, 'pad': (1, 2), 'rhs_dilate': 2}),
    ],
    ids=str,
)
def test_valid_taps_match_convolution(n_in, window):
    """A convolution of ones counts the elements that each position meets."""
    ones = jax.lax.conv_general_dilated(
        jnp.ones((1, 1, n_in)),
        jnp.ones((1, 1, window['size'])),
        (window['stride'],),
        [window['pad']],
        (window.get('lhs_dilate', 1),),
        (window.get('rhs_dilate', 1),),
    )
    fields = {name: str(value) for name, value in window.items()}
    fields['pad'] = '{}_{}'.format(*window['pad'])
    assert _count_valid_taps(ones.shape[-1], n_in, fields, 0) == int(ones.sum())


def test_splash_attention_counts_computed_blocks():
    """Three products of [1024, 128] and [128, 1024] for each of 4 heads and 2 rows; four for the
    gradients of keys and values, and five if the gradient of queries is computed too.
    """
    product_flops = 0.75 * 2 * (2 * 4) * 1024 * 1024 * 128
    array = 'bf16[2,4,1024,128]{3,2,1,0}'
    for phase, arrays, products in (('dq', 1, 3), ('dkv', 2, 4), ('dkv', 3, 5)):
        result_text = array if arrays == 1 else f'({", ".join([array] * arrays)})'
        text = SPLASH.replace(f'.1 = {array}', f'.1 = {result_text}').replace('_dq_', f'_{phase}_')
        cost = estimate_cost(Module(text), SECOND, SECOND, pair_share=0.75)
        assert cost.flops == products * product_flops and not cost.unknown


def test_only_operand_slices_are_read():
    """Catches a layer's weights counted as all layers' weights."""

    def multiply_layers(x, ws):
        return jax.lax.fori_loop(0, 8, lambda i, x: x * ws[i], x)

    module, _ = compile_module(multiply_layers, (N, N), (8, N, N))
    n_bytes = estimate_cost(module, SECOND, SECOND).bytes
    layer_bytes = 4 * N * N
    assert 8 * 3 * layer_bytes <= n_bytes < 8 * 3 * layer_bytes + 8 * layer_bytes


# libtpu's text for an operand that passes through a nested fusion which only changes its shape.
NESTED = """HloModule step

%shaped (w: f32[8,512]) -> f32[4096] {
  %w = f32[8,512]{1,0} parameter(0)
  ROOT %flat = f32[4096]{0} bitcast(%w)
}

%fused (x: f32[8,512], i: s32[]) -> f32[SIZE] {
  %x = f32[8,512]{1,0} parameter(0)
  %i = s32[] parameter(1)
  %whole = f32[4096]{0} fusion(%x), kind=kLoop, calls=%shaped
  ROOT %result = f32[SIZE]{0} USE
}

ENTRY %main (a: f32[8,512], k: s32[]) -> f32[SIZE] {
  %a = f32[8,512]{1,0} parameter(0)
  %k = s32[] parameter(1)
  ROOT %fusion = f32[SIZE]{0} fusion(%a, %k), kind=kLoop, calls=%fused
}
"""


@pytest.mark.parametrize(
    ('size', 'use', 'n_read'),
    [
        (4096, 'negate(%whole)', 4096),
        (512, 'dynamic-slice(%whole, %i), dynamic_slice_sizes={512}', 512),
        (4096, 'bitcast(%whole)', 4096),
    ],
)
def test_nested_fusion_reads_its_operand(size, use, n_read):
    """Catches an operand counted as not read, because the nested fusion itself reads nothing."""
    text = NESTED.replace('SIZE', str(size)).replace('USE', use)
    index = 4 if 'slice' in use else 0
    assert estimate_cost(Module(text), SECOND, SECOND).bytes == 4 * (n_read + size) + index


def test_seconds_take_slower_resource_per_operation():
    def two(x, w, y):
        return x @ w, y + 1.0

    shapes = (N, N), (N, N), (N, N, N)
    module, _ = compile_module(two, *shapes)
    flops, array = 2 * N**3, 4 * N * N
    rate, bandwidth = flops / 5.0, 2 * N * array / 3.0  # the product 5 s, the sum 3 s
    cost = estimate_cost(module, rate, bandwidth)
    assert cost.seconds == pytest.approx(5.0 + 3.0, rel=0.02)
