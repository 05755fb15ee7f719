"""Property: a condition holds or fails if its whole interval does, and a claim by its conditions;
records of a study that changed since decide nothing. Reference: differences of arms against sums by
hand.
"""

import dataclasses
import json
import math
import os
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest

from eval.claims import board, evidence, page, register
from eval.claims.__main__ import read_board, read_unfinished
from eval.claims.claim import Condition, read_claims
from eval.claims.decide import combine_outcomes, count_needed_seeds, decide
from eval.claims.estimates import FAILS, HOLDS, UNDECIDED, Estimate, exact_estimate, mean_over_seeds
from eval.claims.evidence import count_cores, open_evidence
from eval.claims.measures.rows import MEASURES
from eval.claims.record import read_record
from eval.claims.train import train_open_claims
from lm.config.resolve import resolve, to_dict
from lm.launch.command import ConfigParser
from lm.storage.files import seal_record, write_json
from lm.study.plan.arms import ArmPlan
from lm.study.plan.cells import split_sweep
from lm.study.statistics import MAX_SEEDS, seeds_needed
from modules.activations import ACTIVATIONS
from tests import ROOT
from tests.eval.claims.builders import claim, condition


def decide_conditions(study, *conditions):
    return decide(claim(*conditions), {'study.py': study})


class TestEstimate:
    def test_outcome_is_holds_fails_or_undecided(self):
        estimate = Estimate(0.5, 0.4, 0.6, 5)
        assert estimate.outcome(0.3, 0.7) == estimate.outcome(0.4, math.inf) == HOLDS
        assert estimate.outcome(0.7, 0.9) == estimate.outcome(-math.inf, 0.3) == FAILS
        assert estimate.outcome(0.5, 0.9) == estimate.outcome(0.45, 0.55) == UNDECIDED
        assert (
            exact_estimate(1.0).outcome(1.0, 2.0) == HOLDS
            and exact_estimate(math.nan).outcome(0.0, 1.0) == UNDECIDED
        )

    def test_mean_over_seeds_has_student_interval(self):
        estimate = mean_over_seeds([1.0, 2.0, 3.0])
        half = 4.302653 / math.sqrt(3)
        np.testing.assert_allclose([estimate.low, estimate.high], [2 - half, 2 + half], rtol=1e-6)
        assert (estimate.n, estimate.deviation) == (3, 1.0)


@pytest.mark.parametrize(
    'outcomes, expected',
    [
        ([HOLDS], 'reproduced'),
        ([HOLDS, HOLDS], 'reproduced'),
        ([FAILS], 'not reproduced'),
        ([FAILS, HOLDS], 'partly reproduced'),
        ([FAILS, UNDECIDED], 'undecided'),
        (
            [FAILS, UNDECIDED, HOLDS],
            'partly reproduced',
        ),  # whatever the second would turn out to be
        ([HOLDS, UNDECIDED], 'undecided'),
    ],
)
def test_verdict_combines_outcomes(outcomes, expected):
    assert combine_outcomes(outcomes) == expected


class TestStudyEvidence:
    def test_difference_uses_fresh_seeds(self, study):
        (outcome,) = decide_conditions(study, condition('layernorm', high=0.0)).conditions
        first, second = (
            {point.seed: loss for point, loss in arm.fresh_losses.items()}
            for arm in study.ablation.arms[:2]
        )
        pairs = [second[seed] - first[seed] for seed in second]
        np.testing.assert_allclose(outcome.estimate.value, np.mean(pairs))
        assert outcome.estimate.n == len(pairs) >= 5
        assert outcome.estimate.low < -0.1 < outcome.estimate.high < 0 and outcome.outcome == HOLDS
        assert outcome.text == 'loss of layernorm - loss of rmsnorm at most 0 nats per token'

    def test_compares_any_two_arms(self, study):
        reverse = decide_conditions(study, condition('rmsnorm', high=0.0, against='layernorm'))
        assert reverse.verdict == 'not reproduced' and reverse.conditions[0].estimate.value > 0.05

    def test_diverged_arm_is_infinitely_worse(self, study):
        assert decide_conditions(study, condition('none', high=0.0)).verdict == 'not reproduced'
        assert decide_conditions(study, condition('none', low=0.03)).verdict == 'reproduced'
        assert (
            decide_conditions(study, condition('rmsnorm', high=0.0, against='none')).verdict
            == 'reproduced'
        )

    def test_arm_at_edge_may_be_better(self, study):
        """The loss there is a bound: the arm is never found worse."""
        (outcome,) = decide_conditions(study, condition('dyt', low=0.0)).conditions
        assert (
            outcome.estimate.low == -math.inf
            and outcome.outcome == UNDECIDED
            and outcome.seeds is None
        )

    def test_counts_deciding_seeds(self, study):
        """A bound beyond the interval's end is undecided; one further from the mean takes fewer
        seeds.
        """
        (outcome,) = decide_conditions(study, condition('layernorm', high=0.0)).conditions
        value, low = outcome.estimate.value, outcome.estimate.low
        near, far = (
            decide_conditions(
                study, condition('layernorm', low=value - share * (value - low))
            ).conditions[0]
            for share in (0.2, 0.9)
        )
        assert near.outcome == far.outcome == UNDECIDED and 1 < far.seeds < near.seeds

    def test_skewed_intervals_count_seeds(self):
        """Seeds alone skew an interval on a logit or log scale. An end of 0 is unknown."""
        tested = Condition('it', 'within', {'value': 'x'}, 0.95, math.inf)
        skewed = Estimate(0.958, 0.919, 0.978, 5, 0.0223)
        assert count_needed_seeds(skewed, tested, UNDECIDED) == seeds_needed(0.008, 0.0223) > 50
        unknown = dataclasses.replace(skewed, low=0.0)
        assert count_needed_seeds(unknown, tested, UNDECIDED) is None
        tuned = dataclasses.replace(tested, quantity='difference')
        assert count_needed_seeds(skewed, tuned, UNDECIDED) is None
        close = dataclasses.replace(skewed, value=0.9501)
        assert count_needed_seeds(close, tested, UNDECIDED) == MAX_SEEDS + 1

    def test_selects_arm_by_unique_changes(self, study):
        with pytest.raises(
            ValueError, match=r"'dit'.* must select one arm of study.py, but no arm has"
        ):
            decide_conditions(study, condition('dit', high=0.0))
        with pytest.raises(
            ValueError, match=r'\{\} must select one arm of study.py, but 4 arms have'
        ):
            study.select_arm({})


def test_condition_names_its_study(study):
    claim_of_two_studies = claim(
        condition('layernorm', high=0.0), studies={'whole': 'study.py', 'half': 'half.py'}
    )
    (outcome,) = decide(claim_of_two_studies, {'study.py': study, 'half.py': study}).conditions
    assert outcome.text == 'whole: loss of layernorm - loss of rmsnorm at most 0 nats per token'


def test_unfinished_study_decides_nothing(study):
    verdicts = {
        'open': 'not yet tested',
        'stale': 'stale',
        'out of reach here': 'infeasible here',  # states are in published files
    }
    for state, verdict in verdicts.items():
        unfinished = dataclasses.replace(study, state=state, why='stage scan')
        decision = decide_conditions(unfinished, condition('layernorm', high=0.0))
        assert (decision.verdict, decision.why) == (verdict, 'stage scan')
        assert decision.is_unfinished


class TestWithdrawnClaim:
    WHY = 'The arm is not the method.'

    def withdraw(self, study, state=''):
        withdrawn_claim = dataclasses.replace(
            claim(condition('layernorm', high=0.0)), withdrawn=self.WHY
        )
        return decide(
            withdrawn_claim, {'study.py': dataclasses.replace(study, state=state, why=state)}
        )

    @pytest.mark.parametrize('state', ['', 'open', 'stale', 'out of reach here'])
    def test_decision_is_withdrawn_with_reason(self, study, state):
        assert decide_conditions(study, condition('layernorm', high=0.0)).verdict == 'reproduced'
        decision = self.withdraw(study, state)
        assert (decision.verdict, decision.why) == ('withdrawn', self.WHY)
        assert decision.conditions[0].estimate.value < -0.05  # what was measured stays

    def test_withdrawn_claim_is_not_counted(self, study):
        decisions = [
            self.withdraw(study),
            decide_conditions(study, condition('layernorm', high=0.0)),
        ]
        first, second, *_ = board.summary_lines(decisions)
        assert first == '2 claims, 1 of them withdrawn'
        assert second == '1 tested on language models on text: 1 reproduced'
        standing, withdrawn = board.table_rows(decisions, {})
        assert (standing['verdict'], withdrawn['verdict']) == ('reproduced', 'withdrawn')
        assert withdrawn['note'] == self.WHY

    def test_page_and_index_show_withdrawal(self, study, tmp_path):
        index, page, _ = board.write_pages(tmp_path, [self.withdraw(study)], {})
        lines = page.read_text().splitlines()
        assert lines[2].startswith(f'**Withdrawn.** {self.WHY} The numbers below')
        text = '\n'.join(lines)
        assert '## Verdict: withdrawn' in lines
        assert 'reproduced' not in text and 'seeds would decide' not in text
        quantity = 'loss of layernorm - loss of rmsnorm (nats per token)'
        assert f'| {quantity} | -0.1' in text
        board_text = index.read_text()
        assert f'[It is so](mine.md) | {self.WHY} |' in board_text.partition('## Withdrawn')[2]
        assert board_text.count('[It is so](mine.md)') == 1  # in no list of verdicts

    def test_needs_no_training(self, tmp_path, monkeypatch):
        monkeypatch.chdir(ROOT)
        open_study = SimpleNamespace(
            name='it', state='open', cost=1.0, command=['-c', 'raise SystemExit(3)']
        )
        train_open_claims([SimpleNamespace(evidence={'it': open_study}, verdict='withdrawn')])
        with pytest.raises(ValueError, match='exited with status 3'):
            train_open_claims([SimpleNamespace(evidence={'it': open_study}, verdict='stale')])


def test_row_shows_the_undecided_condition(study, tmp_path):
    """A condition that holds does not tell why a claim is undecided."""
    holding, undecided = condition('layernorm', high=0.0), condition('layernorm', high=-0.1)
    bounds = '] | loss of layernorm - loss of rmsnorm (nats per token): at most'
    for conditions, end in (((holding, undecided), -0.1), ((holding,), 0)):
        decision = decide(claim(*conditions), {'study.py': study})
        index, *_ = board.write_pages(tmp_path, [decision], {})
        assert f'{bounds} {end} |' in index.read_text()


def test_caution_is_in_first_lines(study, tmp_path):
    cautioned = dataclasses.replace(
        claim(condition('layernorm', high=0.0)), caution='At one start. The other differs.'
    )
    decision = decide(cautioned, {'study.py': study})
    index, page, _ = board.write_pages(tmp_path, [decision], {})
    assert page.read_text().splitlines()[2] == '**Caution.** At one start. The other differs.'
    (row,) = board.table_rows([decision], {})
    assert (row['verdict'], row['note']) == ('reproduced', 'At one start. The other differs.')
    assert '| At one start |' in index.read_text()  # the board has the first sentence


class TestBoardRecord:
    def test_reproduces_pages_without_runs(self, study, tmp_path):
        decisions = [
            decide_conditions(study, condition('dyt', low=0.0)),
            decide_conditions(study, condition('none', low=0.03)),
        ]
        names = 'first', 'second'
        decisions = [
            dataclasses.replace(decision, claim=dataclasses.replace(decision.claim, name=name))
            for decision, name in zip(decisions, names, strict=True)
        ]
        entries = {'second': {'asked': decisions[1].claim.digest, 'day': 'a day', 'fresh_seeds': 7}}
        pages = board.write_pages(tmp_path / 'runs', decisions, entries)
        claims = [decision.claim for decision in decisions]
        recorded, recorded_entries = read_record(tmp_path / 'runs' / 'board.json', claims)
        board.write_pages(tmp_path / 'record', list(recorded.values()), recorded_entries)
        assert recorded_entries == entries
        for path in pages:
            assert (tmp_path / 'record' / path.name).read_text() == path.read_text()

    def test_changed_criterion_stays_registered(self, tmp_path):
        """A new workdir must not register it as new."""
        (lion,) = read_claims(only=['lion_memory'])
        rows = {'asked': 'x', 'entry': {'asked': 'x', 'day': 'a day', 'fresh_seeds': 0}}
        record = tmp_path / 'board.json'
        write_json(record, {'evidence': {}, 'claims': {'lion_memory': rows}})
        (decision,), entries = read_board([lion], tmp_path / 'runs', record)
        assert decision.verdict == 'not yet tested'
        note = register.entry_note(lion, entries)
        assert note == 'the criterion was changed after it was recorded on a day'

    def test_withdrawn_claim_has_no_verdict(self, study, tmp_path):
        decision = decide_conditions(study, condition('layernorm', high=0.0))
        board.write_pages(tmp_path, [decision], {})
        withdrawn = dataclasses.replace(decision.claim, withdrawn='It was another arm.')
        recorded, _ = read_record(tmp_path / 'board.json', [withdrawn])
        assert recorded['mine'].verdict == 'withdrawn'

    def test_omits_changed_conditions(self, study, tmp_path):
        board.write_pages(
            tmp_path, [decide_conditions(study, condition('layernorm', high=0.0))], {}
        )
        changed_claim = claim(condition('layernorm', high=0.1))
        assert read_record(tmp_path / 'board.json', [changed_claim]) == ({}, {})

    def test_changed_measure_is_stale(self, tmp_path, monkeypatch):
        """Catches a board that keeps its verdicts after the code changed."""
        monkeypatch.chdir(ROOT)
        claims = read_claims(only=['self_normalizing', 'lion_memory'])
        board_json = json.loads((ROOT / 'docs' / 'claims' / 'board.json').read_text())
        board_json['evidence']['measure:memory_of_optimizers']['code'] = 'another'
        write_json(tmp_path / 'board.json', board_json)
        recorded, _ = read_record(tmp_path / 'board.json', claims)
        assert {name: decision.verdict for name, decision in recorded.items()} == {
            'self_normalizing': 'reproduced',
            'lion_memory': 'stale',
        }
        assert (
            recorded['lion_memory'].why
            == 'the code of measure:memory_of_optimizers has changed since it was computed'
        )

    def test_workdir_overrides_record(self, tmp_path, monkeypatch):
        monkeypatch.chdir(ROOT)
        claims = read_claims(only=['self_normalizing', 'lion_memory'])
        record = ROOT / 'docs' / 'claims' / 'board.json'
        decisions, _ = read_board(claims, tmp_path, record)
        assert [decision.verdict for decision in decisions] == ['reproduced', 'reproduced']
        path = tmp_path / TestMeasureEvidence.PATH
        path.parent.mkdir()
        write_json(path, seal_record({'values': {}, 'code': 'another', 'core_seconds': 1.0}))
        decisions, _ = read_board(claims, tmp_path, record)
        assert [decision.verdict for decision in decisions] == ['stale', 'reproduced']

    def test_recorded_open_claims_can_be_trained(self, tmp_path, monkeypatch):
        """Catches training by the evidence of a record, which has neither cost nor plan."""
        monkeypatch.chdir(ROOT)
        claims = read_claims(only=['alibi', 'frozen_features'])
        record = json.loads((ROOT / 'docs' / 'claims' / 'board.json').read_text())
        record['evidence']['configs/studies/frozen_tuned.py']['state'] = 'open'
        write_json(tmp_path / 'open.json', record)
        decisions, _ = read_board(claims, tmp_path, tmp_path / 'open.json')
        (unfinished,) = read_unfinished(claims, tmp_path, decisions)
        assert unfinished.claim.name == 'frozen_features'
        assert all(study.cost > 0 for study in unfinished.evidence.values())

    def test_other_file_raises(self, tmp_path):
        write_json(tmp_path / 'plan.json', {'topology': 'v5e:4x4'})
        with pytest.raises(
            ValueError, match=r'plan.json must be a board.json .* its keys are topology'
        ):
            read_record(tmp_path / 'plan.json', [])


@pytest.mark.full
def test_project_pages_match_record(tmp_path, monkeypatch):
    """Catches a page that was edited by hand, and a claim without a new page."""
    monkeypatch.chdir(ROOT)
    folder = Path('docs/claims')
    decisions, entries = read_board(read_claims(), tmp_path / 'none', folder / 'board.json')
    rendered = tmp_path / 'docs' / 'claims'
    monkeypatch.setattr(page, 'RESULTS', ROOT / page.RESULTS)
    names = {path.name for path in board.write_pages(rendered, decisions, entries)}
    assert names == {path.name for path in folder.iterdir()}
    for name in names - {'board.json'}:
        text = (rendered / name).read_text()
        for place, link in ((ROOT / 'docs', '..'), (ROOT, '../..')):
            text = text.replace(os.path.relpath(place, rendered), link)
        assert text == (folder / name).read_text(), name


class TestMeasureEvidence:
    NAME, PATH = 'measure:self_normalizing', 'measures/self_normalizing.json'

    def claim_within(self, **ranges):
        conditions = (
            Condition('it', 'within', {'value': value}, *bounds) for value, bounds in ranges.items()
        )
        return claim(*conditions, studies={'it': self.NAME})

    def test_evidence_is_open_then_computed_then_stale(self, tmp_path, monkeypatch):
        measured_claim = self.claim_within(slope=(-math.inf, 1.0))
        decision = decide(measured_claim, {self.NAME: open_evidence(self.NAME, tmp_path)})
        assert (decision.verdict, decision.why) == ('not yet tested', 'it has not been computed')
        values = MEASURES['self_normalizing'].values
        cheap = dataclasses.replace(
            MEASURES['self_normalizing'], function=lambda: [0.8] * len(values)
        )
        monkeypatch.setitem(evidence.MEASURES, 'self_normalizing', cheap)
        monkeypatch.setattr(evidence, 'measure_digest', lambda name: 'a digest')
        evidence.compute_measure('self_normalizing', tmp_path / self.PATH)
        computed = open_evidence(self.NAME, tmp_path)
        # It has neither a control nor a twin.
        assert decide(measured_claim, {self.NAME: computed}).verdict == 'not checked'
        monkeypatch.setattr(evidence, 'measure_digest', lambda name: 'another')
        assert open_evidence(self.NAME, tmp_path).state == 'stale'

    def test_unknown_value_raises(self, tmp_path):
        with pytest.raises(ValueError, match="Did you mean 'slope'"):
            decide(self.claim_within(slop=(0, 1)), {self.NAME: open_evidence(self.NAME, tmp_path)})
        with pytest.raises(ValueError, match='measure'):
            open_evidence('measure:none', tmp_path)

    def test_edited_record_raises(self, tmp_path):
        path = tmp_path / self.PATH
        path.parent.mkdir()
        write_json(path, {'values': {}, 'code': '', 'core_seconds': 1.0, 'sha256': 'none'})
        with pytest.raises(ValueError, match='changed or damaged'):
            open_evidence(self.NAME, tmp_path)


class TestChangedStudy:
    """Runs belong to the config that they were trained with, whichever version wrote it."""

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
        changed_study = open_evidence(self.NAME, tmp_path)
        return changed_study.state, changed_study.why

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
    def test_equivalent_config_is_unchanged(self, written, tmp_path, monkeypatch, change):
        assert self.state(written, tmp_path, monkeypatch, change)[0] == 'open'

    @pytest.mark.parametrize(
        'change, reason',
        [
            (lambda base, tune: base['train'].update(steps=100), ': train.steps. Move'),
            (lambda base, tune: tune.update(seeds=7), ': config.tune or its arms. Move'),
            (lambda base, tune: tune['arms'].pop(), ': config.tune or its arms. Move'),
        ],
    )
    def test_evidence_is_stale_with_reason(self, written, tmp_path, monkeypatch, change, reason):
        state, why = self.state(written, tmp_path, monkeypatch, change)
        assert state == 'stale' and reason in why


class TestPodStudy:
    NAME = 'configs/studies/muon_124m.py on v5e:4x4'

    @pytest.fixture
    def open_study(self, tmp_path, monkeypatch):
        monkeypatch.chdir(ROOT)
        return lambda: open_evidence(self.NAME, tmp_path)

    def test_study_without_runs_is_out_of_reach(self, open_study):
        """A study on a pod has the cost of its plan in place of runs."""
        pod_study = open_study()
        assert pod_study.state == 'out of reach here' and 'needs v5e:4x4' in pod_study.why
        pod_study.plan.parent.mkdir()
        write_json(pod_study.plan, {'topology': 'v5e:4x4', 'chip_hours': 100.0, 'waves': (3, 5)})
        selection = {'arm': {'optim.name': 'muon'}}
        pod_claim = claim(
            Condition('pod', 'speedup', selection, 1.5, math.inf), studies={'pod': self.NAME}
        )
        decision = decide(pod_claim, {self.NAME: open_study()})
        assert decision.verdict == 'infeasible here'
        assert decision.why == '300 to 500 chip-hours on v5e:4x4 would decide it'
        (row,) = board.table_rows([decision], {})
        assert row['note'] == decision.why
        pod_study.folder.mkdir()  # of a pod's runs, which are not read
        write_json(pod_study.folder / 'sweep.json', {'base': {}})
        with pytest.raises(ValueError):
            open_study()

    def test_plan_path_depends_on_runs(self, open_study):
        pod_study = open_study()
        base, sweep, _ = split_sweep(ConfigParser('config').parse(pod_study.config))
        other_arms = ArmPlan(base, sweep, {'optim.lr': None, 'seeds': 3})
        assert dataclasses.replace(pod_study, arms=other_arms).plan != pod_study.plan
        assert dataclasses.replace(pod_study, topology='v6e:4x4').plan != pod_study.plan
        assert f'--out={pod_study.plan}' in pod_study.plan_command

    def test_run_flag_plans_pod_study_without_training(self, tmp_path, monkeypatch):
        """--run writes the missing plans, each once."""
        monkeypatch.chdir(ROOT)
        plan, runs = tmp_path / 'plans' / 'it.json', tmp_path / 'runs'
        code = f'open({str(runs)!r}, "a").write("x"); open({str(plan)!r}, "w")'
        pod_study = SimpleNamespace(
            name='it', state='out of reach here', plan=plan, plan_command=['-c', code]
        )
        decisions = [SimpleNamespace(evidence={'it': pod_study}, verdict='infeasible here')] * 2
        train_open_claims(decisions)
        train_open_claims(decisions)
        assert runs.read_text() == 'x'
        with pytest.raises(ValueError, match='exited with status 3'):
            pod_study.plan, pod_study.plan_command = (
                tmp_path / 'none',
                ['-c', 'raise SystemExit(3)'],
            )
            train_open_claims(decisions)


@pytest.mark.full
def test_broken_method_is_not_reproduced(tmp_path, monkeypatch):
    """SELU with alpha of ELU has no such fixed point, and the project's claim notices."""
    ranges = {'variance_behind_32_layers_of_selu': (0.9, 1.1)}
    selu_claim = TestMeasureEvidence().claim_within(**ranges)
    for fn, expected in ((ACTIVATIONS['selu'].fn, HOLDS), (jax_elu, FAILS)):
        row = dataclasses.replace(ACTIVATIONS['selu'], fn=fn)
        monkeypatch.setitem(ACTIVATIONS, 'selu', row)
        path = tmp_path / TestMeasureEvidence.PATH
        evidence.compute_measure('self_normalizing', path)
        decision = decide(
            selu_claim,
            {TestMeasureEvidence.NAME: open_evidence(TestMeasureEvidence.NAME, tmp_path)},
        )
        assert [condition.outcome for condition in decision.conditions] == [expected]


def jax_elu(x):
    return 1.0507 * np.where(x > 0, x, np.expm1(np.minimum(x, 0)))


@pytest.mark.parametrize(
    'device, cores', [('2-core x86_64 CPU', 2), ('8 x TPU v5e', 8), ('CPU', 1), (None, 1)]
)
def test_counts_cores(device, cores):
    assert count_cores(device) == cores


class TestRegister:
    def test_notes_when_criterion_was_recorded(self, study, tmp_path):
        registered = claim(condition('layernorm', high=0.0))
        without_runs = dataclasses.replace(study, ablation=None)
        entries = register.add_entries(tmp_path, [registered], {'study.py': without_runs})
        assert register.entry_note(registered, entries) == ''
        assert (
            register.add_entries(tmp_path, [registered], {'study.py': study}) == entries
        )  # the first counts
        changed = dataclasses.replace(registered, conditions=[condition('layernorm', high=0.1)])
        assert 'the criterion was changed after' in register.entry_note(changed, entries)
        late = register.add_entries(tmp_path / 'late', [registered], {'study.py': study})
        assert f'recorded after {study.fresh_runs} runs on new seeds' in register.entry_note(
            registered, late
        )
        assert study.fresh_runs >= 10 and register.read_entries(tmp_path) == entries


class TestBoard:
    def test_rows_are_sorted_by_verdict(self, study):
        decisions = [
            decide_conditions(study, condition('layernorm', high=-9.0)),
            decide_conditions(study, condition('layernorm', high=0.0)),
        ]
        rows = board.table_rows(decisions, {})
        assert [row['verdict'] for row in rows] == ['reproduced', 'not reproduced']
        assert rows[0]['effect'].startswith('-0.1') and rows[0]['runs'] == study.runs
        first, second, total = board.summary_lines(decisions)
        assert (first, second) == (
            '2 claims',
            '2 tested on language models on text: 1 reproduced, 1 not reproduced',
        )
        assert total.startswith(f'Total cost: {study.runs} training runs, 0 measures')  # each once

    @pytest.mark.parametrize(
        ('numbers', 'text'),
        [
            ((0.25, 0.2, 0.3), '+0.250 [+0.200, +0.300]'),
            ((6.87e-5, 6.8e-5, 6.9e-5), '+6.87e-05 [+6.80e-05, +6.90e-05]'),
            ((0.000605, 0.0003, 0.0009), '+0.000605 [+0.000300, +0.000900]'),
            ((0.02, -0.0002, 0.04), '+0.0200 [-0.000200, +0.0400]'),
            ((0.0, 0.0, 0.0), '+0.000 [+0.000, +0.000]'),
        ],
    )
    def test_small_effects_are_not_zero(self, study, numbers, text):
        decision = decide_conditions(study, condition('layernorm', high=0.0))
        estimated = dataclasses.replace(decision.conditions[0], estimate=Estimate(*numbers, n=5))
        decision = dataclasses.replace(decision, conditions=[estimated])
        assert board.table_rows([decision], {})[0]['effect'] == text

    def test_counts_computed_claims_separately(self, study, tmp_path):
        trained, computed = 'measure:bigrams', 'measure:memory_of_optimizers'
        decisions = [decide_conditions(study, condition('layernorm', high=0.0))]
        for name, value in (
            (trained, 'excess_of_moving_average_over_noise_contrastive'),
            (computed, 'state_of_lion_over_adamw_of_llama_1b'),
        ):
            measured_claim = claim(
                Condition('it', 'within', {'value': value}, 0.0, 1.0), studies={'it': name}
            )
            decisions.append(decide(measured_claim, {name: open_evidence(name, tmp_path)}))
        assert board.summary_lines(decisions)[1:4] == [
            '1 tested on language models on text: 1 reproduced',
            '1 tested on small models of other data: 1 not yet tested',
            '1 tested by computation alone: 1 not yet tested',
        ]
        assert [row['by'] for row in board.table_rows(decisions, {})] == [
            'language models on text',
            'small models of other data',
            'computation alone',
        ]

    def test_page_states_differences_before_verdict(self, study, tmp_path):
        decision = decide_conditions(study, condition('dyt', low=0.0))
        index, page, _ = board.write_pages(tmp_path, [decision], {})
        text = page.read_text()
        headings = [line for line in text.splitlines() if line.startswith('## ')]
        assert headings == [
            '## What the paper claims',
            '## How it was tested',
            '## Results',
            '## Can the test tell?',
            '## Verdict: undecided',
            '## Repeat it',
        ]
        assert '| loss of dyt - loss of rmsnorm (nats per token) | ' in text
        assert '] | at least 0 | undecided |' in text
        assert 'unknown' in text and 'A finer or wider search of the learning rate' in text
        assert 'python train.py --config=study.py' in text
        board_text = index.read_text()
        assert '[It is so](mine.md)' in board_text and '### Norms' in board_text
        assert '## Papers out of scope' in board_text and 'HELM' in board_text
        json.dumps(board.table_rows([decision], {}))

    def test_page_names_quantity_and_cost(self, study, tmp_path):
        """A label replaces the name that the study gives to a quantity."""
        labelled = dataclasses.replace(
            condition('layernorm', high=0.0), label='loss difference (nats per token)'
        )
        decision = decide_conditions(study, labelled)
        index, page, _ = board.write_pages(tmp_path, [decision], {})
        text = page.read_text()
        assert '| loss difference (nats per token) | -0.1' in text
        assert '| at most 0 | holds | ' in text
        assert 'The condition holds: the whole 95% interval' in text
        hours = study.core_seconds / 3600
        cost = f'{study.runs} runs, {hours:.2f} core-hours (about 1 minute on two cores)'
        assert f'- `study.py`: {cost}' in text
        assert '| loss difference (nats per token): at most 0 |' in index.read_text()

    def test_page_links_paper_and_code(self, tmp_path, monkeypatch):
        monkeypatch.chdir(ROOT)
        claims = read_claims(only=['lion_memory'])
        decisions, _ = read_board(claims, tmp_path, ROOT / 'docs' / 'claims' / 'board.json')
        _, page, _ = board.write_pages(Path(tmp_path), decisions, {})
        text = page.read_text()
        assert '[arXiv:2302.06675](https://arxiv.org/abs/2302.06675), Symbolic' in text
        code = os.path.relpath(ROOT / 'eval/claims/measures/memory.py', tmp_path)
        assert f'[eval/claims/measures/memory.py]({code})' in text
        assert '| 0.500 | between 0.495 and 0.505 | holds | exact |' in text

    def test_verdict_counts_outcomes(self):
        counted = page._count_outcomes([HOLDS, UNDECIDED, HOLDS, FAILS])
        assert counted == 'Of 4 conditions, 2 hold, 1 fails and 1 is undecided.'
        assert page._count_outcomes([FAILS, FAILS]) == 'Both conditions fail.'
        assert page._count_outcomes([HOLDS] * 3) == 'All 3 conditions hold.'
