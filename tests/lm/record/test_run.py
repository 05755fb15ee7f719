"""Property: the record of a run is readable before, during and after training."""

import json
import math
import subprocess
import sys

import pytest

from lm.config.resolve import flatten, resolve
from lm.record.metrics import Recorder
from lm.record.names import EVALUATIONS, SUMMARY
from lm.record.run import Run, final_loss, list_runs, run_seconds
from lm.record.workdir import write_config
from lm.storage.files import seal_record, write_json
from tests.helpers import tiny_raw


def test_record_is_read_without_jax():
    """A follower of trackers runs beside training, and JAX would take a second and 200 MB."""
    code = 'import sys, lm.record.run; sys.exit("jax" in sys.modules)'
    assert not subprocess.run([sys.executable, '-c', code], check=False).returncode


def test_run_with_missing_folder_is_waiting(tmp_path):
    run = Run(tmp_path / 'cell')
    assert not run.has_begun and run.status is None and not run.is_final
    assert run.loss('ce') is None and run.results() == {'status': 'waiting'}
    assert run.rows() == [] and run.evaluations == [] and run.profile is None


@pytest.mark.parametrize(
    ('summary', 'loss'),
    [
        ({'status': 'done', 'validation_ce': 2.5, 'bits_per_byte': 1.25}, 2.5),
        ({'status': 'done', 'validation_ce': None}, math.inf),
        ({'status': 'diverged', 'validation_ce': 2.5}, math.inf),
        ({'status': 'failed', 'validation_ce': 2.5}, None),  # the same command tries it again
        ({'status': 'stopped', 'validation_ce': 2.5}, None),
    ],
)
def test_only_final_run_has_loss(tmp_path, summary, loss):
    write_json(tmp_path / SUMMARY, seal_record(summary))
    assert Run(tmp_path).loss('ce') == loss
    assert final_loss(summary['status'], summary['validation_ce']) == loss


def test_runs_side_by_side_share_their_time():
    assert run_seconds({'wall_sec': 6.0, 'side_by_side': 3}) == 2.0
    assert run_seconds({'wall_sec': 6.0}) == 6.0 and run_seconds({'side_by_side': 2}) == 0.0


def test_unfinished_results_follow_from_rows(tmp_path):
    recorder = Recorder(tmp_path, 0, None, print)
    recorder.write({'step': 1, 'ce': 5.0, 'tokens': 8, 'tokens_per_sec': 2.0})
    recorder.write({'step': 2, 'validation_ce': 4.0, 'bits_per_byte': 2.0})
    recorder.write({'step': 3, 'ce': 3.0, 'tokens': 24, 'tokens_per_sec': 4.0})
    recorder.write({'step': 4, 'validation_ce': 4.5, 'bits_per_byte': 2.5})
    results = Run(tmp_path).results()
    assert results['status'] == 'unfinished' and results['step'] == 4 and results['ce'] == 3.0
    assert results['tokens_per_sec_mean'] == 3.0 and results['validation_ce'] == 4.5
    assert (results['best_validation_ce'], results['best_step']) == (4.0, 2)


def test_tail_reads_appended_rows(tmp_path):
    recorder, tail = Recorder(tmp_path, 0, None, print), Run(tmp_path).tail()
    assert tail.read() == ([], False)
    recorder.write({'step': 1, 'loss': math.inf})
    assert tail.read()[0] == [{'step': 1, 'loss': None, 'not_finite': {'loss': 'inf'}}]
    path = tmp_path / 'metrics.jsonl'
    with path.open('a') as file:
        file.write('{"step": 2, "lo')
    assert tail.read()[0] == [] and [row['step'] for row in Run(tmp_path).rows()] == [1]
    with path.open('a') as file:
        file.write('ss": 1.0}\nnoise\n')
    restarts = tail.restarts
    assert [row['step'] for row in tail.read()[0]] == [2] and tail.restarts == restarts
    path.write_text(json.dumps({'step': 1, 'loss': 7.0}) + '\n')  # by a run that goes on
    assert tail.read()[0] == [{'step': 1, 'loss': 7.0}] and tail.restarts == restarts + 1


def test_sweep_lists_runs_that_have_begun(tmp_path):
    for name in ('b', 'a'):
        (tmp_path / name).mkdir()
        write_config(tmp_path / name, resolve(tiny_raw()))
    (tmp_path / 'waits').mkdir()
    write_json(tmp_path / 'sweep.json', {})
    assert [run.name for run in list_runs(tmp_path)] == ['a', 'b']
    assert {run.sweep for run in list_runs(tmp_path)} == {tmp_path.name}
    assert list_runs(tmp_path / 'a') == [Run(tmp_path / 'a')]
    assert Run(tmp_path / 'a').read_recipe() == resolve(tiny_raw())


@pytest.mark.parametrize(
    'changes',
    [
        {},
        {'optim.name': 'muon', 'model.norm': 'dyt', 'loss.z_loss': 1e-4},
        {'train.stages': '0.5: ; 1: lr_factor=0.5', 'scaling.embedding_std': 1.0},
    ],
)
def test_config_is_the_resolved_one(tmp_path, changes):
    """A config that this version wrote is read without resolving it again."""
    recipe = resolve(tiny_raw(changes))
    write_config(tmp_path, recipe)
    assert Run(tmp_path).config == flatten(recipe)
    # One that lacks a field, as an older version wrote it, is resolved.
    raw = Run(tmp_path).read_config()
    del raw['train']['stages']
    write_json(tmp_path / 'config.json', seal_record(raw))
    assert Run(tmp_path).config == flatten(resolve(raw))
    assert Run(tmp_path).config['train.stages'] is None


def test_evaluations_are_sorted_by_step(tmp_path):
    for step in ('10', '9'):
        (tmp_path / EVALUATIONS / step).mkdir(parents=True)
        (tmp_path / EVALUATIONS / step / 'suite-1.json').write_text('{}')
    assert [path.parent.name for path in Run(tmp_path).evaluations] == ['9', '10']
