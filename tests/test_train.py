"""The training program: what it writes, how it stops, resumes, diverges and refuses.

Equivalence: a run that was interrupted anywhere writes the same numbers as one that was not.
"""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import numpy as np
import pytest

from lm.config import Config, resolve
from lm.record.load import load
from lm.record.metrics import TIME_FIELDS, Recorder, read_rows
from lm.record.series import Checkpoints
from lm.record.workdir import InUse, open_workdir
from lm.run.journal import Lost
from tests import sweep_helpers
from tests.commands import TWELVE, finished, start_run, wait_for_step
from tests.sweep_helpers import (
    before_step,
    poison_at,
    terminate_at,
    timeless,
    write_corpus,
)
from train import BAD_INPUT, DIVERGED, DONE, SIGNALLED, train

ROOT = Path(__file__).parent.parent


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """A folder of small documents, and a cache of its own."""
    return write_corpus(tmp_path_factory.mktemp('corpus'))


def tiny(corpus: dict, **changes) -> Config:
    """Changes are given as train_steps=12."""
    return resolve(sweep_helpers.base(corpus, **TWELVE | changes))


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """The workdir of an uninterrupted run."""
    workdir = tmp_path_factory.mktemp('whole') / 'run'
    assert train(tiny(corpus), workdir) == DONE
    return workdir


def test_workdir_holds_what_is_promised(whole):
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


def test_summary_names_versions_device_time_and_memory(whole):
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


def test_bits_per_byte_of_bytes_is_loss_over_ln2_but_for_ends(whole):
    """A byte tokenizer has one token a byte, and an EOS a document beside."""
    row = [row for row in read_rows(whole / 'metrics.jsonl') if 'bits_per_byte' in row][-1]
    plain = row['validation_ce'] / np.log(2)
    assert plain < row['bits_per_byte'] < 1.01 * plain


def test_finished_run_has_nothing_left_to_do(whole, corpus, capsys):
    before = timeless(whole)
    assert train(tiny(corpus), whole) == DONE
    assert 'nothing left to do' in capsys.readouterr().out
    assert timeless(whole) == before


def test_a_run_that_another_process_trains_is_refused(whole, corpus, monkeypatch):
    monkeypatch.setattr('lm.record.workdir.PATIENCE_SEC', 0.0)
    before = timeless(whole)
    with (
        open_workdir(whole, tiny(corpus), continue_changed=False),
        pytest.raises(InUse, match=f'another process trains in {whole}'),
    ):
        train(tiny(corpus), whole)
    assert train(tiny(corpus), whole) == DONE
    assert timeless(whole) == before


def test_stopping_at_a_checkpoint_and_going_on_is_bitwise_equal(whole, corpus, tmp_path):
    """The same steps of the same schedule, in two processes' worth of state."""
    config = tiny(corpus)
    stop_after(8, config, tmp_path)
    assert timeless(tmp_path)[-1]['step'] == 8
    assert train(config, tmp_path) == DONE
    assert timeless(tmp_path) == timeless(whole)


def stop_after(step: int, config: Config, workdir: Path) -> None:
    """A run that gets SIGTERM while it makes that step."""
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, terminate_at(step))
        assert train(config, workdir) == SIGNALLED + signal.SIGTERM


def test_sigterm_between_checkpoints_saves_and_a_second_run_goes_on(
    whole, corpus, tmp_path, capsys
):
    stop_after(6, tiny(corpus), tmp_path)
    assert 'SIGTERM: saved step 6' in capsys.readouterr().out
    assert json.loads((tmp_path / 'summary.json').read_text())['status'] == 'stopped'
    assert train(tiny(corpus), tmp_path) == DONE
    assert 'resuming after step 6' in capsys.readouterr().out
    assert timeless(tmp_path) == timeless(whole)


def test_sigterm_to_the_program_saves_and_says_so(corpus, tmp_path):
    process = start_run(tmp_path, corpus, train_steps=50_000)
    wait_for_step(tmp_path, 3, process)
    process.terminate()
    code, output = finished(process)
    assert code == SIGNALLED + signal.SIGTERM
    saved = int(re.search(r'SIGTERM: saved step (\d+)', output).group(1))
    assert (tmp_path / 'checkpoints' / str(saved)).is_dir()


def test_keep_last_and_keep_best(whole):
    steps = {int(path.name) for path in (whole / 'checkpoints').iterdir() if path.name.isdigit()}
    losses = {
        row['step']: row['validation_ce']
        for row in read_rows(whole / 'metrics.jsonl')
        if 'validation_ce' in row
    }
    assert steps == {8, 12} | {min(losses, key=losses.get)}


@pytest.mark.parametrize(
    'victim', ['meta/metadata', 'weights/_METADATA', 'training/manifest.ocdbt']
)
def test_damaged_last_checkpoint_falls_back_and_says_so(victim, whole, corpus, tmp_path, capsys):
    stop_after(8, tiny(corpus), tmp_path)
    os.truncate(tmp_path / 'checkpoints' / '8' / victim, 3)
    assert train(tiny(corpus), tmp_path) == DONE
    output = capsys.readouterr().out
    assert 'checkpoints/8 cannot be read' in output and 'resuming after step 4' in output
    assert (tmp_path / 'checkpoints_damaged' / '8').is_dir()
    assert timeless(tmp_path) == timeless(whole)


def test_unfinished_checkpoint_folder_is_not_taken(whole, corpus, tmp_path, capsys):
    stop_after(4, tiny(corpus), tmp_path)
    (tmp_path / 'checkpoints' / '6.orbax-checkpoint-tmp').mkdir()
    assert train(tiny(corpus), tmp_path) == DONE
    assert 'resuming after step 4' in capsys.readouterr().out
    assert timeless(tmp_path) == timeless(whole)


def test_without_a_readable_checkpoint_nothing_is_written_over_unless_asked_for(
    whole, corpus, tmp_path
):
    stop_after(4, tiny(corpus), tmp_path)
    recorded = (tmp_path / 'metrics.jsonl').read_bytes()
    os.truncate(tmp_path / 'checkpoints' / '4' / 'meta' / 'metadata', 3)
    for _ in range(2):
        with pytest.raises(Lost, match=r'none of its checkpoints .* \[4\] .* --start_over'):
            train(tiny(corpus), tmp_path)
        assert (tmp_path / 'metrics.jsonl').read_bytes() == recorded
    assert train(tiny(corpus), tmp_path, start_over=True) == DONE
    assert timeless(tmp_path) == timeless(whole)


def test_other_config_is_refused_with_the_fields_that_differ(whole, corpus):
    with pytest.raises(ValueError, match=r'optim\.lr: 0\.003 -> 0\.1') as error:
        train(tiny(corpus, optim_lr=0.1), whole)
    assert 'model.' not in str(error.value)


def test_other_config_goes_on_with_the_flag(corpus, tmp_path):
    stop_after(4, tiny(corpus), tmp_path)
    assert train(tiny(corpus, optim_lr=0.0), tmp_path, continue_changed=True) == DONE
    assert timeless(tmp_path)[-2]['lr'] == 0.0


def test_checkpoint_of_another_model_lists_the_paths(corpus, tmp_path):
    stop_after(4, tiny(corpus), tmp_path)
    other = tiny(corpus, model_d_ff=64, model_activation='swiglu', model_placement='post')
    with pytest.raises(ValueError) as error:
        train(other, tmp_path, continue_changed=True)
    fields, text = str(error.value).split('does not fit')
    assert 'model.d_ff: 32 -> 64\n' in fields and "model.placement: 'pre' -> 'post'\n" in fields
    assert 'optim.' not in fields and 'train.' not in fields
    assert 'missing  layers/mlp/gate float32[2,16,64]' in text
    assert 'extra    final_norm/scale float32[16]' in text
    assert 'differs  layers/mlp/up: checkpoint float32[2,16,32], model float32[2,16,64]' in text
    assert train(tiny(corpus), tmp_path) == DONE  # the workdir is still that of the first config


def test_a_start_that_fails_leaves_the_folder_to_the_corrected_command(corpus, tmp_path):
    with pytest.raises(ValueError, match=r'Set data\.epochs='):
        train(tiny(corpus, data_epochs=1, train_steps=10_000), tmp_path)
    assert train(tiny(corpus, train_steps=2), tmp_path) == DONE


def test_a_finished_run_whose_checkpoints_are_gone_is_not_trained_again(whole, corpus, tmp_path):
    workdir = sweep_helpers.copied(whole, tmp_path / 'run')
    shutil.rmtree(workdir / 'checkpoints')
    with pytest.raises(Lost, match=r'trained to step 12, .*/checkpoints holds none'):
        train(tiny(corpus), workdir)
    assert timeless(workdir) == timeless(whole)


def test_loading_takes_the_newest_checkpoint_that_can_be_read(whole, tmp_path):
    workdir, said = sweep_helpers.copied(whole, tmp_path / 'run'), []
    (workdir / 'checkpoints' / '12' / 'weights' / 'manifest.ocdbt').unlink()
    assert load(workdir, said.append).step == 8
    assert len(said) == 1 and 'checkpoints/12 cannot be read' in said[0]
    with pytest.raises(ValueError, match='checkpoints/12 cannot be read'):
        load(workdir / 'checkpoints' / '12')
    for step in ('4', '8'):
        shutil.rmtree(workdir / 'checkpoints' / step / 'meta', ignore_errors=True)
    with pytest.raises(ValueError, match='none of the checkpoints'):
        load(workdir, said.append)


def test_rows_are_synced_before_the_checkpoint_that_covers_them(corpus, tmp_path, monkeypatch):
    done = []
    monkeypatch.setattr(Recorder, 'sync', lambda recorder: done.append(('synced', recorder.rows)))
    monkeypatch.setattr(
        Checkpoints, 'save', lambda _, state, meta, loss: done.append(('saved', meta['counters']))
    )
    assert train(tiny(corpus, train_steps=8), tmp_path) == DONE
    assert [name for name, _ in done] == ['synced', 'saved'] * 2
    assert [counters['rows'] for name, counters in done if name == 'saved'] == [5, 10]


def test_other_data_is_refused(corpus, tmp_path):
    folder = tmp_path / 'text'
    folder.mkdir()
    for i in range(4):
        (folder / f'{i}.txt').write_text(f'{i} norms ' * 50)
    config = tiny(corpus, data_source=f'text:{folder}/*.txt')
    stop_after(4, config, tmp_path / 'run')
    (folder / '0.txt').write_text('other norms ' * 50)
    with pytest.raises(ValueError, match='was trained on data'):
        train(config, tmp_path / 'run')


class TestDivergence:
    """Parameters that are not finite. `tests/lm/run/test_wave.py` has what goes for any run."""

    def test_stop_says_what_was_seen_and_where_the_last_good_one_is(
        self, corpus, tmp_path, monkeypatch, capsys
    ):
        before_step(monkeypatch, poison_at(6))
        assert train(tiny(corpus), tmp_path) == DIVERGED
        output = capsys.readouterr().out
        assert 'DIVERGED: step 6: loss nan' in output
        assert f'last good checkpoint: {tmp_path}/checkpoints/4' in output
        assert json.loads((tmp_path / 'summary.json').read_text())['status'] == 'diverged'
        saved = {path.name for path in (tmp_path / 'checkpoints').iterdir()}
        assert not {'6', '7', '8'} & saved

    def test_rollback_returns_to_the_checkpoint_and_leaves_out_the_batches(
        self, whole, corpus, tmp_path, monkeypatch, capsys
    ):
        before_step(monkeypatch, poison_at(6))
        assert train(tiny(corpus, train_on_divergence='rollback'), tmp_path) == DONE
        assert 'back to step 4' in capsys.readouterr().out
        rows, undisturbed = timeless(tmp_path), timeless(whole)
        assert [row['step'] for row in rows] == [row['step'] for row in undisturbed]
        assert rows[:5] == undisturbed[:5] and rows[5]['loss'] != undisturbed[5]['loss']
        events = json.loads((tmp_path / 'summary.json').read_text())['events']
        assert [event['kind'] for event in events] == ['rollback']

    def test_rollback_gives_up_in_the_end(self, corpus, tmp_path, monkeypatch, capsys):
        before_step(monkeypatch, poison_at(6, times=100))
        assert train(tiny(corpus, train_on_divergence='rollback'), tmp_path) == DIVERGED
        assert '5 rollbacks did not help' in capsys.readouterr().out


def test_full_disk_names_what_is_complete(corpus, tmp_path, monkeypatch):
    """Orbax raises in the next save or wait, whatever the write met."""
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


def test_unwritable_workdir(corpus, tmp_path):
    (tmp_path / 'file').write_text('in the way')
    with pytest.raises(OSError, match='cannot be written'):
        train(tiny(corpus), tmp_path / 'file' / 'run')


def test_more_steps_than_epochs_allow(corpus, tmp_path):
    with pytest.raises(ValueError, match=r'Set data\.epochs='):
        train(tiny(corpus, data_epochs=1, train_steps=10_000), tmp_path)


def test_going_past_one_epoch_is_said_aloud(whole, corpus, tmp_path, capsys):
    assert (
        train(tiny(corpus, train_steps=70, train_checkpoint_every=0, train_eval_every=0), tmp_path)
        == DONE
    )
    assert re.search(r'NOTE: 70 batches go over the text \d+\.\d+ times', capsys.readouterr().out)


def test_the_size_of_the_state_and_a_warmup_longer_than_the_run_are_said_aloud(
    corpus, tmp_path, capsys
):
    assert train(tiny(corpus, train_steps=3), tmp_path) == DONE
    said = capsys.readouterr().out
    assert 'needs more than 5 steps and the run has 3: warmup_steps=5' in said
    size = r'parameters, optimizer state 0\.\d\d MB \(8\.00 bytes a parameter\); mesh'
    assert re.search(size, ' '.join(said.split()))


@pytest.mark.parametrize('norm', ['batchnorm', 'rmsnorm'])
def test_a_norm_that_shows_later_tokens_in_training_says_so(norm, corpus, tmp_path, capsys):
    assert train(tiny(corpus, model_norm=norm, train_steps=2), tmp_path) == DONE
    said = 'NOTE: in training batchnorm shows each token statistics over all tokens of the batch'
    assert (said in capsys.readouterr().out) == (norm == 'batchnorm')


def test_unknown_field_and_value_are_answered_with_the_nearest(corpus, tmp_path):
    for flag, answer in (
        ('--config.model.nrom=none', "Did you mean 'model.norm'"),
        ('--config.model.norm=layernrom', "Did you mean 'layernorm'"),
    ):
        code, output = finished(start_run(tmp_path, corpus, flag))
        assert code == BAD_INPUT and answer in output and 'Traceback' not in output


def test_the_resolved_config_and_the_learning_rates_are_printed_alone(corpus, tmp_path):
    flags = ('--print_config', '--print_schedule')
    code, output = finished(start_run(tmp_path / 'run', corpus, *flags))
    config, end = json.JSONDecoder().raw_decode(output)
    assert code == DONE and config['model']['d_model'] == 16
    title, head, *rows = output[end:].split('\n')[1:-1]
    assert title == f'optim.schedule={config["optim"]["schedule"]}' and head.split()[0] == 'step'
    assert [int(row.split()[0]) for row in rows] == [*range(1, config['train']['steps'] + 1)]
    assert not (tmp_path / 'run').exists()
