"""Stored results. Contract: results are read again, computed again, or refused."""

import json
import math
import shutil
from typing import Annotated

import jax.numpy as jnp
import numpy as np
import pytest

from eval.evaluation import kept
from eval.evaluation.program import evaluate_checkpoints
from eval.evaluation.suite_flags import read_suites
from eval.evaluation.targets import evaluate_all, find_targets
from eval.suites import SUITES
from eval.suites.base import Suite, SuiteResult, Table
from lm.record import digests
from lm.record.checkpoint import list_steps
from lm.record.remote.mirror import mirror_workdir
from lm.storage.buckets import open_bucket
from lm.storage.files import read_json, seal_record
from modules.options import Option

NUMBERS = {'loss': 1.5, 'nothing': math.nan, 'far': math.inf, 'below': -math.inf, 'count': 3}


@pytest.fixture
def calls(monkeypatch):
    """The steps at which two suites, which compute nothing, were called."""
    steps: list[int] = []

    def fake(checkpoint, *, size: Annotated[int, Option('of nothing', 0)] = 1) -> SuiteResult:
        """Returns fixed numbers."""
        steps.append(checkpoint.step)
        columns = {'item': ['a', 'b'], 'score': np.array([0.5, np.nan])}
        tables = {'A table': Table({'x': [1, 2], 'y': jnp.array([size, 4.0])}, 'x', 'y')}
        return SuiteResult(
            NUMBERS | {'size': np.float32(size), 'step': checkpoint.step}, columns, tables
        )

    monkeypatch.setitem(SUITES, 'fake', Suite(fake, argument='size', score='score'))
    monkeypatch.setitem(SUITES, 'other', Suite(fake))
    return steps


@pytest.fixture
def workdir(whole, tmp_path):
    """A copy of a run that tests may change."""
    return shutil.copytree(whole, tmp_path / 'run')


def evaluations(paths, suites='fake', step=None, again=False, say=lambda line: None):
    requests = read_suites(suites, {})
    targets = find_targets([str(path) for path in paths], step, say)
    return list(evaluate_all(targets, requests, again, say))


def is_same(first, second) -> bool:
    """Returns whether two nested structures are equal, with nan equal to nan."""
    return json.dumps(kept.to_json(first)) == json.dumps(kept.to_json(second))


def test_result_is_read_back(workdir, calls):
    (first,) = evaluations([workdir], 'fake:2')
    messages = []
    (second,) = evaluations([workdir], 'fake:2', say=messages.append)
    assert len(calls) == 1 and 'stored result from' in messages[0]
    computed, stored = first.results['fake:2'], second.results['fake:2']
    assert is_same(computed.numbers, stored.numbers) and is_same(computed.items, stored.items)
    assert math.isnan(stored.numbers['nothing']) and stored.numbers['below'] == -math.inf
    assert math.isnan(stored.items['score'][1]) and stored.tables['A table'].columns['y'] == [2, 4]
    (path,) = (workdir / 'evaluations' / str(first.step)).iterdir()
    json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    record = read_json(path)
    assert record['versions']['jax'] and record['config'] and record['options'] == {'size': 2}


@pytest.mark.full
def test_other_requests_are_computed(workdir, calls):
    (first,) = evaluations([workdir])
    for arguments in ({'suites': 'fake:7'}, {'suites': 'other'}, {'again': True}):
        before = len(calls)
        evaluations([workdir], **arguments)
        assert len(calls) == before + 1, arguments
    (path,) = (workdir / 'evaluations' / str(first.step)).glob('other-*')
    record = {k: v for k, v in read_json(path).items() if k != 'checkpoint'}
    path.write_text(json.dumps(seal_record(record | {'checkpoint': 'another'})))
    evaluations([workdir], 'other')
    assert len(calls) == 5


def test_truncated_result_is_computed_again(workdir, calls):
    evaluations([workdir])
    (path,) = (workdir / 'evaluations').glob('*/fake-*')
    path.write_text(path.read_text().replace('1.5', '1.4'))
    messages = []
    (evaluation,) = evaluations([workdir], say=messages.append)
    assert evaluation.results['fake'].numbers['loss'] == 1.5 and 'computing it again' in messages[0]
    assert len(calls) == 2 and read_json(path)['numbers']['loss'] == 1.5


@pytest.mark.full
def test_killed_evaluation_resumes_at_next_step(workdir, calls, monkeypatch):
    steps = list_steps(workdir / 'checkpoints')
    assert len(steps) > 1
    function = SUITES['fake'].function

    def stop_at_second(
        checkpoint, *, size: Annotated[int, Option('of nothing', 0)] = 1
    ) -> SuiteResult:
        """Raises at the second step."""
        if checkpoint.step == steps[1]:
            raise KeyboardInterrupt
        return function(checkpoint, size=size)

    monkeypatch.setitem(SUITES, 'fake', Suite(stop_at_second, argument='size'))
    with pytest.raises(KeyboardInterrupt):
        evaluations([workdir], step='all')
    monkeypatch.setitem(SUITES, 'fake', Suite(function, argument='size'))
    evaluated = evaluations([workdir], step='all')
    assert [evaluation.step for evaluation in evaluated] == steps == calls
    assert [evaluation.results['fake'].numbers['step'] for evaluation in evaluated] == steps


def test_readonly_folder_is_reported(workdir, calls):
    (workdir / 'evaluations').write_text('a file')
    messages = []
    (evaluation,) = evaluations([workdir], say=messages.append)
    assert evaluation.results['fake'].numbers['loss'] == 1.5
    assert any('could not be stored in the workdir' in line for line in messages)


def test_missing_steps_are_refused(workdir, calls):
    steps = list_steps(workdir / 'checkpoints')
    assert [evaluation.step for evaluation in evaluations([workdir], step=str(steps[0]))] == steps[
        :1
    ]
    named = workdir / 'checkpoints' / str(steps[1])
    assert [evaluation.step for evaluation in evaluations([named])] == steps[1:2]
    listed = ', '.join(map(str, steps))
    for path, step, message in (
        (workdir, '5', f'has no checkpoint of step 5; its steps are {listed}$'),
        (workdir, 'last', "--step must be a step number or 'all'; got 'last'"),
        (named, '5', 'already names a step'),
        (workdir / 'tokenizer', None, 'has no checkpoint'),
        (workdir / 'checkpoints' / '5', None, 'has no checkpoint'),
    ):
        with pytest.raises(ValueError, match=message):
            find_targets([str(path)], step, print)
    with pytest.raises(ValueError, match=r'--checkpoint names .* twice'):
        find_targets([str(workdir), str(workdir)], None, print)


@pytest.mark.full
def test_damaged_checkpoint_is_skipped(workdir, calls):
    steps = list_steps(workdir / 'checkpoints')
    for file in (workdir / 'checkpoints' / str(steps[-1]) / 'weights').rglob('*'):
        if file.is_file():
            file.write_bytes(b'')
    messages = []
    assert [evaluation.step for evaluation in evaluations([workdir], say=messages.append)] == steps[
        -2:-1
    ]
    assert 'cannot be read' in messages[0] and messages[0].endswith('using the previous checkpoint')
    messages.clear()
    assert [
        evaluation.step for evaluation in evaluations([workdir], step='all', say=messages.append)
    ] == steps[:-1]
    assert any(line.endswith('skipped') for line in messages)
    with pytest.raises(ValueError, match=r'cannot be read \(') as caught:
        evaluations([workdir], step=str(steps[-1]))
    assert '\n' not in str(caught.value)


def test_weights_from_another_architecture_are_refused(workdir):
    """The record's config has a wider model than the arrays."""
    step = list_steps(workdir / 'checkpoints')[-1]
    path = workdir / 'checkpoints' / str(step) / 'meta' / 'metadata'
    meta = json.loads(path.read_text())['record']
    meta['config']['model']['d_ff'] = 48
    path.write_text(json.dumps({'record': meta, 'sha256': digests.hash_record(meta)}))
    with pytest.raises(ValueError, match=r'mlp/up: checkpoint .*32\], model .*48\]'):
        evaluations([workdir], 'perplexity', step=str(step))


@pytest.mark.full
def test_sweep_evaluates_cells_and_seed_spread(workdir, tmp_path, calls, monkeypatch):
    """Two copies of a run stand for two seeds, with numbers that differ by 2."""
    sweep = tmp_path / 'sweep'
    for name in ('one', 'two'):
        shutil.copytree(workdir, sweep / name)
    (sweep / 'sweep.json').write_text('{}')

    def measure_by_cell(checkpoint) -> SuiteResult:
        """Increases with the step, from a different value in each cell."""
        start = 10.0 if checkpoint.path.parents[1].name == 'one' else 12.0
        return SuiteResult({'score': start + checkpoint.step, 'n': 7})

    monkeypatch.setitem(SUITES, 'seeded', Suite(measure_by_cell))
    json_path = tmp_path / 'out' / 'all.json'
    messages = []
    _, text = evaluate_checkpoints(
        [str(sweep)],
        read_suites('seeded', {}),
        step='all',
        json_path=json_path,
        say=messages.append,
    )
    steps = list_steps(workdir / 'checkpoints')
    head, score, count = (line.split() for line in text.splitlines())
    assert head[:2] == ['suite', 'number'] and head[-4:] == ['std', 'signal', 'to', 'noise']
    assert score[:3] == ['seeded', 'score', f'{11 + steps[0]}'] and count[-1] == '7'
    record = json.loads(json_path.read_text())
    assert len(record['evaluations']) == 2 * len(steps)
    trace = record['traces'][0]
    assert (trace['monotonicity'], trace['seed_std']) == (1, pytest.approx(math.sqrt(2)))
    mean = 11 + np.mean(steps)
    assert trace['signal_to_noise'] == pytest.approx(mean / math.sqrt(2))
    page = json_path.with_suffix('.html').read_text()
    assert 'id="traces_0"' in page and '<h2>seeded</h2>' in page
    assert messages[-1] == f'page: {json_path.with_suffix(".html")}'


@pytest.mark.full
def test_bucket_checkpoints_are_evaluated_without_storing(whole, bucket_url, calls):
    with mirror_workdir(bucket_url) as workdir:
        shutil.copytree(whole, workdir, dirs_exist_ok=True)
    before, messages = [*open_bucket(bucket_url).list()], []
    requests, steps = read_suites('fake', {}), list_steps(whole / 'checkpoints')
    evaluate_checkpoints([bucket_url], requests, step='all', say=messages.append)
    _, text = evaluate_checkpoints([bucket_url], requests, step=str(steps[0]), say=messages.append)
    assert json.loads(text)['step'] == steps[0] and calls == [*steps, steps[0]]
    assert sum('--out=FILE.json to keep the numbers' in line for line in messages) == 2
    assert [*open_bucket(bucket_url).list()] == before
    with pytest.raises(ValueError, match='has no checkpoint'):
        find_targets([bucket_url], '5', print)


@pytest.mark.parametrize(
    ('paths', 'message'),
    [
        ({'json_path': 'a.html'}, '^--out must end in .json; got a.html$'),
        ({'json_path': 'a.json', 'page_path': 'a.json'}, '^--page must end in .html; got a.json$'),
        ({'json_path': 's3://b/a.json'}, '^--out=s3://b/a.json must be a path on this machine'),
    ],
)
def test_page_does_not_replace_numbers(paths, message):
    """The paths are refused before a checkpoint is looked for."""
    with pytest.raises(ValueError, match=message):
        evaluate_checkpoints(['nothing'], [], **paths)
