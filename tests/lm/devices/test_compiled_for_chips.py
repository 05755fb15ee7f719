"""Contract: programs with kernels compile for TPUs and GPUs, by their own compilers."""

import pytest

from tests.programs import COMPILERS, printed_by

pytestmark = pytest.mark.full  # whole steps are compiled for TPUs and GPUs: a minute each

OF_ROWS = ['cross_entropy', 'cross_entropy_backward', 'rms_norm', 'rms_norm_backward']


def test_a_step_with_kernels_compiles_for_tpus():
    """Attention's forward kernel and one backward in the program; rows and runs cut over the chips,
    with no all-gather; kernels of rows in each program that asks for them. Catches a call that is
    left whole, which is refused, or gathers the batch.
    """
    pytest.importorskip(COMPILERS['tpu'])
    programs = printed_by('tests.lm.devices.compile_for_chips', 'tpu')
    for found in programs:
        assert {name.split('_')[2] for name in found['kernels']} == {'fwd', 'dkv'}, found
        assert all('segmented' in name for name in found['kernels']), found
        assert found['of rows'] == OF_ROWS, found
        assert found['all-gathers'] == 0, found
    alone, cut, runs, _ = programs
    # Rows, heads, tokens, features of a head: 8 rows on one chip, 2 on each of four; two runs of
    # four rows each on each of 2 x 2.
    assert alone['of queries'] == ['8,2,128,16']
    assert cut['of queries'] == ['2,2,128,16']
    assert runs['of queries'] == ['2,4,2,128,16']
    assert runs['mesh'] == {'run': 2, 'data': 2}


def test_a_step_with_kernels_compiles_for_gpus():
    """On one and on four, where runs and rows are cut, or parameters. Catches a kernel that the
    mesh does not cut, one that the assembler refuses, one whose registers do not do, and gathered
    parameters that all wait for.
    """
    pytest.importorskip(COMPILERS['gpu'])
    alone, runs, cut = printed_by('tests.lm.devices.compile_for_chips', 'gpu')
    # The gradient of the loss is XLA's own.
    of_rows = ['cross_entropy', 'rms_norm', 'rms_norm_backward', 'softmax', 'softmax_backward']
    assert alone['of rows'] == of_rows and alone['spilled'] == 0
    assert runs['mesh'] == {'run': 2, 'data': 2} and runs['all-gathers'] == 0
    # No flag is needed for what parameters cost to be hidden: XLA's scheduler does it by itself.
    waits = [kind for kind, work in cut['hidden'] if work == 0]
    assert {kind for kind, _ in cut['hidden']} >= {'all-gather', 'reduce-scatter'}
    assert not {'all-gather', 'reduce-scatter'} & set(waits)
    # Mapped kernels have no name of their own.
    assert 'batched_body' in runs['of rows'] and runs['spilled'] == 0
