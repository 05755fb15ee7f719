"""Reference: the time of products on a device, against public timings and closed forms of tiles."""

import pytest

from modules.kernels.attention.splash import computed_share
from tpu.chips import CHIPS
from tpu.cost import estimate_cost
from tpu.hlo import Module
from tpu.rates import attention_share

FAST = 1e30  # bytes a second: memory takes no time

PROGRAM = """HloModule step

ENTRY %main (a: A, b: B) -> R {{
  %a = {a} parameter(0)
  %b = {b} parameter(1)
  ROOT %{name} = {result} {operation}
}}
"""
CUDNN = (
    'custom-call(%a, %b, %b), custom_call_target="__cudnn$fmhaSoftmax{phase}", '
    'backend_config={{"dimensions": ["2", "{heads}", "8192", "8192"], "mask_type": "CAUSAL", '
    '"sliding_window_length": 0}}'
)


def product_cost(chip, a, b, result_type, operation, name='product'):
    text = PROGRAM.format(a=a, b=b, result=result_type, operation=operation, name=name)
    published, pairs = CHIPS[chip], computed_share(8192, None)
    return estimate_cost(Module(text), published.peak, FAST, pairs, published.kind)


def splash_cost(chip, head_dim, phase):
    array = f'bf16[2,{2048 // head_dim},8192,{head_dim}]{{3,2,1,0}}'
    n_results = {'fwd': 1, 'dq': 1, 'dkv': 2, 'dkv and dq': 3}[phase]
    result_type, name = f'({", ".join([array] * n_results)})', phase.partition(' ')[0]
    operation = 'custom-call(%a, %b), custom_call_target="tpu_custom_call"'
    return product_cost(
        chip, array, array, result_type, operation, f'splash_mha_{name}_no_residuals.1'
    )


def cudnn_cost(chip, head_dim, phase):
    array = f'bf16[2,8192,{2048 // head_dim},{head_dim}]{{3,2,1,0}}'
    operation = CUDNN.format(phase=phase, heads=2048 // head_dim)
    return product_cost(chip, array, array, array, operation)


@pytest.mark.parametrize(
    'chip, kernel, head_dim, ms',
    [
        ('v5p', 'fwd', 64, 3.595),
        ('v5p', 'fwd', 128, 1.923),
        ('v6e', 'fwd', 256, 1.502),
        ('tpu7x', 'fwd', 128, 2.139),
        ('tpu7x', 'dkv and dq', 128, 4.711),
        ('tpu7x', 'dkv', 128, 4.711 * 4 / 5),  # products of five
        ('tpu7x', 'dq', 128, 4.711 * 3 / 5),
        ('v6e', 'dkv and dq', 128, 2.432 * 5 / 2),  # by the forward pass
        ('v4', 'fwd', 128, 1.923 * 459 / 275),  # by the peaks of v5p and v4
        ('v5e', 'fwd', 128, 1.923 * 459 / 197),
        ('h100', '', 128, 0.873),
        ('h100', 'Backward', 256, 9.134),
        ('a100', '', 64, 1.070 * 989 / 312),
        ('b200', '', 64, 1.070 * 989 / 2250),
    ],
)
def test_attention_reproduces_timings(chip, kernel, head_dim, ms):
    """Catches milliseconds of another chip, width or phase, and blocks that are charged twice: the
    kernel counts operations for nine eighths of the pairs under the mask.
    """
    cost = (cudnn_cost if CHIPS[chip].platform == 'gpu' else splash_cost)(chip, head_dim, kernel)
    assert 1e3 * cost.seconds == pytest.approx(ms, rel=2e-4)
    assert cost.bound == pytest.approx(cost.flops / CHIPS[chip].peak)
    assert cost.bound < cost.seconds


@pytest.mark.parametrize(
    'kind, phase, percent',
    [
        ('TPU v5', 'forward', (33, 62, 67)),
        ('TPU v6 lite', 'forward', (14, 25, 40)),
        ('TPU7x', 'forward', (12, 22, 37)),
        ('TPU7x', 'backward', (13, 25, 42)),
        ('NVIDIA H100 80GB HBM3', 'forward', (52, 64, 64)),
        ('NVIDIA H100 80GB HBM3', 'backward', (31, 44, 15)),
    ],
)
def test_attention_shares_match_documentation(kind, phase, percent):
    shares = [round(100 * attention_share(kind, head_dim, phase)) for head_dim in (64, 128, 256)]
    assert shares == list(percent)


def test_head_dims_are_interpolated():
    def share(head_dim):
        return attention_share('TPU v5', head_dim, 'forward')

    assert share(96) == pytest.approx((share(64) + share(128)) / 2)
    assert share(16) == pytest.approx(share(64) / 4)
    assert share(512) == share(256)
    assert attention_share('cpu', 128, 'forward') == 1


M, K, N = 1000, 192, 320
DOT = 'dot(%a, %b), lhs_contracting_dims={1}, rhs_contracting_dims={0}'
PADDED = {'v5p': (256, 384), 'v4': (256, 384), 'v6e': (256, 512), 'tpu7x': (256, 512)}


@pytest.mark.parametrize('chip', ['v5p', 'v4', 'v6e', 'tpu7x', 'h100'])
def test_product_is_charged_whole_tiles(chip):
    """Contraction and columns are rounded up; rows stream through."""
    cost = product_cost(chip, f'bf16[{M},{K}]', f'bf16[{K},{N}]', f'bf16[{M},{N}]{{1,0}}', DOT)
    k, n = PADDED.get(chip, (K, N))
    peak = CHIPS[chip].peak
    assert cost.flops == 2 * M * K * N
    assert cost.flops_at_peak == pytest.approx(2 * M * k * n)
    assert cost.seconds == pytest.approx(2 * M * k * n / peak)
    assert cost.bound == pytest.approx(2 * M * K * N / peak)


@pytest.mark.parametrize(
    'a, b, result_type, operation, padded',
    [
        # The columns are taken from the operand that has fewer.
        (f'bf16[{N},{K}]', f'bf16[{K},{M}]', f'bf16[{N},{M}]{{1,0}}', DOT, M * 256 * 512),
        # Heads fill the unit together: libtpu gives such a product the cycles of a flat product.
        (
            'bf16[2,512,256,1]',
            'bf16[8,64,256,1]',
            'bf16[2,512,8,64]{3,1,2,0:T(8,128)(2,1)}',
            'convolution(%a, %b), window={size=1x8 pad=0_0x7_7 rhs_reversal=0x1}, '
            'dim_labels=0bf1_1oi0->0b1f',
            2 * 512 * 256 * 512,
        ),
        # Batched: one matrix after the other.
        (
            'f32[32,128,64]',
            'f32[32,128,64]',
            'f32[32,128,128]{2,1,0}',
            'convolution(%a, %b), window={size=32 stride=31 lhs_dilate=32}, '
            'dim_labels=0bf_0oi->0bf',
            32 * 128 * 256 * 256,
        ),
        # Rows and tokens are contracted together, here 4 x 64.
        (
            'bf16[4,64,256]',
            'bf16[4,64,512]',
            'bf16[256,512,1]{1,0,2}',
            'convolution(%a, %b), window={size=4}, dim_labels=0fb_0io->bf0',
            256 * 512 * 256,
        ),
    ],
    ids=['narrower', 'heads', 'batch', 'gradient'],
)
def test_tiles_are_counted_for_all_forms(a, b, result_type, operation, padded):
    assert product_cost('v6e', a, b, result_type, operation).flops_at_peak == pytest.approx(
        2 * padded
    )
