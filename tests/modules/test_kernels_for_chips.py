"""Contract: kernels compile for each chip, and move the least possible bytes."""

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
    """The chips' own compilers compile the kernels. Catches a kernel that exceeds a chip's memory,
    a kernel that reads rows twice, spilled registers, and a layout that copies arrays of an odd
    width first.
    """
    on_gpu = chips[0] in GPUS
    pytest.importorskip(COMPILERS['gpu' if on_gpu else 'tpu'])
    programs = printed_by('tests.modules.kernels_for_chips', *chips)
    assert {(program['chip'], program['name']) for program in programs} == {
        (c, n) for c in chips for n in PASSES
    }
    for program in programs:
        passes, kernels = PASSES[program['name']]
        if on_gpu:
            kernels = GPU_KERNELS.get(program['name'], kernels)
        assert program['operations'].count('custom-call') == kernels, program
        assert not [name for name in program['instructions'] if 'copy' in name], program
        assert passes <= program['passes'] < 1.05 * passes, program  # with some numbers a row
        assert all(kernel['stack'] == kernel['spilled'] == 0 for kernel in program['compiled']), (
            program
        )
    assert any(program['compiled'] for program in programs) == on_gpu
