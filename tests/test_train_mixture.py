"""The training program on a mixture: its records and output for each source.

Equivalence: resumed = uninterrupted, a sweep's cell = the run alone, evaluated later = recorded.
"""

import json
import math
import os
import subprocess
import sys

import pytest

from lm.config.resolve import resolve, update_recipe
from lm.record.metrics import read_rows
from tests.commands import ROOT, command, start_run, tiny, wait_for_command
from tests.sweep_helpers import base, cell_folders, timeless
from tests.xla import ONE_DEVICE
from train import DONE, train, train_sweep

pytestmark = (
    pytest.mark.full
)  # eight runs and their processes; tests/lm/data/test_mixed.py has the numbers

SHARES = {'first': 0.75, 'again': 0.25}  # whose names, sorted, are in another order


@pytest.fixture(scope='module')
def corpus(tmp_path_factory):
    """Returns the fields of config.data that name two folders of text and their cache."""
    folder = tmp_path_factory.mktemp('corpus')
    words = {'first': ['norm', 'layer', 'head'], 'again': ['token', 'scale', 'depth', 'width']}
    for name, of_source in words.items():
        (folder / name).mkdir()
        for i in range(30):
            text = ' '.join(
                of_source[(i * i + j * j * (i + 1)) % len(of_source)] for j in range(60)
            )
            (folder / name / f'{i}.txt').write_text(f'{name} {i} {text}')
    mixture = {name: (share, f'text:{folder}/{name}/*.txt') for name, share in SHARES.items()}
    return {'data.mixture': repr(mixture), 'data.cache_dir': str(folder / 'cache')}


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory):
    """Returns a run of the program, and its output."""
    folder = tmp_path_factory.mktemp('runs') / 'whole'
    process = start_run(folder, corpus, train_eval_objectives='causal+infill')
    code, stdout = wait_for_command(process)
    assert code == DONE, stdout
    return folder, stdout


def test_reference_loss_is_mean_over_sources(whole):
    """Weighted by their shares; in each evaluation. Catches the share of one source on another's
    loss.
    """
    rows = [row for row in read_rows(whole[0] / 'metrics.jsonl') if 'validation_ce' in row]
    assert len(rows) == 3
    for row in rows:
        losses = {name: row[f'validation_{name}_ce'] for name in SHARES}
        mean = sum(SHARES[name] * losses[name] for name in SHARES)
        assert abs(losses['first'] - losses['again']) > 1e-3
        assert row['validation_ce'] == pytest.approx(mean, rel=1e-12)
        assert row['perplexity'] == pytest.approx(math.exp(mean))
        assert 'validation_infill_ce' in row


def test_reference_bits_per_byte_is_mean_over_sources(whole):
    summary = json.loads((whole[0] / 'summary.json').read_text())
    bits = 0
    for name, share in SHARES.items():
        counts = summary['data']['sources'][name]['validation']
        targets = counts['tokens'] - counts['documents']  # all but BOS
        ce = summary[f'validation_{name}_ce']
        bits += share * ce / math.log(2) * targets / counts['bytes']
    assert summary['bits_per_byte'] == pytest.approx(bits, rel=1e-12)


def test_each_source_is_described_and_evaluated(whole):
    stdout = whole[1]
    for name, share in SHARES.items():
        assert f'  {name}: {share} of the sequences; ' in stdout
    last = [line for line in stdout.splitlines() if 'validation loss' in line][-1]
    assert last.index(' first ') < last.index(' again ') < last.index(' infill ')
    assert 'before a source repeats' in stdout


def test_equivalence_resumed_run(whole, corpus, tmp_path):
    config = tiny(corpus, train_eval_objectives='causal+infill', optim_schedule='constant')
    assert train(config, tmp_path / 'whole') == DONE
    assert train(update_recipe(config, {'train.steps': 8}), tmp_path / 'parts') == DONE
    assert train(config, tmp_path / 'parts', continue_changed=True) == DONE
    assert timeless(tmp_path / 'parts') == timeless(tmp_path / 'whole')


def test_repeated_command_finds_run_and_data(whole, corpus):
    code, stdout = wait_for_command(
        start_run(whole[0], corpus, train_eval_objectives='causal+infill')
    )
    assert code == DONE and 'nothing left to do' in stdout and 'preparing' not in stdout


def test_different_shares_are_different_data(whole, corpus):
    """A run does not resume with another mixture."""
    changed = corpus | {'data.mixture': corpus['data.mixture'].replace('0.75', '0.5')}
    code, stdout = wait_for_command(
        start_run(whole[0], changed, train_eval_objectives='causal+infill')
    )
    assert code != DONE and 'data.mixture' in stdout


def test_equivalence_evaluated_later(whole):
    """`python -m eval` needs only the folder."""
    completed = subprocess.run(
        [sys.executable, '-m', 'eval', f'--checkpoint={whole[0]}', '--suite=perplexity,ngram'],
        cwd=ROOT,
        env={**os.environ, 'XLA_FLAGS': ONE_DEVICE, 'JAX_PLATFORMS': 'cpu'},
        text=True,
        capture_output=True,
        check=True,
    )
    evaluated = json.loads(completed.stdout)
    recorded = json.loads((whole[0] / 'summary.json').read_text())
    names = ['validation_ce', 'bits_per_byte', *(f'validation_{name}_ce' for name in SHARES)]
    for name in names:
        assert evaluated['perplexity'][name] == pytest.approx(recorded[name], rel=1e-6)
    counts = recorded['data']['validation']
    assert evaluated['ngram']['bytes'] == evaluated['perplexity']['bytes'] == counts['bytes']
    assert 0 < evaluated['ngram']['ngram5_bits_per_byte'] < 8


def test_equivalence_sweep_cells_and_single_runs(corpus, tmp_path):
    mixtures = tuple(corpus['data.mixture'].replace('0.75', weight) for weight in ('0.75', '0.5'))
    raw = base(corpus)
    assert train_sweep(raw, {'data.mixture': mixtures}, tmp_path / 'sweep') == DONE
    for changes, folder in cell_folders(tmp_path / 'sweep').items():
        raw['data']['mixture'] = json.loads(changes)['data.mixture']
        workdir = tmp_path / folder.name
        assert train(resolve(raw), workdir) == DONE
        assert timeless(folder) == timeless(workdir)


def test_repeating_source_is_refused(corpus, tmp_path):
    line = command(tmp_path, corpus, data_epochs=1, train_steps=5000)
    completed = subprocess.run(line, cwd=ROOT, text=True, capture_output=True, check=False)
    assert completed.returncode == 1 and 'Traceback' not in completed.stderr
    assert 'in data.mixture, which has' in completed.stderr
