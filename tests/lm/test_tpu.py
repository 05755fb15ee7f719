"""Contract: programs with fused attention compile for TPUs, by libtpu's own compiler."""

import json
import os
import subprocess
import sys

import pytest

from tests.test_layering import ROOT

pytest.importorskip('libtpu', reason='the extra `tpu` has the compiler')

ENVIRONMENT = {
    'JAX_PLATFORMS': 'cpu',
    'TPU_SKIP_MDS_QUERY': '1',  # no TPU is looked for
    'ALLOW_MULTIPLE_LIBTPU_LOAD': 'true',  # nor held, so that others may compile meanwhile
    'XLA_FLAGS': '',
    'PYTHONPATH': str(ROOT),
}


def test_a_step_with_splash_attention_compiles_for_tpus():
    """Forward, dq and dkv kernels in the program; rows and runs cut over the chips, with no
    all-gather. Catches a call that is left whole, which is refused, or gathers the batch.
    """
    done = subprocess.run(
        [sys.executable, '-m', 'tests.lm.compile_for_tpu'],
        cwd=ROOT,
        env=os.environ | ENVIRONMENT,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    alone, cut, runs = (json.loads(line) for line in done.stdout.splitlines())
    for found in (alone, cut, runs):
        assert {name.split('_')[2] for name in found['kernels']} == {'fwd', 'dq', 'dkv'}, found
        assert all('segmented' in name for name in found['kernels']), found
        assert found['all-gathers'] == 0, found
    # Rows, heads, tokens, features of a head: 8 rows on one chip, 2 on each of four; two runs of
    # four rows each on each of 2 x 2.
    assert alone['of queries'] == '8,2,128,16'
    assert cut['of queries'] == '2,2,128,16'
    assert runs['of queries'] == '2,4,2,128,16'
    assert runs['mesh'] == {'run': 2, 'data': 2}
