"""Contract: kernels compile for each TPU, and move the least bytes there are to move."""

import pytest

from tests.tpu_programs import CHIPS, printed_by

pytest.importorskip('libtpu', reason='the extra `tpu` has the compiler')

# Arrays of rows read and written, by how many kernels.
PASSES = {
    'rms_norm': (2, 1),
    'rms_norm backward': (3, 1),
    'add_rms_norm': (4, 1),
    'softmax': (2, 1),
    'softmax, both': (5, 2),
    'cross_entropy': (1, 1),
    'cross_entropy, both': (3, 2),
}


def test_kernels_read_and_write_once():
    """By libtpu's own compiler. Catches a kernel that a chip's memory does not hold, one that reads
    rows twice, and a layout that has the arrays of an odd width copied before it.
    """
    found = printed_by('tests.modules.kernels_for_tpu')
    assert {(one['chip'], one['name']) for one in found} == {(c, n) for c in CHIPS for n in PASSES}
    for one in found:
        passes, kernels = PASSES[one['name']]
        assert one['operations'].count('custom-call') == kernels, one
        assert not [name for name in one['operations'] if name.startswith('copy')], one
        assert passes <= one['passes'] < 1.05 * passes, one  # with some numbers a row
