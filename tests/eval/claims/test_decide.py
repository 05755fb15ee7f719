"""Property: a condition holds or fails where its whole interval says so, and a claim by its
conditions; the records of a study that changed since decide nothing. Reference: differences of arms
against sums by hand.
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from eval.claims import board, evidence, register
from eval.claims.__main__ import read_board
from eval.claims.claim import Claim, Condition, read_claims
from eval.claims.decide import combine_outcomes, decide
from eval.claims.estimates import FAILS, HOLDS, UNDECIDED, Estimate, exact_estimate, mean_over_seeds
from eval.claims.evidence import StudyEvidence, count_cores, open_evidence
from eval.claims.measures.rows import MEASURES
from eval.claims.record import read_record
from eval.claims.train import train_open_claims
from lm.config.resolve import resolve, to_dict
from lm.launch.command import ConfigParser
from lm.storage.files import seal_record, write_json
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import split_sweep
from lm.study.tables.ablation import read_ablation
from lm.study.tables.results import gather, read_sweep
from modules.activations import ACTIVATIONS
from tests import ROOT
from tests.eval import tuned_fixture as tuned
from tests.eval.tuned_fixture import bowl, diverging

LOSSES = {
    'rmsnorm': bowl(3.0, noise=0.005),
    'layernorm': bowl(2.9, noise=0.005, number=1),
    'none': diverging(-99.0, bowl(3.0)),
    'dyt': bowl(3.05, best=30.0, noise=0.005, number=2),
}
ASKED = {'optim.lr': None, 'smallest_effect': 0.02}


@pytest.fixture(scope='module')
def study(tmp_path_factory):
    """Four arms: one is better by 0.1, one diverges, the best rate of one is far out."""
    folder = tmp_path_factory.mktemp('claims') / 'study'
    tuned.write_tuned(folder, LOSSES, ASKED)
    ablation = read_ablation(read_sweep(folder), gather(folder))
    arms = [
        SimpleNamespace(changes=one.changes, name=one.name, is_judged=True) for one in ablation.arms
    ]
    return StudyEvidence('study.py', folder, SimpleNamespace(arms=arms), '', '', ablation)


def condition(arm, low=-math.inf, high=math.inf, against=None, quantity='difference'):
    of = {'arm': {'model.norm': arm}} | ({'against': {'model.norm': against}} if against else {})
    return Condition('whole', quantity, of, low, high)


def claim(*conditions, studies=None):
    texts = dict.fromkeys(('Paper', 'Says', 'Here', 'Counts'), 'some text.')
    return Claim('mine', 'It is so.', texts, 'norms', studies or {'whole': 'study.py'}, conditions)


def decided(study, *conditions):
    return decide(claim(*conditions), {'study.py': study})


class TestAnInterval:
    def test_is_within_or_outside_or_neither(self):
        found = Estimate(0.5, 0.4, 0.6, 5)
        assert found.outcome(0.3, 0.7) == found.outcome(0.4, math.inf) == HOLDS
        assert found.outcome(0.7, 0.9) == found.outcome(-math.inf, 0.3) == FAILS
        assert found.outcome(0.5, 0.9) == found.outcome(0.45, 0.55) == UNDECIDED
        assert (
            exact_estimate(1.0).outcome(1.0, 2.0) == HOLDS
            and exact_estimate(math.nan).outcome(0.0, 1.0) == UNDECIDED
        )

    def test_over_seeds_is_students(self):
        found = mean_over_seeds([1.0, 2.0, 3.0])
        half = 4.302653 / math.sqrt(3)
        np.testing.assert_allclose([found.low, found.high], [2 - half, 2 + half], rtol=1e-6)
        assert (found.n, found.deviation) == (3, 1.0)


@pytest.mark.parametrize(
    'said, wanted',
    [
        ([HOLDS], 'reproduced'),
        ([HOLDS, HOLDS], 'reproduced'),
        ([FAILS], 'not reproduced'),
        ([FAILS, HOLDS], 'in part'),
        ([FAILS, UNDECIDED], 'undecided'),
        ([FAILS, UNDECIDED, HOLDS], 'in part'),  # whatever the second would turn out to be
        ([HOLDS, UNDECIDED], 'undecided'),
    ],
)
def test_a_claim_is_what_its_conditions_are(said, wanted):
    assert combine_outcomes(said) == wanted


class TestOfArms:
    def test_a_difference_is_of_fresh_seeds(self, study):
        (one,) = decided(study, condition('layernorm', high=0.0)).conditions
        first, second = (
            {p.seed: loss for p, loss in arm.fresh_losses.items()}
            for arm in study.ablation.arms[:2]
        )
        pairs = [second[seed] - first[seed] for seed in second]
        np.testing.assert_allclose(one.estimate.value, np.mean(pairs))
        assert one.estimate.n == len(pairs) >= 5
        assert one.estimate.low < -0.1 < one.estimate.high < 0 and one.outcome == HOLDS
        assert one.text == 'loss of layernorm - loss of rmsnorm at most 0 nats per token'

    def test_any_two_arms_are_compared(self, study):
        back = decided(study, condition('rmsnorm', high=0.0, against='layernorm'))
        assert back.verdict == 'not reproduced' and back.conditions[0].estimate.value > 0.05

    def test_what_diverges_is_infinitely_worse(self, study):
        assert decided(study, condition('none', high=0.0)).verdict == 'not reproduced'
        assert decided(study, condition('none', low=0.03)).verdict == 'reproduced'
        assert (
            decided(study, condition('rmsnorm', high=0.0, against='none')).verdict == 'reproduced'
        )

    def test_an_arm_at_an_edge_may_be_better(self, study):
        """The loss there is a bound: it is never found worse."""
        (one,) = decided(study, condition('dyt', low=0.0)).conditions
        assert one.estimate.low == -math.inf and one.outcome == UNDECIDED and one.seeds is None

    def test_seeds_that_would_decide(self, study):
        """A bound beyond the interval's end is undecided, and further from the mean takes fewer."""
        (one,) = decided(study, condition('layernorm', high=0.0)).conditions
        value, low = one.estimate.value, one.estimate.low
        near, far = (
            decided(study, condition('layernorm', low=value - share * (value - low))).conditions[0]
            for share in (0.2, 0.9)
        )
        assert near.outcome == far.outcome == UNDECIDED and 1 < far.seeds < near.seeds

    def test_an_arm_is_named_by_what_it_alone_has(self, study):
        with pytest.raises(ValueError, match=r"study.py has no arm with .*'dit'"):
            decided(study, condition('dit', high=0.0))
        with pytest.raises(ValueError, match=r'study.py has 4 arms with \{\}'):
            study.select_arm({})


def test_a_condition_of_several_studies_says_of_which(study):
    two = claim(condition('layernorm', high=0.0), studies={'whole': 'study.py', 'half': 'half.py'})
    (one,) = decide(two, {'study.py': study, 'half.py': study}).conditions
    assert one.text == 'whole: loss of layernorm - loss of rmsnorm at most 0 nats per token'


def test_an_unfinished_study_decides_nothing(study):
    for state in ('open', 'stale'):
        going = dataclasses.replace(study, state=state, why='stage scan')
        found = decided(going, condition('layernorm', high=0.0))
        assert (found.verdict, found.why) == (state, 'stage scan')


class TestAWithdrawnClaim:
    WHY = 'The arm is not the method.'

    def withdraw(self, study, state=''):
        asked = dataclasses.replace(claim(condition('layernorm', high=0.0)), withdrawn=self.WHY)
        return decide(asked, {'study.py': dataclasses.replace(study, state=state, why=state)})

    @pytest.mark.parametrize('state', ['', 'open', 'stale', 'out of reach here'])
    def test_has_no_verdict_whatever_was_measured(self, study, state):
        assert decided(study, condition('layernorm', high=0.0)).verdict == 'reproduced'
        found = self.withdraw(study, state)
        assert (found.verdict, found.why) == ('withdrawn', self.WHY)
        assert found.conditions[0].estimate.value < -0.05  # what was measured stays

    def test_is_not_counted(self, study):
        found = [self.withdraw(study), decided(study, condition('layernorm', high=0.0))]
        first, second, _ = board.summary_lines(found)
        assert first == '2 claims, of which 1 withdrawn'
        assert second == '1 by training: 1 reproduced'
        kept, withdrawn = board.table_rows(found, {})
        assert (kept['verdict'], withdrawn['verdict']) == ('reproduced', 'withdrawn')
        assert withdrawn['note'] == self.WHY

    def test_says_so_at_the_top_of_its_page_and_in_a_table_of_its_own(self, study, tmp_path):
        index, page, _ = board.write_pages(tmp_path, [self.withdraw(study)], {})
        lines = page.read_text().splitlines()
        assert lines[2] == f'**Withdrawn.** {self.WHY} Below is what was measured.'
        text = '\n'.join(lines)
        assert 'Found:' not in text and 'reproduced' not in text and 'seeds would tell' not in text
        assert '| loss of layernorm - loss of rmsnorm at most 0 nats per token | -0.1' in text
        board_text = index.read_text()
        assert '| withdrawn | -0.1' in board_text.partition('## Withdrawn')[2]
        assert board_text.count('[It is so](mine.md)') == 1  # in no list of verdicts

    def test_waits_for_no_training(self, tmp_path, monkeypatch):
        monkeypatch.chdir(ROOT)
        own = SimpleNamespace(
            name='it', state='open', cost=1.0, command=['-c', 'raise SystemExit(3)']
        )
        train_open_claims([SimpleNamespace(evidence={'it': own}, verdict='withdrawn')])
        with pytest.raises(ValueError, match='ended with status 3'):
            train_open_claims([SimpleNamespace(evidence={'it': own}, verdict='open')])


def test_a_caution_stands_in_the_first_lines(study, tmp_path):
    asked = dataclasses.replace(claim(condition('layernorm', high=0.0)), caution='At one start.')
    found = decide(asked, {'study.py': study})
    _, page, _ = board.write_pages(tmp_path, [found], {})
    assert page.read_text().splitlines()[2] == '**Caution.** At one start.'
    (row,) = board.table_rows([found], {})
    assert (row['verdict'], row['note']) == ('reproduced', 'At one start.')


class TestTheRecordOfABoard:
    def test_makes_the_same_pages_without_the_runs(self, study, tmp_path):
        found = [
            decided(study, condition('dyt', low=0.0)),
            decided(study, condition('none', low=0.03)),
        ]
        names = 'first', 'second'
        found = [
            dataclasses.replace(one, claim=dataclasses.replace(one.claim, name=name))
            for one, name in zip(found, names, strict=True)
        ]
        entries = {'second': {'asked': found[1].claim.digest, 'day': 'a day', 'fresh_seeds': 7}}
        made = board.write_pages(tmp_path / 'runs', found, entries)
        claims = [one.claim for one in found]
        read, known = read_record(tmp_path / 'runs' / 'board.json', claims)
        board.write_pages(tmp_path / 'record', list(read.values()), known)
        assert known == entries
        for path in made:
            assert (tmp_path / 'record' / path.name).read_text() == path.read_text()

    def test_gives_a_withdrawn_claim_no_verdict(self, study, tmp_path):
        found = decided(study, condition('layernorm', high=0.0))
        board.write_pages(tmp_path, [found], {})
        withdrawn = dataclasses.replace(found.claim, withdrawn='It was another arm.')
        read, _ = read_record(tmp_path / 'board.json', [withdrawn])
        assert read['mine'].verdict == 'withdrawn'

    def test_is_of_the_same_conditions(self, study, tmp_path):
        board.write_pages(tmp_path, [decided(study, condition('layernorm', high=0.0))], {})
        other = claim(condition('layernorm', high=0.1))
        assert read_record(tmp_path / 'board.json', [other]) == ({}, {})

    def test_of_another_measure_is_stale(self, tmp_path, monkeypatch):
        """Catches a board that keeps its verdicts whatever computes them now."""
        monkeypatch.chdir(ROOT)
        claims = read_claims(only=['self_normalizing', 'lion_memory'])
        board_json = json.loads((ROOT / 'docs' / 'claims' / 'board.json').read_text())
        board_json['evidence']['measure:memory_of_optimizers']['code'] = 'another'
        write_json(tmp_path / 'board.json', board_json)
        read, _ = read_record(tmp_path / 'board.json', claims)
        assert {name: one.verdict for name, one in read.items()} == {
            'self_normalizing': 'reproduced',
            'lion_memory': 'stale',
        }
        assert (
            read['lion_memory'].why
            == 'measure:memory_of_optimizers has changed since it was computed'
        )

    def test_is_for_what_the_workdir_does_not_have(self, tmp_path, monkeypatch):
        monkeypatch.chdir(ROOT)
        claims = read_claims(only=['self_normalizing', 'lion_memory'])
        record = ROOT / 'docs' / 'claims' / 'board.json'
        found, _ = read_board(claims, tmp_path, record)
        assert [one.verdict for one in found] == ['reproduced', 'reproduced']
        path = tmp_path / TestAMeasure.PATH
        path.parent.mkdir()
        write_json(path, seal_record({'values': {}, 'code': 'another', 'core_seconds': 1.0}))
        found, _ = read_board(claims, tmp_path, record)
        assert [one.verdict for one in found] == ['stale', 'reproduced']

    def test_another_file_is_refused(self, tmp_path):
        write_json(tmp_path / 'plan.json', {'topology': 'v5e:4x4'})
        with pytest.raises(ValueError, match=r'plan.json is no board.json .* it has topology'):
            read_record(tmp_path / 'plan.json', [])


@pytest.mark.full
def test_pages_of_the_project_are_those_of_its_record(tmp_path, monkeypatch):
    """Catches a page that is changed by hand, and a claim whose page was not made again."""
    monkeypatch.chdir(ROOT)
    folder = Path('docs/claims')
    found, entries = read_board(read_claims(), tmp_path / 'none', folder / 'board.json')
    made = tmp_path / 'docs' / 'claims'
    monkeypatch.setattr(board, 'RESULTS', ROOT / board.RESULTS)
    names = {path.name for path in board.write_pages(made, found, entries)}
    assert names == {path.name for path in folder.iterdir()}
    for name in names - {'board.json'}:
        text = (made / name).read_text().replace(os.path.relpath(ROOT, made), '../..')
        assert text == (folder / name).read_text(), name


class TestAMeasure:
    NAME, PATH = 'measure:self_normalizing', 'measures/self_normalizing.json'

    def of(self, **ranges):
        conditions = (
            Condition('it', 'within', {'value': value}, *within) for value, within in ranges.items()
        )
        return claim(*conditions, studies={'it': self.NAME})

    def test_is_open_then_known_then_stale(self, tmp_path, monkeypatch):
        asked = self.of(slope=(-math.inf, 1.0))
        found = decide(asked, {self.NAME: open_evidence(self.NAME, tmp_path)})
        assert (found.verdict, found.why) == ('open', 'it has not been computed')
        values = MEASURES['self_normalizing'].values
        cheap = dataclasses.replace(
            MEASURES['self_normalizing'], function=lambda: [0.8] * len(values)
        )
        monkeypatch.setitem(evidence.MEASURES, 'self_normalizing', cheap)
        monkeypatch.setattr(evidence, 'measure_digest', lambda name: 'a digest')
        evidence.compute_measure('self_normalizing', tmp_path / self.PATH)
        known = open_evidence(self.NAME, tmp_path)
        assert decide(asked, {self.NAME: known}).verdict == 'reproduced'
        monkeypatch.setattr(evidence, 'measure_digest', lambda name: 'another')
        assert open_evidence(self.NAME, tmp_path).state == 'stale'

    def test_has_the_values_it_says(self, tmp_path):
        with pytest.raises(ValueError, match="Did you mean 'slope'"):
            decide(self.of(slop=(0, 1)), {self.NAME: open_evidence(self.NAME, tmp_path)})
        with pytest.raises(ValueError, match='measure'):
            open_evidence('measure:none', tmp_path)

    def test_one_that_was_changed_is_not_read(self, tmp_path):
        path = tmp_path / self.PATH
        path.parent.mkdir()
        write_json(path, {'values': {}, 'code': '', 'core_seconds': 1.0, 'sha256': 'none'})
        with pytest.raises(ValueError, match='changed, or damaged'):
            open_evidence(self.NAME, tmp_path)


class TestAChangedStudy:
    """Runs are of the config that they were trained with, whichever version wrote it down."""

    NAME = 'configs/studies/recipes_tuned.py'

    @pytest.fixture(scope='class')
    def written(self):
        base, sweep, tune = split_sweep(ConfigParser('config').parse(str(ROOT / self.NAME)))
        return to_dict(resolve(base)), ArmPlan(base, sweep, tune).record()

    def state(self, written, tmp_path, monkeypatch, change):
        monkeypatch.chdir(ROOT)
        base, record = json.loads(json.dumps(written))
        change(base, record)
        folder = tmp_path / 'recipes_tuned'
        folder.mkdir()
        write_json(folder / 'sweep.json', {'base': base, 'axes': {}, 'tune': record, 'cells': []})
        own = open_evidence(self.NAME, tmp_path)
        return own.state, own.why

    @pytest.mark.parametrize(
        'change',
        [
            lambda base, tune: None,
            lambda base, tune: base['model'].pop('readout'),  # a field that came later
            lambda base, tune: base['mesh'].update(data=4),
            lambda base, tune: base['model'].update(dtype='bfloat16'),  # auto, on a TPU
            lambda base, tune: tune.pop('search_version'),
        ],
    )
    def test_is_none_where_it_is_the_same_to_train(self, written, tmp_path, monkeypatch, change):
        assert self.state(written, tmp_path, monkeypatch, change)[0] == 'open'

    @pytest.mark.parametrize(
        'change, named',
        [
            (lambda base, tune: base['train'].update(steps=100), 'in train.steps; move'),
            (lambda base, tune: tune.update(seeds=7), 'in config.tune or its arms; move'),
            (lambda base, tune: tune['arms'].pop(), 'in config.tune or its arms; move'),
        ],
    )
    def test_is_stale_and_says_why(self, written, tmp_path, monkeypatch, change, named):
        state, why = self.state(written, tmp_path, monkeypatch, change)
        assert state == 'stale' and named in why


class TestAPod:
    NAME = 'configs/studies/muon_124m.py on v5e:4x4'

    @pytest.fixture
    def opened(self, tmp_path, monkeypatch):
        monkeypatch.chdir(ROOT)
        return lambda: open_evidence(self.NAME, tmp_path)

    def test_is_out_of_reach_until_there_are_runs(self, opened):
        """A study on a pod has the cost of its plan in place of runs."""
        own = opened()
        assert own.state == 'out of reach here' and 'not planned yet' in own.why
        own.plan.parent.mkdir()
        write_json(own.plan, {'topology': 'v5e:4x4', 'chip_hours': 100.0, 'waves': (3, 5)})
        of = {'arm': {'optim.name': 'muon'}}
        asked = claim(Condition('pod', 'speedup', of, 1.5, math.inf), studies={'pod': self.NAME})
        found = decide(asked, {self.NAME: opened()})
        assert found.verdict == 'out of reach here'
        assert found.why == '300 to 500 chip-hours of v5e:4x4 would decide'
        (row,) = board.table_rows([found], {})
        assert row['note'] == found.why
        own.folder.mkdir()  # of a pod's runs, which are not read
        write_json(own.folder / 'sweep.json', {'base': {}})
        with pytest.raises(ValueError):
            opened()

    def test_has_a_plan_of_what_would_be_trained(self, opened):
        own = opened()
        base, sweep, _ = split_sweep(ConfigParser('config').parse(own.config))
        other = ArmPlan(base, sweep, {'optim.lr': None, 'seeds': 3})
        assert dataclasses.replace(own, arms=other).plan != own.plan
        assert dataclasses.replace(own, topology='v6e:4x4').plan != own.plan
        assert f'--out={own.plan}' in own.plan_command

    def test_is_planned_and_not_trained(self, tmp_path, monkeypatch):
        """--run makes the plans that are missing, each once."""
        monkeypatch.chdir(ROOT)
        plan, runs = tmp_path / 'plans' / 'it.json', tmp_path / 'runs'
        code = f'open({str(runs)!r}, "a").write("x"); open({str(plan)!r}, "w")'
        own = SimpleNamespace(
            name='it', state='out of reach here', plan=plan, plan_command=['-c', code]
        )
        found = [SimpleNamespace(evidence={'it': own}, verdict='out of reach here')] * 2
        train_open_claims(found)
        train_open_claims(found)
        assert runs.read_text() == 'x'
        with pytest.raises(ValueError, match='ended with status 3'):
            own.plan, own.plan_command = tmp_path / 'none', ['-c', 'raise SystemExit(3)']
            train_open_claims(found)


@pytest.mark.full
def test_a_broken_method_is_not_reproduced(tmp_path, monkeypatch):
    """SELU with alpha of ELU has no such fixed point: the claim of the project says so then."""
    ranges = {'variance_behind_32_layers_of_selu': (0.9, 1.1)}
    asked = TestAMeasure().of(**ranges)
    for fn, wanted in ((ACTIVATIONS['selu'].fn, 'reproduced'), (jax_elu, 'not reproduced')):
        row = dataclasses.replace(ACTIVATIONS['selu'], fn=fn)
        monkeypatch.setitem(ACTIVATIONS, 'selu', row)
        path = tmp_path / TestAMeasure.PATH
        evidence.compute_measure('self_normalizing', path)
        found = decide(asked, {TestAMeasure.NAME: open_evidence(TestAMeasure.NAME, tmp_path)})
        assert found.verdict == wanted


def jax_elu(x):
    return 1.0507 * np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


@pytest.mark.parametrize(
    'device, cores', [('2-core x86_64 CPU', 2), ('8 x TPU v5e', 8), ('CPU', 1), (None, 1)]
)
def test_cores_of_a_device(device, cores):
    assert count_cores(device) == cores


class TestTheRecord:
    def test_says_what_counted_and_whether_the_outcome_was_there(self, study, tmp_path):
        one = claim(condition('layernorm', high=0.0))
        begun = dataclasses.replace(study, ablation=None)
        entries = register.add_entries(tmp_path, [one], {'study.py': begun})
        assert register.entry_note(one, entries) == ''
        assert (
            register.add_entries(tmp_path, [one], {'study.py': study}) == entries
        )  # the first counts
        changed = dataclasses.replace(one, conditions=[condition('layernorm', high=0.1)])
        assert 'what counts was changed after' in register.entry_note(changed, entries)
        late = register.add_entries(tmp_path / 'late', [one], {'study.py': study})
        assert f'{study.fresh_runs} fresh runs had ended' in register.entry_note(one, late)
        assert study.fresh_runs >= 10 and register.read_entries(tmp_path) == entries


class TestTheBoard:
    def test_rows_are_by_verdict(self, study):
        found = [
            decided(study, condition('layernorm', high=-9.0)),
            decided(study, condition('layernorm', high=0.0)),
        ]
        rows = board.table_rows(found, {})
        assert [row['verdict'] for row in rows] == ['reproduced', 'not reproduced']
        assert rows[0]['effect'].startswith('-0.1') and rows[0]['runs'] == study.runs
        first, second, third = board.summary_lines(found)
        assert (first, second) == ('2 claims', '2 by training: 1 reproduced, 1 not reproduced')
        assert third.startswith(f'{study.runs} runs of studies and 0 measures')  # each once

    def test_what_trains_nothing_is_counted_apart(self, study, tmp_path):
        trained, computed = 'measure:bigrams', 'measure:memory_of_optimizers'
        found = [decided(study, condition('layernorm', high=0.0))]
        for name, value in (
            (trained, 'excess_of_moving_average_over_noise_contrastive'),
            (computed, 'state_of_lion_over_adamw_of_llama_1b'),
        ):
            asked = claim(
                Condition('it', 'within', {'value': value}, 0.0, 1.0), studies={'it': name}
            )
            found.append(decide(asked, {name: open_evidence(name, tmp_path)}))
        assert board.summary_lines(found)[1:3] == [
            '2 by training: 1 reproduced, 1 open',
            '1 by computing alone: 1 open',
        ]
        assert [row['by'] for row in board.table_rows(found, {})] == [
            'training',
            'training',
            'computing alone',
        ]

    def test_pages_say_what_differs_before_what_was_found(self, study, tmp_path):
        one = decided(study, condition('dyt', low=0.0))
        index, page, _ = board.write_pages(tmp_path, [one], {})
        text = page.read_text()
        assert text.index('What differs here') < text.index('Found: undecided')
        assert 'loss of dyt - loss of rmsnorm at least 0 nats per token' in text
        assert 'unknown' in text and 'a finer or wider search of the rate' in text
        assert 'python train.py --config=study.py' in text
        board_text = index.read_text()
        assert '[It is so](mine.md)' in board_text and '### Norms' in board_text
        assert '## What has no place here' in board_text and 'HELM' in board_text
        json.dumps(board.table_rows([one], {}))
