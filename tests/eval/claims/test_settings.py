"""Property: a verdict that fails at another value of a nuisance factor depends on the setting."""

import dataclasses

import pytest

from eval.claims import board
from eval.claims.claim import NuisanceSetting
from eval.claims.decide import conclude, decide
from eval.claims.record import merge_decisions, read_record
from tests.eval.claims.builders import claim, condition
from tests.eval.claims.tuned_study import LOSSES, write_study
from tests.eval.tuned_fixture import bowl

WORSE = LOSSES | {'layernorm': bowl(3.1, noise=0.005, number=1)}


@pytest.fixture(scope='module')
def small_start(tmp_path_factory):
    """The study at another start, where LayerNorm is worse by 0.1."""
    study = write_study(tmp_path_factory.mktemp('small_start'), WORSE)
    return dataclasses.replace(study, name='small_start.py')


@pytest.fixture(scope='module')
def equal_start(tmp_path_factory):
    """The study at another start, where LayerNorm is as good as RMSNorm."""
    losses = LOSSES | {'layernorm': bowl(3.0, noise=0.005, number=1)}
    return write_study(tmp_path_factory.mktemp('equal_start'), losses)


def repeat_elsewhere(tested, *, twin=None, **bounds):
    """Returns a claim with its conditions, a control, and perhaps a broken method, in the study
    'small_start'.
    """
    conditions = [dataclasses.replace(row, study='small_start') for row in tested.conditions]
    control = dataclasses.replace(
        condition('layernorm', **bounds), study='small_start', label='an effect'
    )
    broken = [dataclasses.replace(twin, study='small_start', label='a mistake')] if twin else []
    places = '1', '1/8', {'whole': 'small_start'}
    setting = NuisanceSetting('start', *places, conditions, [control], broken)
    studies = {**tested.studies, 'small_start': 'small_start.py'}
    return dataclasses.replace(tested, studies=studies, settings=[setting])


class TestVerdict:
    def decide(self, study, small_start, condition, twin=None, **control):
        tested = repeat_elsewhere(claim(condition), twin=twin, **(control or {'low': -9.0}))
        return decide(tested, {'study.py': study, 'small_start.py': small_start})

    def test_opposite_outcome_makes_it_depend(self, study, small_start):
        better = condition('layernorm', low=-9.0, high=0.0)
        decision = self.decide(study, small_start, better)
        assert decision.verdict == 'setting-dependent'
        assert decision.why == 'start: holds at 1, fails at 1/8'

    def test_same_or_undecided_outcome_does_not(self, study, small_start):
        for bounds in ({'low': -9.0, 'high': 0.2}, {'low': -9.0, 'high': 0.1}):
            decision = self.decide(study, small_start, condition('layernorm', **bounds))
            assert decision.verdict == 'reproduced' and not decision.why
        assert decision.settings[0].verdict == 'undecided'

    def test_equal_arms_need_control(self, study, equal_start, small_start):
        """Two arms may be equal because nothing matters in a setting; a difference is one."""
        as_good = condition('layernorm', low=-0.05, high=0.2)  # fails at first, by a better loss
        for bounds, verdict in (({'low': -9.0}, 'setting-dependent'), ({'low': 1.0}, '')):
            decision = self.decide(study, equal_start, as_good, **bounds)
            assert decision.verdict == (verdict or 'not reproduced')
        assert decision.settings[0].verdict == 'not valid'
        decision = self.decide(study, small_start, as_good, low=1.0)
        assert decision.verdict == 'setting-dependent'

    def test_broken_method_that_passes_decides_nothing(self, study, small_start):
        """Without one, the claim fails here and holds at the other start."""
        worse = condition('layernorm', low=0.0, high=9.0)
        for arm, verdict in (('layernorm', 'not valid'), ('none', 'reproduced')):
            decision = self.decide(study, small_start, worse, condition(arm, low=0.0, high=9.0))
            assert decision.settings[0].verdict == verdict
        assert decision.verdict == 'setting-dependent'

    def test_setting_decides_nothing_alone(self, study, small_start):
        """A claim that is undecided stays so, whatever another setting shows."""
        decision = self.decide(study, small_start, condition('layernorm', high=-0.1))
        assert decision.settings[0].verdict == 'not reproduced'
        assert decision.verdict == 'undecided'


def test_stale_study_contradicts_nothing(study, small_start):
    tested = repeat_elsewhere(claim(condition('layernorm', low=-9.0, high=0.0)), low=-9.0)
    decision = decide(tested, {'study.py': study, 'small_start.py': small_start})
    stale = dataclasses.replace(small_start, state='stale', why='it has changed')
    evidence = {'whole': study, 'small_start': stale}
    guards = decision.control, decision.twin, decision.settings
    again = conclude(tested, decision.conditions, evidence, *guards)
    assert again.verdict == 'reproduced' and again.settings[0].verdict == 'not yet tested'


def test_page_and_record_have_settings(study, small_start, tmp_path):
    tested = repeat_elsewhere(claim(condition('layernorm', low=-9.0, high=0.0)), low=-9.0)
    decision = decide(tested, {'study.py': study, 'small_start.py': small_start})
    index, page, _ = board.write_pages(tmp_path, [decision], {})
    assert '1 setting-dependent' in index.read_text()
    assert '| start | 1 | 1/8 | control: an effect: at least -9 | ' in page.read_text()
    assert 'With 1/8 as the start, the claim fails.' in page.read_text()
    recorded = read_record(tmp_path / 'board.json', [tested])[0]['mine']
    assert recorded.verdict == decision.verdict and recorded.why == decision.why


def test_later_setting_is_merged(study, small_start, tmp_path):
    """The board has the claim without the setting, which is named and trained since."""
    older = claim(condition('layernorm', low=-9.0, high=0.0))
    board.write_pages(tmp_path, [decide(older, {'study.py': study})], {})
    newer = repeat_elsewhere(older, low=-9.0)
    recorded = read_record(tmp_path / 'board.json', [newer])[0]['mine']
    assert recorded.verdict == 'reproduced'
    _, page, _ = board.write_pages(tmp_path, [recorded], {})
    assert 'With 1/8 as the start, the claim has not been tested.' in page.read_text()
    trained = decide(newer, {'study.py': study, 'small_start.py': small_start})
    merged = merge_decisions(recorded, trained, ['small_start'])
    assert merged.verdict == 'setting-dependent'
    assert merge_decisions(recorded, trained, []).verdict == 'reproduced'
