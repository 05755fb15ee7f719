"""Reference: programs that are read from their text, against what they are known to compute."""

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

# As libtpu writes a product of 32 matrices, 128 x 64 and 64 x 128, in one fusion.
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


# As XLA writes a slice that a layer takes of stacked weights on a GPU.
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

# As XLA writes 2 rows of 128 tokens, 4 heads of 64.
CUDNN = """HloModule step

ENTRY %main (q: bf16[2,128,4,64]) -> bf16[2,4,128,64] {
  %q = bf16[2,128,4,64]{3,2,1,0} parameter(0)
  ROOT %attention = bf16[2,4,128,64]{3,1,2,0} custom-call(%q, %q, %q), custom_call_target="__cudnn$fmhaSoftmax", backend_config={"cudnn_fmha_backend_config": {"intermediate_tensor_shape": {"element_type": "BF16", "dimensions": ["2", "4", "128", "128"], "tuple_shapes": []}, "mask_type": "CAUSAL", "sliding_window_length": 0}}
}
"""  # noqa: E501


def module_of(function, *shapes):
    given = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    compiled = jax.jit(function).lower(*given).compile()
    return Module(compiled.as_text()), compiled


def test_products_in_a_loop_count_as_often_as_it_runs():
    """Catches rounds that are not read: XLA's own sum has the body once."""

    def many(x, ws):
        return jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, ws)[0]

    module, compiled = module_of(many, (N, N), (5, N, N))
    assert estimate_cost(module, SECOND, SECOND).flops == 5 * 2 * N**3
    assert compiled.cost_analysis()['flops'] < 2 * 2 * N**3
    assert not module.unknown_loops


def test_of_the_branches_of_a_conditional_the_dearest_counts():
    """With the loop in it. Catches layers with a window and without, of which each is one, that
    count as both.
    """

    def either(is_long, x, w):
        def times(n):
            return lambda: jax.lax.fori_loop(0, n, lambda _, x: jnp.tanh(x @ w), x)

        return jax.lax.switch(is_long.astype(int), [times(3), lambda: x, times(7), times(2)])

    module, _ = module_of(either, (), (N, N), (N, N))
    assert estimate_cost(module, SECOND, SECOND).flops == 7 * 2 * N**3


def triangle(x, w):
    return jax.lax.fori_loop(0, 6, lambda i, x: jax.lax.fori_loop(0, i, times(w), x), x)


def windowed(x, w):
    def outer(i, x):
        return jax.lax.fori_loop(jnp.maximum((i * 8 - 20) // 8, 0), i, times(w), x)

    return jax.lax.fori_loop(0, 6, outer, x)


def listed(x, w):
    limits = jax.lax.fori_loop(0, 6, lambda i, out: out.at[i].set(2 * i), jnp.zeros(6, int))
    return jax.lax.scan(lambda x, n: (jax.lax.fori_loop(0, n, times(w), x), None), x, limits)[0]


def given(x, w, n):
    return jax.lax.fori_loop(0, n.astype(int), times(w), x)


def deeper(x, w):
    def outer(i, x):
        return jax.lax.fori_loop(0, 3, lambda _, x: jax.lax.fori_loop(0, i, times(w), x), x)

    return jax.lax.fori_loop(0, 6, outer, x)


def times(w):
    return lambda _, x: jnp.tanh(x @ w)


@pytest.mark.parametrize(
    ('function', 'products'),
    [(triangle, 0 + 1 + 2 + 3 + 4 + 5), (windowed, 0 + 1 + 2 + 3 + 3 + 3), (listed, 2 * 15)],
)
def test_a_loop_whose_limit_the_loop_around_it_counts(function, products):
    """Tiles of keys before a tile of queries are such. Catches the limit of the first round for
    that of all, a start that is not taken off, and a list of limits that a loop before has filled.
    """
    module, _ = module_of(function, (N, N), (N, N))
    assert not module.unknown_loops
    assert estimate_cost(module, SECOND, SECOND).flops == products * 2 * N**3


@pytest.mark.parametrize(('function', 'shapes'), [(given, [()]), (deeper, [])])
def test_a_limit_that_nobody_knows_is_said(function, shapes):
    """One that the program is given; one that changes in a loop further out, whose count in the
    first round would be 0.
    """
    module, _ = module_of(function, (N, N), (N, N), *shapes)
    assert len(module.unknown_loops) == 1
    assert set(module.unknown_loops) <= set(estimate_cost(module, SECOND, SECOND).unknown)


def test_a_fusion_that_runs_beside_others_counts_once():
    """Catches its operands, which it returns too, counted as written."""
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
def test_cudnn_attention_counts_the_pairs_that_its_mask_leaves(changes, products, pairs):
    text = CUDNN
    for old, new in changes.items():
        text = text.replace(old, new)
    cost = estimate_cost(Module(text), SECOND, SECOND)
    assert cost.flops == 2 * products * 2 * 4 * pairs * 64
    assert not cost.unknown


def test_a_loop_of_a_tpu_says_its_rounds_in_its_condition():
    module = Module(LOOP)
    assert module.rounds == {'main': 1, 'body': 7}
    assert not module.unknown_loops


def test_a_loop_that_counts_by_twos_runs_half_as_often():
    """As the compiler writes products that go along with what the devices send each other."""
    module = Module(LOOP.replace('constant(1)', 'constant(2)'))
    assert module.rounds == {'main': 1, 'body': 4}


def test_a_loop_whose_first_round_was_taken_out_runs_once_less():
    """As the compiler does to have what slices exchange go along with the next round."""
    begins = '%first = s32[]{:T(128)} constant(1)\n  %count.2 = s32[]{:T(128)} copy(%first)\n'
    begins += '  %given = (s32[]{:T(128)}, f32[8]{0:T(256)}) tuple(%count.2, %start)\n  ROOT %loop'
    module = Module(LOOP.replace('ROOT %loop', begins).replace('while(%start)', 'while(%given)'))
    assert module.rounds == {'main': 1, 'body': 6}


@pytest.mark.parametrize(
    'known, unknown',
    [('constant(7)', 'parameter(1)'), ('tuple(%more', 'tuple(%count.1')],
    ids=['limit', 'count'],
)
def test_a_loop_whose_rounds_nobody_knows_is_named(known, unknown):
    module = Module(LOOP.replace(known, unknown))
    assert module.unknown_loops == ['loop']
    assert module.rounds['body'] == 1


def test_kernels_say_what_they_compute_or_are_named():
    """What a kernel says of itself may have line breaks in it, and closing braces."""
    cost = estimate_cost(Module(LOOP), SECOND, SECOND)
    assert cost.flops == 7 * 11
    assert cost.unknown == ('mystery',)


def test_bytes_in_fast_memory_do_not_count():
    """Of the first kernel the result, of the second both: 32 bytes each, and not the operand that
    lies in a TPU's own memory.
    """
    assert estimate_cost(Module(LOOP), SECOND, SECOND).bytes == 7 * 3 * 32


def test_batched_products_of_a_tpu_count_what_lies_on_elements():
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
def test_places_of_a_window_are_those_of_a_convolution(n_in, window):
    """A convolution of ones adds up how many elements each place meets."""
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


def test_splash_attention_counts_the_blocks_that_it_computes():
    """Three products of [1024, 128] and [128, 1024] for each of 4 heads and 2 rows; four where the
    gradients of keys and values are made, and five where the queries' is made too.
    """
    one = 0.75 * 2 * (2 * 4) * 1024 * 1024 * 128
    array = 'bf16[2,4,1024,128]{3,2,1,0}'
    for phase, arrays, products in (('dq', 1, 3), ('dkv', 2, 4), ('dkv', 3, 5)):
        results = array if arrays == 1 else f'({", ".join([array] * arrays)})'
        text = SPLASH.replace(f'.1 = {array}', f'.1 = {results}').replace('_dq_', f'_{phase}_')
        cost = estimate_cost(Module(text), SECOND, SECOND, pair_share=0.75)
        assert cost.flops == products * one and not cost.unknown


def test_a_slice_of_an_array_is_all_that_is_read():
    """Catches a layer's weights that count as those of all layers."""

    def of_layer(x, ws):
        return jax.lax.fori_loop(0, 8, lambda i, x: x * ws[i], x)

    module, _ = module_of(of_layer, (N, N), (8, N, N))
    own = estimate_cost(module, SECOND, SECOND).bytes
    once = 4 * N * N
    assert 8 * 3 * once <= own < 8 * 3 * once + 8 * once


# As libtpu has an operand pass through a nested fusion that changes its shape alone.
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
    ('size', 'use', 'read'),
    [
        (4096, 'negate(%whole)', 4096),
        (512, 'dynamic-slice(%whole, %i), dynamic_slice_sizes={512}', 512),
        (4096, 'bitcast(%whole)', 4096),
    ],
)
def test_an_operand_is_read_by_the_users_of_a_nested_fusion(size, use, read):
    """Catches one that counts as not read, as nothing in the nested fusion takes of it."""
    text = NESTED.replace('SIZE', str(size)).replace('USE', use)
    index = 4 if 'slice' in use else 0
    assert estimate_cost(Module(text), SECOND, SECOND).bytes == 4 * (read + size) + index


def test_seconds_are_of_the_slower_of_both_operation_by_operation():
    def two(x, w, y):
        return x @ w, y + 1.0

    shapes = (N, N), (N, N), (N, N, N)
    module, _ = module_of(two, *shapes)
    flops, array = 2 * N**3, 4 * N * N
    rate, bandwidth = flops / 5.0, 2 * N * array / 3.0  # the product 5 s, the sum 3 s
    cost = estimate_cost(module, rate, bandwidth)
    assert cost.seconds == pytest.approx(5.0 + 3.0, rel=0.02)
