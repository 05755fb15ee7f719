"""Contract: an incomplete or invalid file of a claim is an error that names the file; every claim
of the project is valid.
"""

import dataclasses
import math

import pytest

from eval.claims.claim import FOLDER, Fidelity, read_claim, read_claims
from eval.claims.decide import decide
from eval.claims.evidence import open_evidence
from tests import ROOT

GOOD = '''"""Muon is better than AdamW.

Paper:    arXiv:2502.16982
Says:     half of the compute
          is enough.
Here:     a small model.
Counts:   a lower loss.
"""

PART = 'optimizers'
STUDIES = {'whole': 'configs/studies/optimizers_tuned.py', 'fixed': 'measure:self_normalizing'}
HOLDS = (
    {'study': 'whole', 'arm': {'optim.name': 'muon'}, 'difference': (None, 0.0)},
    {'study': 'fixed', 'value': 'slope', 'within': (0.5, 1.0), 'label': 'slope of the map'},
)
FIDELITY = {
    'Muon': {'setting': 'momentum 0.95', 'published': 'with decay', 'source': 'arXiv:2502.16982'},
}
'''


def write(folder, text, name='mine'):
    path = folder / f'{name}.py'
    path.write_text(text)
    return path


def test_claim_file_is_read(tmp_path):
    claim = read_claim(write(tmp_path, GOOD))
    assert (claim.name, claim.title, claim.part) == (
        'mine',
        'Muon is better than AdamW.',
        'optimizers',
    )
    assert claim.texts['Says'] == 'half of the compute is enough.'
    first, second = claim.conditions
    assert (first.low, first.high) == (-math.inf, 0.0) and first.range_text == 'at most 0'
    assert second.of == {'value': 'slope'} and second.range_text == 'between 0.5 and 1'
    assert (first.label, second.label) == ('', 'slope of the map')


def test_file_withdraws_or_qualifies_verdict(tmp_path):
    plain = read_claim(write(tmp_path, GOOD))
    assert plain.withdrawn == plain.caution == ''
    text = GOOD + "WITHDRAWN = 'It ran with another rate.'\nCAUTION = 'Small.'\n"
    claim = read_claim(write(tmp_path, text))
    assert (claim.withdrawn, claim.caution) == ('It ran with another rate.', 'Small.')
    assert claim.digest == plain.digest  # what counts is the same


def test_guards_are_read(tmp_path):
    """The digest is of the criterion, HOLDS, and does not change with guards."""
    twin = {'study': 'fixed', 'value': 'mean', 'within': (0.5, 1.0), 'label': 'broken slope'}
    control = {'study': 'fixed', 'value': 'variance', 'within': (0.0, 2.0), 'label': 'variance'}
    claim = read_claim(write(tmp_path, f'{GOOD}TWIN = ({twin},)\nCONTROL = ({control},)\n'))
    assert [guard.label for guard in (*claim.control, *claim.twin)] == ['variance', 'broken slope']
    assert claim.digest == read_claim(write(tmp_path, GOOD)).digest


@pytest.mark.parametrize(
    ('control', 'twin', 'message'),
    [
        ('()', "({'study': 'fixed', 'value': 'mean', 'within': (0.5, 1.0)},)", 'must have a label'),
        ('()', "({**ROW, 'within': (0.0, 1.0)},)", 'the range of one in HOLDS'),
        ('(ROW,)', '(ROW,)', 'must not be in CONTROL too'),
        ('ROW', '()', 'CONTROL must be a tuple of conditions'),
        ("('study',)", '()', 'each condition in CONTROL must be a dict'),
    ],
)
def test_guard_that_guards_nothing_is_refused(tmp_path, control, twin, message):
    row = {'study': 'fixed', 'value': 'mean', 'within': (0.5, 1.0), 'label': 'broken slope'}
    text = f'{GOOD}CONTROL = {control}\nTWIN = {twin}\n'.replace('ROW', str(row))
    with pytest.raises(ValueError, match=message):
        read_claim(write(tmp_path, text))


CONTROL = (
    {'study': 'whole', 'arm': {'optim.name': 'lion'}, 'difference': (0.0, None), 'label': 'Lion'},
    {'study': 'fixed', 'value': 'variance', 'within': (0.0, 2.0), 'label': 'variance'},
)
SETTING = {
    'factor': 'length',
    'reference': '200 steps',
    'value': '400 steps',
    'studies': {'whole': 'half', 'fixed': 'fixed'},
}


def write_setting(folder, **changes):
    half = "STUDIES = {'half': 'configs/studies/optimizers_tuned.py:half', "
    text = GOOD.replace('STUDIES = {', half)
    return write(folder, f'{text}CONTROL = {CONTROL}\nNUISANCES = ({SETTING | changes},)\n')


def write_equality(path):
    """Makes a condition of a file one that equal arms meet."""
    path.write_text(
        path.read_text().replace("'difference': (None, 0.0)", "'difference': (None, 0.1)")
    )
    return path


def test_setting_repeats_conditions(tmp_path):
    """In its own studies, with controls where equal arms would meet one; the criterion does not
    change.
    """
    claim = read_claim(write_setting(tmp_path))
    (setting,) = claim.settings
    assert [row.study for row in setting.conditions] == ['half', 'fixed'] and not setting.control
    repeated = setting.conditions[0]
    assert dataclasses.replace(repeated, study='whole') == claim.conditions[0]
    assert claim.digest == read_claim(write(tmp_path, GOOD)).digest
    (setting,) = read_claim(write_equality(write_setting(tmp_path))).settings
    assert [row.study for row in setting.control] == ['half', 'fixed']


@pytest.mark.parametrize(
    ('changes', 'message'),
    [
        ({'value': ''}, 'value of NUISANCES must be a non-empty text'),
        ({'studies': {'whole': 'half'}}, 'for each study in HOLDS .*; got'),
        ({'studies': {'whole': 'haf', 'fixed': 'fixed'}}, r'another of STUDIES \(half, whole'),
        ({'level': '2'}, 'a dict of factor, reference, value, studies; got'),
    ],
)
def test_setting_that_repeats_nothing_is_refused(tmp_path, changes, message):
    with pytest.raises(ValueError, match=message):
        read_claim(write_setting(tmp_path, **changes))


def test_setting_that_equals_meet_needs_control(tmp_path):
    path = write_setting(tmp_path)
    path.write_text(path.read_text().replace('CONTROL =', '_CONTROL ='))
    assert not read_claim(path).settings[0].control
    path.write_text(
        path.read_text().replace("'difference': (None, 0.0)", "'difference': (None, 0.1)")
    )
    with pytest.raises(ValueError, match='NUISANCES needs a CONTROL in one of'):
        read_claim(path)


def test_file_states_fidelity(tmp_path):
    claim = read_claim(write(tmp_path, GOOD))
    fidelity = Fidelity('momentum 0.95', 'with decay', 'arXiv:2502.16982')
    assert claim.fidelity == {'Muon': fidelity}
    edited = read_claim(write(tmp_path, GOOD.replace('with decay', 'decay 0.1')))
    assert edited.digest == claim.digest  # what counts is the same


def test_digest_covers_criterion(tmp_path):
    """Other texts and labels, and a study of broken methods, are the same claim; another bound, arm
    or study of a condition is not.
    """
    digest = read_claim(write(tmp_path, GOOD)).digest
    same = {
        'a small model': 'another',
        'slope of the map': 'another',
        'STUDIES = {': "STUDIES = {'twins': 'configs/studies/twins.py',",
    }
    for change in same.items():
        assert read_claim(write(tmp_path, GOOD.replace(*change))).digest == digest
    changes = {
        '(None, 0.0)': '(None, 0.1)',
        "'muon'": "'lion'",
        'optimizers_tuned.py': 'optimizers_tuned.py:half',
    }
    changed_digests = {
        read_claim(write(tmp_path, GOOD.replace(*change))).digest for change in changes.items()
    }
    assert len(changed_digests | {digest}) == 4


WRONG = {  # {text in GOOD: (its replacement, the message)}
    'Says:     half': ('half', 'Counts:, but lacks Says:'),
    "PART = 'optimizers'": ('', 'a claim file must define PART'),
    "'optimizers'\n": ("'optimisers'\n", 'PART must be one of'),
    "STUDIES = {'whole'": (
        "STUDIES = {'spare': 5, 'whole'",
        "STUDIES['spare'] must be a non-empty",
    ),
    'STUDIES =': ("STUDIES = {5: 'a.py'} |", 'STUDIES must be a dict of a config file'),
    'STUDIES = {': ('STUDIES = none | {', "name 'none' is not defined"),
    "'study': 'whole', ": ("'study': 'half', ", 'must be one of whole, fixed'),
    "'arm': {'optim.name': 'muon'}, ": (
        '',
        'and one of difference, speedup; got study, difference',
    ),
    "'difference': (None, 0.0)": ("'diference': (None, 0.0)", 'one of difference, speedup'),
    '(None, 0.0)': ('(None, "0")', 'one of which may be None'),
    '(0.5, 1.0)': ('(1.0, 0.5)', 'a range with low < high'),
    "'within'": ("'difference'", 'one of within'),
    'HOLDS = (': ("WITHDRAWN = ''\nHOLDS = (", 'WITHDRAWN must be a non-empty text'),
    'PART = ': (
        'CAUTION = True\nPART = ',
        'CAUTION must be a non-empty text on one line, got True',
    ),
    "'published': 'with decay', ": ('', 'must be a dict of setting, published, source'),
    'STUDIES = ': ("WITHDRAW = 'why'\nSTUDIES = ", "STUDIES, TWIN, WITHDRAWN; got 'WITHDRAW'"),
    "    {'study': 'fixed'": (
        "    'fixed', {'study': 'fixed'",
        'each condition in HOLDS must be a dict',
    ),
    '"""Muon': ('Muon', 'unterminated triple-quoted string'),
}


@pytest.mark.parametrize('fragment', WRONG)
def test_invalid_file_raises(tmp_path, fragment):
    replacement, message = WRONG[fragment]
    assert fragment in GOOD
    path = write(tmp_path, GOOD.replace(fragment, replacement, 1))
    with pytest.raises(ValueError) as error:
        read_claim(path)
    text = str(error.value)
    assert text.startswith(f'{path}: ') and '\n' not in text and message in text


def test_unknown_names_raise(tmp_path):
    with pytest.raises(ValueError, match=r'must contain claim files .* Set --claims to a folder'):
        read_claims(tmp_path)
    write(tmp_path, GOOD, 'muon')
    with pytest.raises(ValueError, match="no claim 'muom' Did you mean 'muon'"):
        read_claims(tmp_path, ['muom'])
    assert [claim.name for claim in read_claims(tmp_path, ['muon'])] == ['muon']


def test_project_claims_name_known_arms_and_values(tmp_path, monkeypatch):
    """Catches a claim that its study or measure no longer supports."""
    monkeypatch.chdir(ROOT)
    claims = read_claims(FOLDER)
    names = dict.fromkeys(study for claim in claims for study in claim.studies.values())
    evidence = {name: open_evidence(name, tmp_path) for name in names}
    for claim in claims:
        is_far = any(' on ' in study for study in claim.studies.values())
        verdict = 'infeasible here' if is_far else 'not yet tested'
        assert decide(claim, evidence).verdict == ('withdrawn' if claim.withdrawn else verdict)
        assert all(condition.label for condition in claim.conditions), claim.name
    assert len(claims) > 20
