"""Runs in stages: resumed at each boundary, beside other runs, rolled back, and without stages.

Equivalence: an interruption anywhere, other runs at its side, and stages that change nothing change
no number.
"""

import dataclasses
import signal

import jax
import numpy as np
import pytest

from lm.record.checkpoint import list_steps, read_meta
from lm.record.metrics import read_rows
from lm.run.program import Program
from lm.storage.files import read_json
from lm.training.step import make_train_step
from tests.commands import tiny, train_until_sigkill
from tests.helpers import initial_state, packed_batch, tiny_config, tiny_learner
from tests.sweep_helpers import (
    RTOL,
    assert_close,
    base,
    before_step,
    cell_folders,
    poison_at,
    statuses,
    terminate_at,
    timeless,
    write_corpus,
)
from train import DONE, SIGNALLED, train, train_sweep

pytestmark = pytest.mark.usefixtures('programs_once')

# Of 12 steps, 4 have 64 tokens, 4 have 128 and 4 have 256.
RAMP = '256: seq_len=8; 768: microbatches=2; 1: batch_size=16 lr_factor=1.5'
STAGES = {'train_stages': RAMP, 'train_checkpoint_every': 3}
HALVES = {'train_stages': '0.5: lr_factor=2; 1:', 'train_checkpoint_every': 3}


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    return write_corpus(tmp_path_factory.mktemp('corpus'))


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """Returns the folder of a run in three stages, with its output."""
    folder = tmp_path_factory.mktemp('whole')
    assert train(tiny(corpus, **STAGES), folder) == DONE
    return folder


def stop_after(step, config, workdir):
    """Trains a run that receives SIGTERM while it makes that step."""
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, terminate_at(step))
        assert train(config, workdir) == SIGNALLED + signal.SIGTERM


def list_step_rows(folder):
    return [row for row in timeless(folder) if 'loss' in row]


@pytest.mark.full
def test_stages_that_change_nothing_compile_the_plain_step():
    """To the letter, and with stages that only change other steps it is the same function."""
    plain, equal = (tiny_config({'train.stages': t}) for t in (None, '0.5: batch_size=8; 1:'))

    def lower(config, **options):
        step = make_train_step(tiny_learner(config), **options)
        arguments = initial_state(config), packed_batch(), {}
        hyper = {path: np.float32(value) for path, value in config.traced_values.items()}
        return jax.jit(step).lower(*arguments[:2], hyper).as_text()

    assert lower(equal) == lower(plain) == lower(plain, microbatches=1)
    assert lower(plain, microbatches=2) == lower(tiny_config({'train.microbatches': 2}))


@pytest.mark.full
def test_equivalence_resumed_at_a_boundary(corpus, tmp_path):
    """Two stages with one compiled step; the first ends at step 6 of 12."""
    config = tiny(corpus, **HALVES)
    assert train(config, tmp_path / 'whole') == DONE
    rows = timeless(tmp_path / 'whole')
    stop_after(6, config, tmp_path / 'stopped')
    assert train(config, tmp_path / 'stopped') == DONE
    assert timeless(tmp_path / 'stopped') == rows
    rates = [row['lr'] for row in rows if 'lr' in row]
    assert rates[5] > 1.5 * rates[6]


@pytest.mark.full
def test_equivalence_resumed_at_each_boundary(whole, corpus, tmp_path):
    """Before, at and after: with batches of three sizes, and of microbatches."""
    config, rows = tiny(corpus, **STAGES), timeless(whole)
    for step in (3, 4, 5, 7, 8, 9, 11):
        folder = tmp_path / str(step)
        stop_after(step, config, folder)
        assert train(config, folder) == DONE
        assert timeless(folder) == rows


@pytest.mark.full
def test_killed_run_resumes(whole, corpus, tmp_path):
    """SIGKILL comes in the third stage; the newest whole checkpoint is of the second or third."""
    train_until_sigkill(11, corpus, tmp_path, **STAGES)
    assert timeless(tmp_path)
    assert train(tiny(corpus, **STAGES), tmp_path) == DONE
    assert timeless(tmp_path) == timeless(whole)
    folders = [folder / 'checkpoints' for folder in (tmp_path, whole)]
    resumed, uninterrupted = (read_meta(f, list_steps(f)[-1])['digests'] for f in folders)
    assert resumed == uninterrupted


@pytest.mark.full
def test_records_count_stage_tokens(whole, corpus):
    """All rows are full but the last of the text, and BOS is no target."""
    config = tiny(corpus, **STAGES)
    rows = list_step_rows(whole)
    tokens = np.diff([0, *(row['tokens'] for row in rows)])
    sizes = [stage.shape.tokens for stage in config.stages for _ in range(stage.start, stage.stop)]
    assert [stage.stop for stage in config.stages] == [4, 8, 12] and len(tokens) == 12
    share = tokens / sizes
    assert np.all(share <= 1) and np.all(share > 0.8)
    summary = read_json(whole / 'summary.json')
    assert summary['tokens'] == tokens.sum() and summary['step'] == 12


@pytest.mark.full
def test_all_steps_are_compiled_before_the_first(corpus, tmp_path, monkeypatch, capsys):
    """And only those that are to come, after a restart in the last stage."""
    compiled = []
    original = Program.compile_step.__wrapped__

    def compile_step(program, slots, shape=None):
        compiled.append(dataclasses.astuple(shape))
        return original(program, slots, shape)

    monkeypatch.setattr(Program, 'compile_step', compile_step)
    config = tiny(corpus, **STAGES)
    counts = []
    with monkeypatch.context() as patch:
        before_step(patch, lambda wave: counts.append(len(compiled)))
        stop_after(10, config, tmp_path)
    assert {*counts} == {3} and {*compiled} == {(8, 8, 1), (8, 16, 2), (16, 16, 1)}
    lines = capsys.readouterr().out
    assert 'stage 3 of 3: 16 rows of 16 tokens' in lines and '8 x 8 ' in lines
    compiled.clear()
    assert train(config, tmp_path) == DONE
    assert compiled == [(16, 16, 1)]


@pytest.mark.full
@pytest.mark.parametrize('run_axis', ['loop', 'vmap'])
def test_equivalence_runs_in_a_wave(run_axis, whole, corpus, tmp_path, monkeypatch):
    """A run that is rolled back to an earlier stage trains alone until it has caught up."""
    tree = base(corpus, **TREE, kernels_run_axis=run_axis)
    seeds = [{'train.seed': seed} for seed in range(3)]
    assert train_sweep(tree, seeds, tmp_path / 'plain') == DONE
    folders = [*cell_folders(tmp_path / 'plain').values()]
    tolerance = 0.0 if run_axis == 'loop' else RTOL
    assert_close(timeless(folders[0]), timeless(whole), tolerance)
    with monkeypatch.context() as patch:
        before_step(patch, poison_at(6, 1))
        rollback = {'train_on_divergence': 'rollback'}
        tree = base(corpus, **TREE | rollback, kernels_run_axis=run_axis)
        assert train_sweep(tree, seeds, tmp_path / 'rolled') == DONE
    assert statuses(tmp_path / 'rolled') == ['done'] * 3
    rolled = [timeless(folder) for folder in cell_folders(tmp_path / 'rolled').values()]
    for i, folder in enumerate(folders):
        assert_close(
            rolled[i][: 3 if i == 1 else None], timeless(folder)[: 3 if i == 1 else None], tolerance
        )
    steps = [row['step'] for row in rolled[1] if 'loss' in row]
    assert steps == [*range(1, 13)]


TREE = STAGES | {
    'train_steps': 12,
    'optim_warmup_steps': 5,
    'data_prefetch': 2,
    'data_validation_fraction': 0.2,
}


@pytest.mark.full
def test_short_rows_and_documents_on_eight_devices(corpus, tmp_path):
    """Equal to one device up to rounding: masks, packing, microbatches and objectives."""
    changes = {
        'train_stages': '0.3: seq_len=8 batch_size=16; 1: microbatches=2 batch_size=16',
        'data_mask_documents': True,
        'data_packing': 'best_fit',
        'data_objective': 'causal:0.5+infill:0.5',
    }
    for devices in (1, 8):
        config = tiny(corpus, **changes, mesh_data=devices)
        assert train(config, tmp_path / str(devices)) == DONE
    single, eight = (timeless(tmp_path / str(n)) for n in (1, 8))
    assert_close(eight, single, 1e-4)


@pytest.mark.full
def test_longer_run_is_noted(whole, corpus, tmp_path):
    """A run that is continued with other stages keeps its step, as with another batch."""
    config = tiny(corpus, **STAGES)
    stop_after(5, config, tmp_path)
    longer = tiny(corpus, **STAGES | {'train_steps': 16})
    with pytest.raises(ValueError, match=r'train.steps'):
        train(longer, tmp_path)
    assert train(longer, tmp_path, continue_changed=True) == DONE
    rows = read_rows(tmp_path / 'metrics.jsonl')
    assert [row['step'] for row in rows if 'loss' in row] == [*range(1, 17)]
    assert list_step_rows(tmp_path)[3]['loss'] == list_step_rows(whole)[3]['loss']
