"""Contract: the vendors' compilers multiply in few bits, and the plan counts their rate."""

import math

import pytest

from tests.programs import COMPILERS, printed_by
from tests.tpu.compile_few_bits import SHAPES
from tpu.chips import CHIPS
from tpu.rates import few_bits_factor

FLOPS = 3 * 2 * math.prod(SHAPES[0]) * SHAPES[1][1]


@pytest.mark.full
@pytest.mark.parametrize(
    ('chip', 'name', 'factors'),
    [
        ('v6e', 'int8', (2, 2, 1)),  # dw is wide
        ('v6e', 'fp8_tensorwise', (1, 1, 1)),  # has no units for float8
        ('tpu7x', 'fp8_rowwise', (2, 2, 2)),
        ('h100', 'fp8_tensorwise', (2, 2, 2)),
        ('b200', 'fp8_rowwise', (2, 2, 2)),
    ],
)
def test_real_products_have_their_rate(chip, name, factors):
    """As many flops in less time, by the types of operands in the compiled program. Catches a
    compiler that casts them to bfloat16 first.
    """
    pytest.importorskip(COMPILERS[CHIPS[chip].platform])
    (costs,) = printed_by('tests.tpu.compile_few_bits', chip, name)
    assert costs['simulated'] == pytest.approx([FLOPS, FLOPS])
    assert costs['real'] == pytest.approx([FLOPS, sum(FLOPS / 3 / factor for factor in factors)])


def test_slower_operand_sets_the_factor():
    assert few_bits_factor('NVIDIA H100 80GB HBM3', ('f8e4m3fn', 'f8e5m2')) == 2
    assert few_bits_factor('NVIDIA H100 80GB HBM3', ('f8e4m3fn', 'bf16')) == 1
    assert few_bits_factor('TPU v6 lite', ('s8', 's8')) == 2
    assert few_bits_factor('TPU v6 lite', ('f8e4m3fn', 'f8e4m3fn')) == 1
    assert few_bits_factor('cpu', ('s8', 's8')) == 1
