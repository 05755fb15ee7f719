"""Contract: kernels compile for each chip, and move the least bytes there are to move."""

import pytest

from tests.programs import COMPILERS, printed_by
from tpu.chips import GPUS, TPUS

pytestmark = pytest.mark.full  # kernels are compiled for TPUs and GPUs: two minutes

# Arrays of rows read and written, by how many kernels.
PASSES = {
    'rms_norm': (2, 1),
    'rms_norm backward': (3, 1),
    'softmax': (2, 1),
    'softmax, both': (5, 2),
    'cross_entropy': (1, 1),
    'cross_entropy, both': (3, 2),
}
GPU_KERNELS = {'cross_entropy, both': 1}  # the gradient is XLA's


# An H200 runs the programs of an H100.
@pytest.mark.parametrize('chips', [tuple(TPUS), ('a100',), ('h100',), ('b200',)], ids=' '.join)
def test_kernels_read_and_write_once(chips):
    """By the chips' own compilers. Catches a kernel that a chip's memory does not hold, one that
    reads rows twice, one that keeps them where registers spill to, and a layout that has the arrays
    of an odd width copied before it.
    """
    on_gpu = chips[0] in GPUS
    pytest.importorskip(COMPILERS['gpu' if on_gpu else 'tpu'])
    found = printed_by('tests.modules.kernels_for_chips', *chips)
    assert {(one['chip'], one['name']) for one in found} == {(c, n) for c in chips for n in PASSES}
    for one in found:
        passes, kernels = PASSES[one['name']]
        if on_gpu:
            kernels = GPU_KERNELS.get(one['name'], kernels)
        assert one['operations'].count('custom-call') == kernels, one
        assert not [name for name in one['instructions'] if 'copy' in name], one
        assert passes <= one['passes'] < 1.05 * passes, one  # with some numbers a row
        assert all(kernel['stack'] == kernel['spilled'] == 0 for kernel in one['compiled']), one
    assert any(one['compiled'] for one in found) == on_gpu
