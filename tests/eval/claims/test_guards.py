"""Property: a verdict needs a control that holds and, unless nothing holds, a rejected twin."""

import dataclasses
import math
import re

import numpy as np
import pytest

from eval.claims import board
from eval.claims.decide import ConditionResult, conclude, decide, probability_if_equal
from eval.claims.estimates import HOLDS, UNDECIDED, Estimate
from eval.claims.record import RecordedEvidence, merge_decisions, read_record
from tests.eval.claims.builders import claim, condition, mistake


class TestGuards:
    """A verdict needs a test that finds a known effect, and that a broken method does not pass."""

    HOLDING, FAILING, OPEN = {'low': -9.0, 'high': 0.0}, {'low': 0.0}, {'high': -0.1}

    def decide_guarded(self, study, holds, control, twin):
        """control: bounds. twin: an arm."""
        control, twin = (
            [dataclasses.replace(condition(arm, **bounds), label='an effect')] if bounds else []
            for arm, bounds in (('layernorm', control), (twin, holds if twin else None))
        )
        guarded = claim(condition('layernorm', **holds))
        return decide(dataclasses.replace(guarded, control=control, twin=twin), {'study.py': study})

    @pytest.mark.parametrize(
        ('holds', 'control', 'twin', 'verdict', 'why'),
        [
            (HOLDING, HOLDING, 'none', 'reproduced', ''),
            (HOLDING, HOLDING, None, 'not checked', 'say "reproduced", but .* broken method'),
            (HOLDING, None, 'none', 'not checked', 'say "reproduced", but .* effect'),
            (HOLDING, HOLDING, 'layernorm', 'not valid', 'reject .*: "an effect: .*" holds'),
            (HOLDING, FAILING, 'none', 'not valid', 'find .*: "an effect: .*" fails'),
            (FAILING, HOLDING, None, 'not reproduced', ''),
            (FAILING, HOLDING, 'none', 'not reproduced', ''),
            (FAILING, None, 'none', 'not checked', 'say "not reproduced", but .* effect'),
            (FAILING, FAILING, None, 'not valid', 'find .*: "an effect: .*" fails'),
            (OPEN, None, None, 'undecided', ''),
        ],
    )
    def test_verdict_needs_control_and_twin(self, study, holds, control, twin, verdict, why):
        decision = self.decide_guarded(study, holds, control, twin)
        assert decision.verdict == verdict
        assert re.search(why, decision.why) if why else not decision.why

    def test_unmeasured_twin_is_no_flaw(self, study):
        """It might still fail; until then there is no verdict."""
        decision = self.decide_guarded(study, self.HOLDING, self.HOLDING, 'layernorm')
        twin = [*decision.twin, dataclasses.replace(decision.twin[0], estimate=None)]
        concluded = conclude(
            decision.claim, decision.conditions, decision.evidence, decision.control, twin
        )
        assert concluded.verdict == 'not checked'

    def test_twin_tells_nothing_where_the_method_fails(self, study):
        """The method meets one of two conditions, of which its mistake fails only the second."""
        met, missed = condition('layernorm', high=0.0), condition('layernorm', low=0.0)
        passing, failing = (dataclasses.replace(row, label='a mistake') for row in (met, missed))
        for twin, verdict in (
            ([passing, failing], 'not valid'),
            ([failing], 'not checked'),
            ([mistake(met), failing], 'partly reproduced'),
        ):
            tested = dataclasses.replace(claim(met, missed), twin=twin)
            assert decide(tested, {'study.py': study}).verdict == verdict

    def test_page_and_record_have_guards(self, study, tmp_path):
        """A record has the guards, and knows what another claim has measured on the same study."""
        dyt = dataclasses.replace(condition('dyt', high=9.0), label='an effect')
        guarded = dataclasses.replace(claim(condition('layernorm', high=0.0)), control=[dyt])
        decision = decide(guarded, {'study.py': study})
        assert decision.control[0].outcome == 'holds'
        _, page, _ = board.write_pages(tmp_path, [decision], {})
        assert '| control, must hold | an effect | ' in page.read_text()
        recorded = read_record(tmp_path / 'board.json', [guarded])[0]['mine']
        assert recorded.control[0].estimate.value == decision.control[0].estimate.value
        # As a claim of its own, and for a claim that has no record of it.
        second = dataclasses.replace(claim(condition('dyt', high=9.0)), name='second')
        plain = dataclasses.replace(guarded, control=())
        decisions = [decide(claim, {'study.py': study}) for claim in (plain, second)]
        index, *_ = board.write_pages(tmp_path, decisions, {})
        assert '1 reproduced, 1 not checked' in index.read_text()
        recorded = read_record(tmp_path / 'board.json', [guarded, second])[0]['mine']
        assert recorded.control[0].outcome == 'holds'
        # A guard that was recorded before its quantity was measured does not hide it.
        third = dataclasses.replace(plain, name='third', control=guarded.control)
        unmeasured = [dataclasses.replace(decision.control[0], estimate=None)]
        decisions += [dataclasses.replace(decision, claim=third, control=unmeasured)]
        board.write_pages(tmp_path, decisions, {})
        recorded = read_record(tmp_path / 'board.json', [second, third])[0]['third']
        assert recorded.control[0].outcome == 'holds'
        board.write_pages(tmp_path, decisions[:2], {})
        recorded = read_record(tmp_path / 'board.json', [guarded])[0]['mine']
        assert recorded.control[0].estimate is None and recorded.verdict == 'not checked'


class TestTwinOfALaterStudy:
    """HOLDS is in a record, and the study of the twin was named and trained since."""

    @pytest.fixture
    def later_claim(self, study, tmp_path):
        """The claim without the later study, in a board.json, and with it."""
        older = claim(condition('layernorm', low=-9.0, high=0.0))
        older = dataclasses.replace(older, twin=())
        board.write_pages(tmp_path, [decide(older, {'study.py': study})], {})
        twin = dataclasses.replace(mistake(older.conditions[0]), study='later', label='a mistake')
        newer = dataclasses.replace(
            older, studies={**older.studies, 'later': 'later.py'}, twin=[twin]
        )
        return newer, read_record(tmp_path / 'board.json', [newer])[0]['mine']

    def test_untrained_study_leaves_the_claim_unchecked(self, later_claim):
        newer, decision = later_claim
        assert decision.verdict == 'not checked' and decision.conditions[0].outcome == HOLDS
        assert decision.evidence['later'].command == () and decision.claim == newer

    def test_trained_study_is_merged(self, later_claim, study):
        newer, decision = later_claim
        trained = decide(newer, {'study.py': study, 'later.py': study})
        merged = merge_decisions(decision, trained, ['later'])
        assert merged.verdict == 'reproduced' and merged.twin[0].outcome == 'fails'
        assert merged.evidence['whole'] is decision.evidence['whole']
        assert merged.evidence['later'] is study
        assert merge_decisions(decision, trained, []).verdict == 'not checked'

    def test_stale_study_rejects_nothing(self, later_claim, study):
        newer, _ = later_claim
        stale = RecordedEvidence('later.py', 'stale', 'it has changed', 9, 1.0, (), trains=True)
        valid = decide(newer, {'study.py': study, 'later.py': study})
        evidence = {'whole': study, 'later': stale}
        again = conclude(newer, valid.conditions, evidence, valid.control, valid.twin)
        assert again.verdict == 'not checked' and again.twin[0].estimate is None


class TestProbabilityIfEqual:
    """How often a difference of 0 would meet the condition, with intervals as wide as measured."""

    @staticmethod
    def compute(low, high, interval=(-0.01, 0.03), quantity='difference'):
        tested = condition('layernorm', low, high, quantity=quantity)
        estimate = Estimate(0.01, *interval, 5)
        return probability_if_equal(ConditionResult(tested, '', UNDECIDED, estimate, None))

    @pytest.mark.parametrize('bounds', [(-0.03, 0.03), (-math.inf, 0.03), (-0.025, math.inf)])
    def test_simulation(self, bounds):
        centers = np.random.default_rng(0).normal(0, 0.02 / 1.959964, 20_000)
        outcomes = [Estimate(x, x - 0.02, x + 0.02, 5).outcome(*bounds) for x in centers]
        share = outcomes.count(HOLDS) / len(outcomes)
        assert 0.6 < share < 0.9
        assert self.compute(*bounds) == pytest.approx(share, abs=0.01)

    def test_only_ranges_around_0(self):
        assert self.compute(-math.inf, 0.0) is self.compute(0.1, math.inf) is None
        assert self.compute(-0.03, 0.03, quantity='speedup') is None
        assert self.compute(-0.03, 0.03, interval=(-math.inf, 0.03)) is None
        assert self.compute(-0.01, 0.01) == 0  # narrower than the interval
