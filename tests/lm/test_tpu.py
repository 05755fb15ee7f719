"""Contract: programs with fused kernels compile for TPUs, by libtpu's own compiler."""

import pytest

from tests.programs import printed_by

pytest.importorskip('libtpu', reason='the extra `tpu` has the compiler')

OF_ROWS = ['cross_entropy', 'cross_entropy_backward', 'rms_norm', 'rms_norm_backward']


def test_a_step_with_kernels_compiles_for_tpus():
    """Attention's forward, dq and dkv kernels in the program; rows and runs cut over the chips,
    with no all-gather; kernels of rows in each program that asks for them. Catches a call that is
    left whole, which is refused, or gathers the batch.
    """
    programs = printed_by('tests.lm.compile_for_tpu')
    for found in programs:
        assert {name.split('_')[2] for name in found['kernels']} == {'fwd', 'dq', 'dkv'}, found
        assert all('segmented' in name for name in found['kernels']), found
        assert found['of rows'] == OF_ROWS, found
        assert found['all-gathers'] == 0, found
    alone, cut, runs, _ = programs
    # Rows, heads, tokens, features of a head: 8 rows on one chip, 2 on each of four; two runs of
    # four rows each on each of 2 x 2.
    assert alone['of queries'] == '8,2,128,16'
    assert cut['of queries'] == '2,2,128,16'
    assert runs['of queries'] == '2,4,2,128,16'
    assert runs['mesh'] == {'run': 2, 'data': 2}
