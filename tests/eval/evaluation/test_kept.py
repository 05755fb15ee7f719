"""Results beside checkpoints. Contract: what is read again, computed anew, and refused."""

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
    """The steps of the checkpoints that two suites, which compute nothing, were asked about."""
    found: list[int] = []

    def fake(checkpoint, *, size: Annotated[int, Option('of nothing', 0)] = 1) -> SuiteResult:
        """Returns numbers that are known."""
        found.append(checkpoint.step)
        items = {'item': ['a', 'b'], 'score': np.array([0.5, np.nan])}
        tables = {'A table': Table({'x': [1, 2], 'y': jnp.array([size, 4.0])}, 'x', 'y')}
        return SuiteResult(
            NUMBERS | {'size': np.float32(size), 'step': checkpoint.step}, items, tables
        )

    monkeypatch.setitem(SUITES, 'fake', Suite(fake, argument='size', score='score'))
    monkeypatch.setitem(SUITES, 'other', Suite(fake))
    return found


@pytest.fixture
def workdir(whole, tmp_path):
    """A copy of a run, to be changed."""
    return shutil.copytree(whole, tmp_path / 'run')


def evaluations(paths, suites='fake', step=None, again=False, say=lambda line: None):
    asked = read_suites(suites, {})
    targets = find_targets([str(path) for path in paths], step, say)
    return list(evaluate_all(targets, asked, again, say))


def same(one, other) -> bool:
    """Whether values are equal, nan to nan."""
    return json.dumps(kept.to_json(one)) == json.dumps(kept.to_json(other))


def test_a_result_is_read_again_as_it_was(workdir, calls):
    (first,) = evaluations([workdir], 'fake:2')
    said = []
    (second,) = evaluations([workdir], 'fake:2', say=said.append)
    assert len(calls) == 1 and 'is read from' in said[0]
    one, other = first.results['fake:2'], second.results['fake:2']
    assert same(one.numbers, other.numbers) and same(one.items, other.items)
    assert math.isnan(other.numbers['nothing']) and other.numbers['below'] == -math.inf
    assert math.isnan(other.items['score'][1]) and other.tables['A table'].columns['y'] == [2, 4]
    (path,) = (workdir / 'evaluations' / str(first.step)).iterdir()
    json.loads(path.read_text(), parse_constant=pytest.fail)  # NaN is no JSON
    record = read_json(path)
    assert record['versions']['jax'] and record['config'] and record['options'] == {'size': 2}


@pytest.mark.full
def test_other_options_and_again_and_other_checkpoints_compute(workdir, calls):
    (first,) = evaluations([workdir])
    for more in ({'suites': 'fake:7'}, {'suites': 'other'}, {'again': True}):
        before = len(calls)
        evaluations([workdir], **more)
        assert len(calls) == before + 1, more
    (path,) = (workdir / 'evaluations' / str(first.step)).glob('other-*')
    record = {k: v for k, v in read_json(path).items() if k != 'checkpoint'}
    path.write_text(json.dumps(seal_record(record | {'checkpoint': 'another'})))
    evaluations([workdir], 'other')
    assert len(calls) == 5


def test_what_was_cut_is_computed_anew(workdir, calls):
    evaluations([workdir])
    (path,) = (workdir / 'evaluations').glob('*/fake-*')
    path.write_text(path.read_text().replace('1.5', '1.4'))
    said = []
    (found,) = evaluations([workdir], say=said.append)
    assert found.results['fake'].numbers['loss'] == 1.5 and 'computed anew' in said[0]
    assert len(calls) == 2 and read_json(path)['numbers']['loss'] == 1.5


def test_killed_halfway_it_goes_on_at_the_next_step(workdir, calls, monkeypatch):
    steps = list_steps(workdir / 'checkpoints')
    assert len(steps) > 1
    function = SUITES['fake'].function

    def killed(checkpoint, *, size: Annotated[int, Option('of nothing', 0)] = 1) -> SuiteResult:
        """Ends at the second step."""
        if checkpoint.step == steps[1]:
            raise KeyboardInterrupt
        return function(checkpoint, size=size)

    monkeypatch.setitem(SUITES, 'fake', Suite(killed, argument='size'))
    with pytest.raises(KeyboardInterrupt):
        evaluations([workdir], step='all')
    monkeypatch.setitem(SUITES, 'fake', Suite(function, argument='size'))
    found = evaluations([workdir], step='all')
    assert [one.step for one in found] == steps == calls
    assert [one.results['fake'].numbers['step'] for one in found] == steps


def test_a_folder_that_cannot_be_written_is_said(workdir, calls):
    (workdir / 'evaluations').write_text('a file')
    said = []
    (found,) = evaluations([workdir], say=said.append)
    assert found.results['fake'].numbers['loss'] == 1.5
    assert any('is not kept beside the checkpoint' in line for line in said)


def test_steps_are_named_and_those_that_are_not_there_refused(workdir, calls):
    steps = list_steps(workdir / 'checkpoints')
    assert [one.step for one in evaluations([workdir], step=str(steps[0]))] == steps[:1]
    named = workdir / 'checkpoints' / str(steps[1])
    assert [one.step for one in evaluations([named])] == steps[1:2]
    listed = ', '.join(map(str, steps))
    for path, step, said in (
        (workdir, '5', f'has no checkpoint of --step=5; there are {listed}$'),
        (workdir, 'last', "--step is a number of updates, or all; got 'last'"),
        (named, '5', 'names a step itself'),
        (workdir / 'tokenizer', None, 'holds no checkpoint'),
        (workdir / 'checkpoints' / '5', None, 'holds no checkpoint'),
    ):
        with pytest.raises(ValueError, match=said):
            find_targets([str(path)], step, print)
    with pytest.raises(ValueError, match='is given twice'):
        find_targets([str(workdir), str(workdir)], None, print)


@pytest.mark.full
def test_half_a_checkpoint_is_passed_over_where_there_are_others(workdir, calls):
    steps = list_steps(workdir / 'checkpoints')
    for file in (workdir / 'checkpoints' / str(steps[-1]) / 'weights').rglob('*'):
        if file.is_file():
            file.write_bytes(b'')
    said = []
    assert [one.step for one in evaluations([workdir], say=said.append)] == steps[-2:-1]
    assert 'cannot be read' in said[0] and said[0].endswith('taking the one before')
    said.clear()
    assert [one.step for one in evaluations([workdir], step='all', say=said.append)] == steps[:-1]
    assert any(line.endswith('left out') for line in said)
    with pytest.raises(ValueError, match=r'cannot be read \(') as caught:
        evaluations([workdir], step=str(steps[-1]))
    assert '\n' not in str(caught.value)


def test_weights_of_another_architecture_are_refused_with_the_differences(workdir):
    """A record whose config is of a wider model than the arrays."""
    step = list_steps(workdir / 'checkpoints')[-1]
    path = workdir / 'checkpoints' / str(step) / 'meta' / 'metadata'
    meta = json.loads(path.read_text())['record']
    meta['config']['model']['d_ff'] = 48
    path.write_text(json.dumps({'record': meta, 'sha256': digests.hash_record(meta)}))
    with pytest.raises(ValueError, match=r'mlp/up: checkpoint .*32\], model .*48\]'):
        evaluations([workdir], 'perplexity', step=str(step))


@pytest.mark.full
def test_a_sweep_is_its_cells_and_seeds_have_a_spread(workdir, tmp_path, calls, monkeypatch):
    """Two copies of a run stand for two seeds, whose number differs by 2."""
    sweep = tmp_path / 'sweep'
    for name in ('one', 'two'):
        shutil.copytree(workdir, sweep / name)
    (sweep / 'sweep.json').write_text('{}')

    def seeded(checkpoint) -> SuiteResult:
        """Rises with the step, from another place in each cell."""
        start = 10.0 if checkpoint.path.parents[1].name == 'one' else 12.0
        return SuiteResult({'score': start + checkpoint.step, 'n': 7})

    monkeypatch.setitem(SUITES, 'seeded', Suite(seeded))
    out = tmp_path / 'out' / 'all.json'
    said = []
    text = evaluate_checkpoints(
        [str(sweep)], read_suites('seeded', {}), step='all', json_path=out, say=said.append
    )
    steps = list_steps(workdir / 'checkpoints')
    head, score, count = (line.split() for line in text.splitlines())
    assert head[:2] == ['suite', 'number'] and head[-4:] == ['std', 'signal', 'to', 'noise']
    assert score[:3] == ['seeded', 'score', f'{11 + steps[0]}'] and count[-1] == '7'
    found = json.loads(out.read_text())
    assert len(found['evaluations']) == 2 * len(steps)
    trace = found['traces'][0]
    assert (trace['monotonicity'], trace['seed_std']) == (1, pytest.approx(math.sqrt(2)))
    mean = 11 + np.mean(steps)
    assert trace['signal_to_noise'] == pytest.approx(mean / math.sqrt(2))
    page = out.with_suffix('.html').read_text()
    assert 'id="traces_0"' in page and '<h2>seeded</h2>' in page
    assert said[-1] == f'page: {out.with_suffix(".html")}'


@pytest.mark.full
def test_checkpoints_of_a_bucket_are_evaluated_and_nothing_is_kept(whole, bucket_url, calls):
    with mirror_workdir(bucket_url) as workdir:
        shutil.copytree(whole, workdir, dirs_exist_ok=True)
    before, said = [*open_bucket(bucket_url).list()], []
    asked, steps = read_suites('fake', {}), list_steps(whole / 'checkpoints')
    evaluate_checkpoints([bucket_url], asked, step='all', say=said.append)
    text = evaluate_checkpoints([bucket_url], asked, step=str(steps[0]), say=said.append)
    assert json.loads(text)['step'] == steps[0] and calls == [*steps, steps[0]]
    assert sum('--out=FILE.json keeps the numbers' in line for line in said) == 2
    assert [*open_bucket(bucket_url).list()] == before
    with pytest.raises(ValueError, match='holds no checkpoint'):
        find_targets([bucket_url], '5', print)
