"""The training program in the folder of a run: resuming, and refusals.

Equivalence: a run that was interrupted anywhere writes the numbers of an uninterrupted run.
"""

import json
import os
import re
import shutil
import signal
from pathlib import Path

import pytest

from lm.config.fields import Config
from lm.inference.load import load
from lm.record.checkpoint import list_steps, read_meta
from lm.record.checkpoints import Checkpoints
from lm.record.code import describe_code, running_code
from lm.record.workdir import InUseError, open_workdir
from lm.run.journal import CheckpointsLost
from lm.storage.files import read_json, seal_record, write_json
from tests import sweep_helpers
from tests.commands import (
    start_run,
    tiny,
    train_until_sigkill,
    wait_for_command,
    wait_for_step,
)
from tests.sweep_helpers import before_step, terminate_at, timeless
from train import DONE, SIGNALLED, train

pytestmark = pytest.mark.usefixtures('programs_once')


def test_finished_run_has_nothing_left_to_do(whole, corpus, capsys):
    before = timeless(whole)
    assert train(tiny(corpus), whole) == DONE
    assert 'nothing left to do' in capsys.readouterr().out
    assert timeless(whole) == before


@pytest.mark.full
def test_constant_run_is_extended_and_branched(corpus, tmp_path):
    """An extended run has the losses of one long run; a branch anneals from the trunk's state."""

    def read_columns(name):
        rows = [row for row in timeless(tmp_path / name) if 'lr' in row]
        return [[row[column] for row in rows] for column in ('loss', 'lr')]

    constant = {'optim_schedule': 'constant', 'train_log_every': 1}
    assert train(tiny(corpus, **constant, train_steps=8), tmp_path / 'trunk') == DONE
    branch = sweep_helpers.copy_workdir(tmp_path / 'trunk', tmp_path / 'branch')
    assert train(tiny(corpus, **constant), tmp_path / 'trunk', continue_changed=True) == DONE
    assert train(tiny(corpus, **constant), tmp_path / 'long') == DONE
    (losses, rates), (branch_losses, branch_rates) = read_columns('long'), read_columns('branch')
    assert read_columns('trunk') == [losses, rates] and branch_losses == losses[:8]
    decay = {'optim_schedule': 'warmup_stable_decay', 'optim_decay_fraction': 4 / 12}
    assert train(tiny(corpus, **constant | decay), branch, continue_changed=True) == DONE
    branch_losses, branch_rates = read_columns('branch')
    assert branch_losses[:8] == losses[:8] and branch_rates[:8] == rates[:8]
    assert rates[8:] > branch_rates[8:] == sorted(branch_rates[8:], reverse=True)
    assert branch_losses[9:] != losses[9:] and len(branch_losses) == 12


def test_finished_run_reports_other_code(whole, corpus, capsys, edited_sources):
    assert train(tiny(corpus), whole) == DONE
    (recorded_code,) = read_json(whole / 'summary.json')['code']
    words = (
        f'NOTE: this run was trained with {describe_code(recorded_code)}; '
        f'the code is now {edited_sources}. '
    )
    assert words in read_stdout(capsys)
    assert edited_sources == 'commit dddddddd with uncommitted changes (sources eeeeeeee)'


def test_resumed_run_records_both_codes(whole, corpus, tmp_path, capsys, request):
    stop_after(6, tiny(corpus), tmp_path)
    began = running_code()
    edited = request.getfixturevalue('edited_sources')
    capsys.readouterr()
    stop_after(9, tiny(corpus), tmp_path)
    words = f'steps up to 6 were trained with {describe_code(began)}; later steps use'
    assert f'NOTE: {words} {edited}' in read_stdout(capsys)
    assert train(tiny(corpus), tmp_path) == DONE
    assert 'other code' not in capsys.readouterr().out
    summary = read_json(tmp_path / 'summary.json')
    assert summary['code'] == [{'step': 0, **began}, {'step': 6, **running_code()}]
    assert summary['git_commit'] == running_code()['commit']
    assert timeless(tmp_path) == timeless(whole)


def test_old_run_reports_another_commit(whole, corpus, tmp_path, capsys):
    """Its checkpoints and its summary do not record the sources."""
    workdir = sweep_helpers.copy_workdir(whole, tmp_path / 'run')
    summary = read_json(workdir / 'summary.json')
    restore = Checkpoints.restore

    def without_code(checkpoints, shapes):
        state, meta = restore(checkpoints, shapes)
        del meta['counters']['code']
        return state, meta

    for commit, says in ((summary['git_commit'], False), ('a' * 40, True)):
        old_summary = {k: v for k, v in summary.items() if k != 'code'} | {'git_commit': commit}
        write_json(workdir / 'summary.json', seal_record(old_summary))
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(Checkpoints, 'restore', without_code)
            assert train(tiny(corpus), workdir) == DONE
        assert ('this run was trained with commit aaaaaaaa;' in read_stdout(capsys)) is says


def read_stdout(capsys) -> str:
    return ' '.join(capsys.readouterr().out.split())


def test_run_held_by_another_process_is_refused(whole, corpus, monkeypatch):
    monkeypatch.setattr('lm.record.workdir.PATIENCE_SEC', 0.0)
    before = timeless(whole)
    with (
        open_workdir(whole, tiny(corpus), continue_changed=False),
        pytest.raises(InUseError, match=f'another process is training in {whole}'),
    ):
        train(tiny(corpus), whole)
    assert train(tiny(corpus), whole) == DONE
    assert timeless(whole) == before


@pytest.mark.full  # by SIGTERM between two, and by SIGKILL, in the default tier
def test_resuming_is_bitwise_equal(whole, corpus, tmp_path):
    """The same steps of the same schedule, in two processes' worth of state."""
    config = tiny(corpus)
    stop_after(8, config, tmp_path)
    assert timeless(tmp_path)[-1]['step'] == 8
    assert train(config, tmp_path) == DONE
    assert timeless(tmp_path) == timeless(whole)


@pytest.mark.full
def test_killed_run_resumes(whole, corpus, tmp_path):
    """SIGKILL comes before step 11, so that it resumes from step 8 at most."""
    train_until_sigkill(12, corpus, tmp_path)
    assert timeless(tmp_path)
    assert train(tiny(corpus), tmp_path) == DONE
    assert timeless(tmp_path) == timeless(whole)


def stop_after(step: int, config: Config, workdir: Path) -> None:
    """Trains a run that receives SIGTERM while it makes that step."""
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, terminate_at(step))
        assert train(config, workdir) == SIGNALLED + signal.SIGTERM


def test_sigterm_saves_between_checkpoints(whole, corpus, tmp_path, capsys):
    stop_after(6, tiny(corpus), tmp_path)
    assert 'SIGTERM: saved step 6' in capsys.readouterr().out
    assert json.loads((tmp_path / 'summary.json').read_text())['status'] == 'stopped'
    assert train(tiny(corpus), tmp_path) == DONE
    assert 'resuming after step 6' in capsys.readouterr().out
    assert timeless(tmp_path) == timeless(whole)


@pytest.mark.full
@pytest.mark.parametrize(
    'changes',
    [
        {'model_dropout': 0.2, 'model_embedding_dropout': 0.1},
        {'model_reparam': 'lora', 'train_trainable': 'lora', 'optim_average': 'ema'},
    ],
)
def test_auxiliary_state_is_resumed(changes, corpus, tmp_path):
    """Keys of dropout, and an average of trained parameters only. Catches masks that start anew."""
    config = tiny(corpus, **changes)
    assert train(config, tmp_path / 'whole') == DONE
    stop_after(6, config, tmp_path / 'cut')
    assert train(config, tmp_path / 'cut') == DONE
    assert timeless(tmp_path / 'cut') == timeless(tmp_path / 'whole')
    folders = (tmp_path / name / 'checkpoints' for name in ('cut', 'whole'))
    resumed, whole = (read_meta(folder, list_steps(folder)[-1])['digests'] for folder in folders)
    assert resumed == whole


@pytest.mark.full
def test_sigterm_saves_and_reports(corpus, tmp_path):
    process = start_run(tmp_path, corpus, train_steps=50_000)
    wait_for_step(tmp_path, 3, process)
    process.terminate()
    code, stdout = wait_for_command(process)
    assert code == SIGNALLED + signal.SIGTERM
    saved = int(re.search(r'SIGTERM: saved step (\d+)', stdout).group(1))
    assert (tmp_path / 'checkpoints' / str(saved)).is_dir()


@pytest.mark.full
@pytest.mark.parametrize(
    'victim', ['meta/metadata', 'weights/_METADATA', 'training/manifest.ocdbt']
)
def test_damaged_checkpoint_falls_back_with_note(victim, whole, corpus, tmp_path, capsys):
    stop_after(8, tiny(corpus), tmp_path)
    os.truncate(tmp_path / 'checkpoints' / '8' / victim, 3)
    assert train(tiny(corpus), tmp_path) == DONE
    stdout = capsys.readouterr().out
    assert 'checkpoints/8 cannot be read' in stdout and 'resuming after step 4' in stdout
    assert (tmp_path / 'checkpoints_damaged' / '8').is_dir()
    assert timeless(tmp_path) == timeless(whole)


@pytest.mark.full
def test_unfinished_checkpoint_is_ignored(whole, corpus, tmp_path, capsys):
    stop_after(4, tiny(corpus), tmp_path)
    (tmp_path / 'checkpoints' / '6.orbax-checkpoint-tmp').mkdir()
    assert train(tiny(corpus), tmp_path) == DONE
    assert 'resuming after step 4' in capsys.readouterr().out
    assert timeless(tmp_path) == timeless(whole)


@pytest.mark.full
def test_unreadable_run_is_overwritten_only_on_request(whole, corpus, tmp_path):
    stop_after(4, tiny(corpus), tmp_path)
    recorded = (tmp_path / 'metrics.jsonl').read_bytes()
    os.truncate(tmp_path / 'checkpoints' / '4' / 'meta' / 'metadata', 3)
    for _ in range(2):
        with pytest.raises(
            CheckpointsLost, match=r'none of its checkpoints .* \[4\] .* --start_over'
        ):
            train(tiny(corpus), tmp_path)
        assert (tmp_path / 'metrics.jsonl').read_bytes() == recorded
    assert train(tiny(corpus), tmp_path, start_over=True) == DONE
    assert timeless(tmp_path) == timeless(whole)


def test_moved_workdir_is_named_and_resumes(whole, corpus, tmp_path):
    """Nothing is created in its old place, so it may return there."""
    original, moved = tmp_path / 'there', tmp_path / 'here'

    def move(wave):
        journal = wave.slots[0].journal
        if journal.step == 6:
            journal.checkpoints.wait()
            original.rename(moved)

    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, move)
        with pytest.raises(OSError, match=r'there no longer exists .* moved .* is step 4') as e:
            train(tiny(corpus), original)
    assert 'no checkpoint' not in str(e.value) and 'as --workdir' in str(e.value)
    assert not original.exists()
    assert train(tiny(corpus), moved) == DONE
    assert timeless(moved) == timeless(whole)


def test_other_config_is_refused_with_differences(whole, corpus):
    with pytest.raises(ValueError, match=r'optim\.lr: 0\.003 -> 0\.1') as error:
        train(tiny(corpus, optim_lr=0.1), whole)
    assert 'model.' not in str(error.value)


@pytest.mark.full
def test_other_config_continues_with_flag(corpus, tmp_path):
    stop_after(4, tiny(corpus), tmp_path)
    assert train(tiny(corpus, optim_lr=0.0), tmp_path, continue_changed=True) == DONE
    assert timeless(tmp_path)[-2]['lr'] == 0.0


@pytest.mark.full
def test_checkpoint_mismatch_lists_paths(corpus, tmp_path):
    stop_after(4, tiny(corpus), tmp_path)
    other_model = tiny(corpus, model_d_ff=64, model_activation='swiglu', model_placement='post')
    with pytest.raises(ValueError) as error:
        train(other_model, tmp_path, continue_changed=True)
    fields, text = str(error.value).split('does not fit')
    assert 'model.d_ff: 32 -> 64\n' in fields and "model.placement: 'pre' -> 'post'\n" in fields
    assert 'optim.' not in fields and 'train.' not in fields
    assert 'missing  layers/mlp/gate float32[2,16,64]' in text
    assert 'extra    final_norm/scale float32[16]' in text
    assert 'differs  layers/mlp/up: checkpoint float32[2,16,32], model float32[2,16,64]' in text
    assert train(tiny(corpus), tmp_path) == DONE  # the workdir is still that of the first config


@pytest.mark.full
def test_failed_start_leaves_folder_usable(corpus, tmp_path):
    with pytest.raises(ValueError, match=r'Set data\.epochs='):
        train(tiny(corpus, data_epochs=1, train_steps=10_000), tmp_path)
    assert train(tiny(corpus, train_steps=2), tmp_path) == DONE


def test_finished_run_without_checkpoints_is_not_retrained(whole, corpus, tmp_path):
    workdir = sweep_helpers.copy_workdir(whole, tmp_path / 'run')
    shutil.rmtree(workdir / 'checkpoints')
    with pytest.raises(CheckpointsLost, match=r'trained to step 12, .*/checkpoints is empty'):
        train(tiny(corpus), workdir)
    assert timeless(workdir) == timeless(whole)


def test_load_uses_newest_readable_checkpoint(whole, tmp_path):
    workdir, lines = sweep_helpers.copy_workdir(whole, tmp_path / 'run'), []
    (workdir / 'checkpoints' / '12' / 'weights' / 'manifest.ocdbt').unlink()
    assert load(workdir, lines.append).step == 8
    assert len(lines) == 1 and 'checkpoints/12 cannot be read' in lines[0]
    with pytest.raises(ValueError, match='checkpoints/12 cannot be read'):
        load(workdir / 'checkpoints' / '12')
    for step in ('4', '8'):
        shutil.rmtree(workdir / 'checkpoints' / step / 'meta', ignore_errors=True)
    with pytest.raises(ValueError, match='none of the checkpoints'):
        load(workdir, lines.append)


@pytest.mark.full
def test_other_data_is_refused(corpus, tmp_path):
    folder = tmp_path / 'text'
    folder.mkdir()
    for i in range(4):
        (folder / f'{i}.txt').write_text(f'{i} norms ' * 50)
    config = tiny(corpus, data_source=f'text:{folder}/*.txt', data_tokenizer='bpe:300')
    stop_after(4, config, tmp_path / 'run')
    tokenizer = (tmp_path / 'run' / 'tokenizer' / 'tokenizer.json').read_bytes()
    (folder / '0.txt').write_text('other norms ' * 50)
    with pytest.raises(ValueError, match='was trained on data'):
        train(config, tmp_path / 'run')
    assert (tmp_path / 'run' / 'tokenizer' / 'tokenizer.json').read_bytes() == tokenizer
