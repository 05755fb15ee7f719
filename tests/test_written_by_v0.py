"""Files of commit 0447279 (tests/fixtures/v0) can be read and resumed, with the same meaning.

Equivalence: logits, losses, rows of metrics and columns equal those of its own code.
"""

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from configs import default
from eval.load import load
from eval.runs import gather
from eval.suites.perplexity import perplexity
from lm.config.resolve import resolve
from lm.record.metrics import FILE, TIME_FIELDS, read_rows
from lm.record.run import Run
from train import DONE, train, train_sweep

V0 = Path(__file__).parent / 'fixtures' / 'v0'
EXPECTED = json.loads((V0 / 'expected.json').read_text())
RUNS = ('run', 'options', 'hybrid', 'mix')
RTOL = 1e-5  # of float32 sums in another order, over some steps
# The base of the sweep as one gives it, in the words of v0's make.py.
TINY = {
    'model.d_model': 8,
    'model.n_layers': 2,
    'model.n_heads': 2,
    'model.n_kv_heads': 2,
    'model.d_ff': 32,
    'data.source': 'synthetic:markov',
    'data.tokenizer': 'byte',
    'data.seq_len': 16,
    'data.batch_size': 8,
    'train.log_every': 1,
    'train.steps': 4,
    'scaling.embedding_std': None,
}
SWEPT = {'optim.lr': (1e-3, 3e-3), 'train.seed': (0, 1), 'model.norm': ('rmsnorm', 'layernorm')}


@pytest.fixture
def copy_fixture(tmp_path, monkeypatch):
    """Returns a function that copies a folder for the test to change; prepared text lies beside the
    copy.
    """
    monkeypatch.setenv('XDG_CACHE_HOME', str(tmp_path / 'cache'))
    return lambda name: shutil.copytree(V0 / name, tmp_path / name)


@pytest.mark.default_rows('run')
@pytest.mark.parametrize('name', RUNS)
def test_checkpoint_computes_equal_outputs(name, copy_fixture):
    """Catches an option that is lost, or read by another part, on the way to the present form."""
    expected, checkpoint = EXPECTED[name], load(copy_fixture(name))
    assert checkpoint.step == expected['step']
    logits = checkpoint.model.apply(checkpoint.variables, np.array(expected['tokens']))
    logits = np.asarray(logits, np.float64).reshape(-1, logits.shape[-1])
    rows = np.array(expected['logits'])
    np.testing.assert_allclose(logits[: rows.shape[0], : rows.shape[1]], rows, RTOL, RTOL)
    np.testing.assert_allclose(np.abs(logits).sum(), expected['sum_abs_logits'], RTOL)


def test_checkpoint_evaluates_to_equal_numbers(copy_fixture):
    numbers = perplexity(load(copy_fixture('run'))).numbers
    assert numbers == pytest.approx(EXPECTED['run']['perplexity'], rel=RTOL)


@pytest.mark.full
def test_run_resumes_to_expected_rows(copy_fixture):
    """Catches moments, counters or a schedule that start anew, and a config that seems to
    differ.
    """
    folder = copy_fixture('run')
    assert train(Run(folder).read_recipe(), folder) == DONE
    rows = list(read_rows(folder / FILE))
    expected = EXPECTED['run']['metrics']
    assert [row['step'] for row in rows] == [row['step'] for row in expected]
    for row, expected_row in zip(rows, expected, strict=True):
        numbers = {name: value for name, value in row.items() if name not in TIME_FIELDS}
        assert numbers.keys() == expected_row.keys()
        for field, value in expected_row.items():
            np.testing.assert_allclose(
                numbers[field], value, RTOL, err_msg=f'{field}, {expected_row["step"]}'
            )


@pytest.mark.full
def test_sweep_resumes(copy_fixture):
    """Finished cells keep their names and results; the others are trained."""
    folder, raw = copy_fixture('sweep'), default.get_config()
    raw.update_from_flattened_dict(TINY)
    before = {path: path.read_bytes() for path in folder.glob('*/*') if path.is_file()}
    done = {record['cell']: record for record in gather(folder) if record['status'] == 'done'}
    assert train_sweep(raw.to_dict(), SWEPT, folder) == DONE
    records = gather(folder)
    assert [record['status'] for record in records] == ['done'] * 8
    for record in records:
        if record['norm'] == 'rmsnorm':
            assert record == done.pop(record['cell'])
        else:
            assert (folder / record['cell'] / 'checkpoints').exists()
    assert not done
    assert before == {path: path.read_bytes() for path in before}


def test_old_and_new_options_are_one_run():
    """The checkpoint `options` has this config, as its user would write it now."""
    raw = default.get_config()
    raw.update_from_flattened_dict(
        TINY
        | {
            'model.placement': 'wide',
            'mlp.n_experts': 2,
            'mlp.experts_per_token': 1,
            'mlp.expert_capacity': 1.5,
            'norm.eps': 1e-5,
            'train.steps': 3,
        }
    )
    assert Run(V0 / 'options').read_recipe() == resolve(raw)
