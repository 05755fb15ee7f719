"""Contract: programs with kernels compile for TPUs and GPUs, by their own compilers."""

import pytest

from tests.programs import COMPILERS, printed_by

pytestmark = pytest.mark.full  # whole steps are compiled for TPUs and GPUs: a minute each

ROW_KERNELS = ['cross_entropy', 'cross_entropy_backward', 'rms_norm', 'rms_norm_backward']


def test_step_with_kernels_compiles_for_tpus():
    """Attention's forward kernel and one backward kernel are in the program; rows and runs are cut
    over the chips without an all-gather; each program that asks for row kernels has them. Catches a
    call that is left whole, which is refused or gathers the batch.
    """
    pytest.importorskip(COMPILERS['tpu'])
    programs = printed_by('tests.lm.devices.compile_for_chips', 'tpu')
    for record in programs:
        assert {name.split('_')[2] for name in record['kernels']} == {'fwd', 'dkv'}, record
        assert all('segmented' in name for name in record['kernels']), record
        assert record['of rows'] == ROW_KERNELS, record
        assert record['all-gathers'] == 0, record
    single, sharded, runs, _ = programs
    # Rows, heads, tokens, features of a head: 8 rows on one chip, 2 on each of four; two runs of
    # four rows each on each of 2 x 2.
    assert single['of queries'] == ['8,2,128,16']
    assert sharded['of queries'] == ['2,2,128,16']
    assert runs['of queries'] == ['2,4,2,128,16']
    assert runs['mesh'] == {'run': 2, 'data': 2}


def test_step_with_kernels_compiles_for_gpus():
    """Compiles for one GPU and for four, where runs and rows are cut, or parameters. Catches a
    kernel that the mesh does not cut, that the assembler refuses or that spills registers, and
    gathered parameters that block all work.
    """
    pytest.importorskip(COMPILERS['gpu'])
    single, runs, sharded = printed_by('tests.lm.devices.compile_for_chips', 'gpu')
    # The gradient of the loss is XLA's own.
    row_kernels = ['cross_entropy', 'rms_norm', 'rms_norm_backward', 'softmax', 'softmax_backward']
    assert single['of rows'] == row_kernels and single['spilled'] == 0
    assert runs['mesh'] == {'run': 2, 'data': 2} and runs['all-gathers'] == 0
    # No flag is needed for what parameters cost to be hidden: XLA's scheduler does it by itself.
    waits = [kind for kind, work in sharded['hidden'] if work == 0]
    assert {kind for kind, _ in sharded['hidden']} >= {'all-gather', 'reduce-scatter'}
    assert not {'all-gather', 'reduce-scatter'} & set(waits)
    # Mapped kernels have no name of their own.
    assert 'batched_body' in runs['of rows'] and runs['spilled'] == 0
