"""Rules of transfer against tuned rates of known optima, and the program that prints them."""

import json

import pytest

from configs.studies import batch_rules
from eval.rules import print_predictions
from lm.study.tables.ablation import read_ablation
from lm.study.tables.predictions import UNTESTED, compare_predictions, summarise_predictions
from lm.study.tables.results import gather, read_sweep
from modules.scaling.transfer import TunedSettings, transfer_settings
from tests.eval.programs import run_module
from tests.eval.sweep_fixture import base_config
from tests.eval.tuned_fixture import bowl, write_tuned

BASE = base_config()['data']['batch_size']
# At four times the batch the best rate is twice as high, as by `sqrt`; at 16 times it is the same.
LOSSES = {BASE: bowl(2.0), 4 * BASE: bowl(1.9, best=1.0), 16 * BASE: bowl(1.8)}


def write_batches(folder, settings=None):
    write_tuned(folder, LOSSES, settings or {'optim.lr': None}, field='data.batch_size')


def read_rows(folder):
    sweep = read_sweep(folder)
    return compare_predictions(sweep, read_ablation(sweep, gather(folder)))


def test_predictions_are_held_against_the_tuned_rates(tmp_path):
    """Property: with known optima `sqrt` is right once and two octaves too high once. Rules with
    settings that the arms lack are not tested.
    """
    write_batches(tmp_path)
    rows = {(row['rule'], row['batch']): row for row in read_rows(tmp_path)}
    right, high = rows['sqrt', 'x 4'], rows['sqrt', 'x 16']
    assert right['verdict'] == 'within' and right['octaves off'] == pytest.approx(0, abs=0.2)
    assert high['verdict'] == 'too high' and high['octaves off'] == pytest.approx(2, abs=0.2)
    assert all(rows['sde', ratio]['verdict'].startswith(UNTESTED) for ratio in ('x 4', 'x 16'))
    assert 'hyper_p' not in {rule for rule, _ in rows}
    lines = {line.split(':')[0]: line for line in summarise_predictions(list(rows.values()))}
    assert '1 of 2 within' in lines['sqrt'] and 'not tested' in lines['sde']


def test_program_prints_and_writes_predictions(tmp_path, capsys):
    sweep, path = tmp_path / 'sweep', tmp_path / 'predictions.json'
    write_batches(sweep)
    print_predictions(str(sweep), str(path))
    text, _ = capsys.readouterr()
    assert 'sqrt: 1 of 2 within' in text and 'hyper_p' not in text
    assert json.loads(path.read_text())['predictions'][0]['rule'] == 'sqrt'


@pytest.mark.full
def test_program_refuses_sizes_beside_a_sweep(tmp_path):
    write_batches(tmp_path)
    assert run_module('eval.rules', f'--workdir={tmp_path}').returncode == 0
    refused = run_module('eval.rules', f'--workdir={tmp_path}', '--tokens=1e9')
    assert refused.returncode == 1
    assert '--workdir has all sizes; leave --tokens out' in refused.stderr


@pytest.mark.parametrize('rule', ['sqrt', 'sde', 'sdew'])
def test_study_follows_the_rules(rule):
    tuned = TunedSettings(batch_rules.LR, batch_rules.WEIGHT_DECAY, batch_rules.B2, batch_rules.EPS)
    for ratio in batch_rules.RATIOS:
        settings = transfer_settings(rule, tuned, ratio)
        for path, value in batch_rules.rule_settings(rule, ratio).items():
            assert getattr(settings, path.removeprefix('optim.')) == pytest.approx(value)


def test_sweeps_without_other_sizes_are_refused(tmp_path):
    write_tuned(tmp_path / 'norms', {'layernorm': bowl(2.0), 'none': bowl(2.1)}, {'optim.lr': None})
    with pytest.raises(ValueError, match='nothing to predict'):
        read_rows(tmp_path / 'norms')
    write_batches(tmp_path / 'two', {'optim.lr': None, 'optim.weight_decay': None})
    with pytest.raises(ValueError, match=r'must tune optim.lr alone; it tunes optim.lr, optim.w'):
        read_rows(tmp_path / 'two')
