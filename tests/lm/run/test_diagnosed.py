"""Contract: the records of diagnosed runs, side by side and after a stop."""

import json

import numpy as np
import pytest

from eval.report.page import write_report
from lm.config.resolve import resolve
from lm.record.metrics import read_rows
from lm.run.warnings import Detector
from lm.storage.files import read_json
from tests.sweep_helpers import (
    base,
    before_step,
    cell_folders,
    summary,
    terminate_at,
    timeless,
    write_corpus,
)
from train import DONE, train_sweep

# A sweep with all diagnostics: a minute.
pytestmark = [pytest.mark.full, pytest.mark.usefixtures('programs_once')]

STEADY, BROKEN = {'optim.lr': 0.003}, {'optim.lr': 0.3}
CHANGES = {'train_diagnose_every': 3, 'train_eval_every': 0, 'model_norm': 'none'}
CHANGES |= {'optim_schedule': 'constant'}


@pytest.fixture(scope='module')
def sweep(tmp_path_factory, programs_once):
    """Returns the folder of both runs side by side, stopped after step 5 and resumed."""
    folder = tmp_path_factory.mktemp('sweep')
    config = base(write_corpus(folder), **CHANGES)
    with pytest.MonkeyPatch.context() as patch:
        before_step(patch, terminate_at(5))
        train_sweep(config, [STEADY, BROKEN], folder / 'two')
    assert not (folder / 'two' / 'report.html').exists()
    assert train_sweep(config, [STEADY, BROKEN], folder / 'two') == DONE
    return folder / 'two'


def read_diagnosis(folder, changes):
    rows = timeless(cell_folders(folder)[json.dumps(changes)])
    return [row for row in rows if 'log_z_mean' in row]


def test_rows_hold_layer_and_head_values(sweep):
    """Rows at the start, every third step and the end have them. All numbers are finite in a steady
    run, and strict JSON in a diverging run.
    """
    rows = read_diagnosis(sweep, STEADY)
    assert [row['step'] for row in rows] == [0, 3, 6, 8]
    for row in rows:
        assert np.shape(row['attention_entropy_share']) == (2, 2)
        assert np.shape(row['residual_rms']) == (2,)
        assert all(np.isfinite(np.array(value, float)).all() for value in row.values())
    text = (cell_folders(sweep)[json.dumps(BROKEN)] / 'metrics.jsonl').read_text()
    assert 'NaN' not in text and 'Infinity' not in text


def test_summary_has_warnings_from_its_run(sweep):
    assert summary(sweep, STEADY)['warnings'] == []
    warnings = summary(sweep, BROKEN)['warnings']
    kinds = {warning['kind'] for warning in warnings}
    assert {'largest_logit', 'log_z_drift'} <= kinds
    assert len({(w['kind'], w['layer']) for w in warnings}) == len(warnings)
    assert all(warning['help'] and warning['seen'] for warning in warnings)


@pytest.mark.full
def test_report_has_warnings(sweep):
    text = write_report(sweep).with_suffix('.md').read_text()
    assert '## Warnings' in text and 'largest logit' in text


def test_warnings_follow_from_rows(sweep):
    """Warnings survive the stop: catches a detector that forgets the start of its run, counters
    that lose warnings, and a warning that is given again.
    """
    for changes in (STEADY, BROKEN):
        folder = cell_folders(sweep)[json.dumps(changes)]
        watch = Detector(resolve(read_json(folder / 'config.json')), [])
        rows = read_rows(folder / 'metrics.jsonl')
        assert summary(sweep, changes)['warnings'] == [
            warning for row in rows for warning in watch.detect(row)
        ]
        last = read_diagnosis(sweep, changes)[-1]
        for name in ('log_z_mean', 'update_ratio_embedding'):
            assert summary(sweep, changes)[name] == last[name]
