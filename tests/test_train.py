"""The training program: its files, and how it stops, diverges and refuses."""

import json
import re

import numpy as np
import pytest

from lm.launch import streams
from lm.record.checkpoints import Checkpoints
from lm.record.metrics import TIME_FIELDS, Recorder, read_rows
from tests.commands import start_run, tiny, wait_for_command
from tests.sweep_helpers import before_step, poison_at, timeless
from train import BAD_INPUT, DIVERGED, DONE, train

pytestmark = pytest.mark.usefixtures('programs_once')


def test_workdir_has_documented_files(whole):
    assert {'config.json', 'metrics.jsonl', 'summary.json', 'checkpoints', 'tensorboard'} <= {
        path.name for path in whole.iterdir()
    }
    rows = read_rows(whole / 'metrics.jsonl')
    trained = [row for row in rows if 'loss' in row]
    assert [row['step'] for row in trained] == list(range(1, 13))
    promised = [
        'step',
        'loss',
        'ce',
        'z_loss',
        'lr',
        'grad_norm',
        'update_norm',
        'tokens',
        'tokens_per_sec',
        'mfu',
    ]
    assert set(promised) | set(TIME_FIELDS) <= set(trained[0])
    assert [row['step'] for row in rows if 'bits_per_byte' in row] == [4, 8, 12]
    assert any((whole / 'tensorboard').iterdir())


def test_summary_has_versions_device_time_and_memory(whole):
    summary = json.loads((whole / 'summary.json').read_text())
    assert summary['status'] == 'done' and summary['step'] == 12
    assert summary['versions']['jax'] and summary['git_commit'] and summary['device']
    assert summary['wall_sec'] > 0 and summary['peak_memory_bytes'] > 1e7
    assert 0 <= summary['data_wait_fraction'] < 1
    # Two moments of each parameter in float32, and a counter.
    assert summary['optimizer_state_bytes'] == 8 * summary['parameters'] + 4


def test_tokens_accumulate_over_steps(whole):
    tokens = [row['tokens'] for row in read_rows(whole / 'metrics.jsonl') if 'tokens' in row]
    assert np.all(np.diff(tokens) > 0) and tokens[-1] <= 12 * 8 * 16


def test_byte_model_bits_per_byte_is_loss_over_ln2(whole):
    """A byte tokenizer has one token for each byte, and an EOS for each document."""
    row = [row for row in read_rows(whole / 'metrics.jsonl') if 'bits_per_byte' in row][-1]
    plain = row['validation_ce'] / np.log(2)
    assert plain < row['bits_per_byte'] < 1.01 * plain


def test_keep_last_and_keep_best(whole):
    steps = {int(path.name) for path in (whole / 'checkpoints').iterdir() if path.name.isdigit()}
    losses = {
        row['step']: row['validation_ce']
        for row in read_rows(whole / 'metrics.jsonl')
        if 'validation_ce' in row
    }
    assert steps == {8, 12} | {min(losses, key=losses.get)}


@pytest.mark.full
def test_rows_are_synced_before_their_checkpoint(corpus, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(Recorder, 'sync', lambda recorder: done.append(('synced', recorder.rows)))
    monkeypatch.setattr(
        Checkpoints, 'save', lambda _, state, meta, loss: done.append(('saved', meta['counters']))
    )
    assert train(tiny(corpus, train_steps=8), tmp_path) == DONE
    assert [name for name, _ in done] == ['synced', 'saved'] * 2
    assert [counters['rows'] for name, counters in done if name == 'saved'] == [5, 10]


class TestDivergenceInTrain:
    """Parameters that are not finite. `tests/lm/run/test_wave.py` tests properties of any run."""

    def test_stop_reports_loss_and_last_good_checkpoint(
        self, corpus, tmp_path, monkeypatch, capsys
    ):
        before_step(monkeypatch, poison_at(6))
        assert train(tiny(corpus), tmp_path) == DIVERGED
        stdout = capsys.readouterr().out
        assert 'DIVERGED: step 6: loss nan' in stdout
        assert f'last good checkpoint: {tmp_path}/checkpoints/4' in stdout
        assert json.loads((tmp_path / 'summary.json').read_text())['status'] == 'diverged'
        saved = {path.name for path in (tmp_path / 'checkpoints').iterdir()}
        assert not {'6', '7', '8'} & saved

    @pytest.mark.full
    def test_rollback_skips_batches(self, whole, corpus, tmp_path, monkeypatch, capsys):
        before_step(monkeypatch, poison_at(6))
        assert train(tiny(corpus, train_on_divergence='rollback'), tmp_path) == DONE
        assert 'back to step 4' in capsys.readouterr().out
        rows, undisturbed = timeless(tmp_path), timeless(whole)
        assert [row['step'] for row in rows] == [row['step'] for row in undisturbed]
        assert rows[:5] == undisturbed[:5] and rows[5]['loss'] != undisturbed[5]['loss']
        events = json.loads((tmp_path / 'summary.json').read_text())['events']
        assert [event['kind'] for event in events] == ['rollback']

    @pytest.mark.full
    def test_rollback_gives_up_eventually(self, corpus, tmp_path, monkeypatch, capsys):
        before_step(monkeypatch, poison_at(6, times=100))
        assert train(tiny(corpus, train_on_divergence='rollback'), tmp_path) == DIVERGED
        assert '5 rollbacks did not help' in capsys.readouterr().out


def test_full_disk_names_last_complete_step(corpus, tmp_path, monkeypatch):
    """Orbax raises the error of a write at the next save or wait."""
    from lm.record.checkpoint import ocp

    original = ocp.CheckpointManager.save

    def save(manager, step, **kwargs):
        if step == 8:
            manager.wait_until_finished()
            raise ValueError('RESOURCE_EXHAUSTED: no space left on device')
        return original(manager, step, **kwargs)

    monkeypatch.setattr(ocp.CheckpointManager, 'save', save)
    with pytest.raises(
        OSError, match=r'is full.*no space left.*newest checkpoint is .*/checkpoints/4\.'
    ):
        train(tiny(corpus), tmp_path)


def test_lost_output_is_recorded(corpus, tmp_path, monkeypatch):
    monkeypatch.setattr(streams, '_loss_reason', 'Broken pipe')
    assert train(tiny(corpus), tmp_path) == DONE
    (event,) = json.loads((tmp_path / 'summary.json').read_text())['events']
    assert event['kind'] == 'output_lost' and event['step'] == 1
    assert event['seen'] == 'standard output failed: Broken pipe'


def test_unwritable_workdir_raises(corpus, tmp_path):
    (tmp_path / 'file').write_text('in the way')
    with pytest.raises(OSError, match='cannot be written'):
        train(tiny(corpus), tmp_path / 'file' / 'run')


def test_too_many_steps_for_epochs(corpus, tmp_path):
    with pytest.raises(ValueError, match=r'Set data\.epochs='):
        train(tiny(corpus, data_epochs=1, train_steps=10_000), tmp_path)


@pytest.mark.full
def test_repeated_epochs_are_reported(whole, corpus, tmp_path, capsys):
    assert (
        train(tiny(corpus, train_steps=70, train_checkpoint_every=0, train_eval_every=0), tmp_path)
        == DONE
    )
    assert re.search(
        r'NOTE: the run reads the text \d+\.\d+ times \(70 batches\)', capsys.readouterr().out
    )


@pytest.mark.full
def test_state_size_and_long_warmup_are_reported(corpus, tmp_path, capsys):
    assert train(tiny(corpus, train_steps=3), tmp_path) == DONE
    printed = capsys.readouterr().out
    assert 'needs more than 5 steps, but the run has 3: warmup_steps=5' in printed
    size = r'parameters; optimizer state 0\.\d\d MB \(8\.00 bytes per parameter\)'
    assert re.search(size, ' '.join(printed.split()))


@pytest.mark.full
@pytest.mark.parametrize('norm', ['batchnorm', 'rmsnorm'])
def test_leaking_norm_is_reported(norm, corpus, tmp_path, capsys):
    assert train(tiny(corpus, model_norm=norm, train_steps=2), tmp_path) == DONE
    note = 'NOTE: during training, batchnorm shows each token statistics over all tokens of the'
    assert (note in capsys.readouterr().out) == (norm == 'batchnorm')


@pytest.mark.full
def test_unknown_field_suggests_nearest(corpus, tmp_path):
    """A page shows the answer to an unknown value, and its commands are tested."""
    code, stdout = wait_for_command(start_run(tmp_path, corpus, '--config.model.nrom=none'))
    assert code == BAD_INPUT and "Did you mean 'model.norm'" in stdout
    assert 'Traceback' not in stdout


def test_config_and_schedule_are_printed(corpus, tmp_path):
    flags = ('--print_config', '--print_schedule')
    code, stdout = wait_for_command(start_run(tmp_path / 'run', corpus, *flags))
    config, end = json.JSONDecoder().raw_decode(stdout)
    assert code == DONE and config['model']['d_model'] == 16
    export, title, head, *rows = stdout[end:].split('\n')[1:-1]
    assert export == 'export: as ArceeForCausalLM (model_type arcee)'
    assert title == f'optim.schedule={config["optim"]["schedule"]}' and head.split()[0] == 'step'
    assert [int(row.split()[0]) for row in rows] == [*range(1, config['train']['steps'] + 1)]
    assert not (tmp_path / 'run').exists()
